"""Features that need files, beside the clients of a soak: adapters that come and go, and pictures.

Owns: a tiny model that reads pictures and adapters of it, the options that serve them, and that an answer
with an adapter or a picture is the one that was given when it was asked first.
Never: what ends a process (trouble.py).
"""

import asyncio
import base64
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from campaigns.adapters import write_adapter
from campaigns.servers.own_server import SERVED_NAME, OwnServer
from server.edge.http.http_client import ExchangeFailed, Timeouts, exchange
from tests.e2e.seeing_model import write_seeing_model
from tests.engine.media.made_pictures import picture

MAX_MODEL_LEN = 512
_NUM_ADAPTERS, _RANK, _NUM_PICTURES = 3, 4, 4
_TIMEOUT_S = 60.0
_LATER = frozenset({429, 503})
_SIZES = ((64, 48), (32, 96), (48, 48))


def prepare(folder: Path) -> tuple[str, ...]:
    """Write the model and its adapters; the words that serve them."""
    model, adapters = folder / "model", folder / "adapters"
    model.mkdir()
    adapters.mkdir()
    write_seeing_model(model)
    for number in range(_NUM_ADAPTERS):
        write_adapter(adapters / f"adapter-{number}", model, rank=_RANK, seed=number)
    served = ("--model", str(model), "--lora-directory", str(adapters), "--max-loras", "2")
    # Its tokenizer makes more tokens of a word than the built-in model's.
    room = ("--max-model-len", str(MAX_MODEL_LEN))
    return (*served, *room, "--speculative-config", '{"method":"suffix"}', "--data-parallel-size", "2")


class Features:
    """Clients of adapters and pictures. `ends` tells what happened, `faults` what should not have."""

    def __init__(
        self,
        server: OwnServer,
        *,
        seed: int,
        is_disturbed: Callable[[], bool],
        rest_s: float,
    ) -> None:
        self._server = server
        self._dice = random.Random(seed)
        self._is_disturbed = is_disturbed
        self._rest_s = rest_s
        self._known: dict[bytes, str] = {}
        """Text of each request, as it was answered first."""
        self.ends: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()

    async def run(self, until: asyncio.Event) -> None:
        """Go on until the event is set."""
        adapters = [self._adapter(number) for number in range(_NUM_ADAPTERS)]
        acts = [*adapters, self._picture, self._picture]
        await asyncio.gather(*(self._again_and_again(act, until) for act in acts))

    def report(self) -> str:
        return "features: " + ", ".join(f"{num} {end}" for end, num in sorted(self.ends.items()))

    async def _again_and_again(self, act: Callable[[], Any], until: asyncio.Event) -> None:
        while not until.is_set():
            try:
                await act()
            except (ExchangeFailed, OSError, TimeoutError) as error:
                self._judge_failure(f"feature: {type(error).__name__} {str(error)[:80]}")
            await asyncio.sleep(self._rest_s)

    def _judge_failure(self, fault: str) -> None:
        if self._is_disturbed():
            self.ends["disturbed"] += 1
        else:
            self.faults[fault] += 1

    def _adapter(self, number: int) -> Callable[[], Any]:
        name = f"adapter-{number}"

        async def act() -> None:
            """Load it, ask it some times, and unload it."""
            body = orjson.dumps({"lora_name": name, "lora_path": name})
            status, answer = await self._post("/v1/load_lora_adapter", body)
            if status != 200 and b"is loaded" not in answer:
                self._note("load", status, answer)
                return
            self.ends["loaded"] += 1
            for _ in range(self._dice.randint(1, 4)):
                prompt = f"{'x' * self._dice.randint(1, 12)}"
                fields = {"model": name, "prompt": prompt, "max_tokens": 12, "ignore_eos": True}
                await self._ask("adapter", "/v1/completions", fields)
                await asyncio.sleep(self._rest_s)
            status, answer = await self._post("/v1/unload_lora_adapter", orjson.dumps({"lora_name": name}))
            self._note("unload", status, answer)

        return act

    async def _picture(self) -> None:
        number = self._dice.randrange(_NUM_PICTURES)
        width, height = _SIZES[number % len(_SIZES)]
        file = picture(width, height, seed=number)
        is_broken = self._dice.random() < 0.1
        data = base64.b64encode(file[: len(file) // 2] if is_broken else file).decode()
        parts = [
            {"type": "text", "text": "What is this?"},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        ]
        fields = {"model": SERVED_NAME, "max_tokens": 8, "ignore_eos": True}
        fields |= {"messages": [{"role": "user", "content": parts}]}
        if is_broken:
            status, answer = await self._post("/v1/chat/completions", orjson.dumps(fields))
            self._note("broken picture", 200 if status == 400 else status or 1, answer)
        else:
            await self._ask("picture", "/v1/chat/completions", fields)

    async def _ask(self, name: str, path: str, fields: dict[str, Any]) -> None:
        body = orjson.dumps({"temperature": 0, **fields})
        status, answer = await self._post(path, body)
        self._note(name, status, answer)
        if status != 200:
            return
        choice = orjson.loads(answer)["choices"][0]
        text = choice.get("text") or choice["message"]["content"]
        if self._known.setdefault(body, text) != text:
            self.faults[f"{name}: another text than at first"] += 1

    def _note(self, name: str, status: int, answer: bytes) -> None:
        self.ends[f"{name} {status}"] += 1
        if status != 200 and status not in _LATER:
            self._judge_failure(f"{name}: {status} {answer[:120]!r}")

    async def _post(self, path: str, body: bytes) -> tuple[int, bytes]:
        target = self._server.target
        wire = target.request("POST", path, body)
        reply = await exchange(target, wire, timeouts=Timeouts(whole_s=_TIMEOUT_S))
        return reply.status, reply.body

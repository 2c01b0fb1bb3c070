"""The longest pause of a neighbour's stream beside the dearest requests that are let in.

    python -m campaigns.pauses [--beside grammars|bodies] [--seconds 8] [--args WORDS]

The stream alone first, then beside each kind of request: clients who ask again whatever becomes of it. The
pauses of the stream that is alone are the machine's own. On a machine that does other work they are long
already, and all rows with them: the table prints them first.

Owns: the requests, the rounds and their table. Never: judges; the promise is about a quiet machine.
"""

import argparse
import asyncio
import contextlib
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from bench.load.load_report import percentile
from campaigns.servers.own_server import SERVED_NAME, OwnServer, own_server
from server.http.http_client import ExchangeFailed, Timeouts, exchange

_NUM_CHOICES = 32
_TIMEOUT_S = 60.0
_COME_AGAIN_S = 0.05
_BODY_BYTES = 4 * 2**20 - 1024
"""Just below what a body may have."""
_NUM_ITEMS = 320 * 1000
"""Just below the number of items that a body may have."""
_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """Clients who send the same request again and again."""

    path: str
    body: Callable[[], bytes]
    num_clients: int = 1


def _grammar(**constraint: Any) -> Crowd:
    fields = {"prompt": "x", "n": _NUM_CHOICES, "max_tokens": 200, "structured_outputs": constraint}
    return Crowd(path=_COMPLETIONS, body=lambda: _json(fields), num_clients=4)


_PROPERTIES = {f"name{i}": {"type": "string"} for i in range(300)}
_GRAMMARS: dict[str, Crowd] = {
    "an ambiguous rule": _grammar(grammar='start: s\ns: "a" | s s | s s s'),
    "a worse one": _grammar(grammar="start: s\ns: /[a-z ]/ | s s | s s s | s s s s"),
    "counted repetitions": _grammar(regex="(.*a.{20}){5}"),
    "a schema of 300 properties": _grammar(json={"type": "object", "properties": _PROPERTIES}),
}


def _json(fields: dict[str, Any]) -> bytes:
    return orjson.dumps({"model": SERVED_NAME, **fields})


def _raw(prefix: bytes, piece: bytes, suffix: bytes, *, most: int = 2**30) -> bytes:
    """Repeat a piece until the body is as large as it may be, or has it `most` times."""
    num = min(most, (_BODY_BYTES - len(prefix) - len(suffix)) // len(piece))
    return prefix + piece * num + suffix


def _messages(num: int) -> list[dict[str, str]]:
    text = "word " * (_BODY_BYTES // num // 6)
    return [{"role": "user" if place % 2 == 0 else "assistant", "content": text} for place in range(num)]


def _tools(num: int) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(60)}}
    return [
        {"type": "function", "function": {"name": f"tool{i}", "parameters": parameters}} for i in range(num)
    ]


def _batch_file() -> bytes:
    """Form of an upload with as many lines as a batch may have, which nobody ever sends."""
    head = '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
    head += 'Content-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    lines = [f'{{"custom_id":"{i}","method":"POST","url":"/v1/x","body":{{}}}}\n' for i in range(50_000)]
    return f"{head}{''.join(lines)}\r\n--b--\r\n".encode()


_BODIES: dict[str, Crowd] = {
    "a text of 4 MiB": Crowd(path=_COMPLETIONS, body=lambda: _raw(b'{"prompt":"', b"word ", b'"}')),
    "one without spaces": Crowd(path=_COMPLETIONS, body=lambda: _raw(b'{"prompt":"', b"a", b'"}')),
    "320,000 tokens": Crowd(
        path=_COMPLETIONS, body=lambda: _raw(b'{"prompt":[', b"123,", b"7]}", most=_NUM_ITEMS)
    ),
    "320,000 empty lists": Crowd(
        path=_COMPLETIONS, body=lambda: _raw(b'{"x":[', b"[],", b"[]]}", most=_NUM_ITEMS // 2)
    ),
    "160,000 objects": Crowd(
        path=_COMPLETIONS, body=lambda: _raw(b'{"x":[', b'{"a":1},', b"{}]}", most=_NUM_ITEMS // 2)
    ),
    "2,000 messages": Crowd(path=_CHAT, body=lambda: _json({"messages": _messages(2000)})),
    "1,000 messages, rendered": Crowd(path=_CHAT, body=lambda: _json({"messages": _messages(1000)})),
    "128 tools of 60 parameters": Crowd(
        path=_CHAT, body=lambda: _json({"messages": _messages(2)[:1], "tools": _tools(128)})
    ),
    "embeddings of 2,000 texts": Crowd(
        path="/v1/embeddings", body=lambda: _json({"input": ["word " * 400] * 2000})
    ),
    "a text to /tokenize": Crowd(
        path="/tokenize", body=lambda: _raw(b'{"return_token_strs":true,"prompt":"', b"word ", b'"}')
    ),
    "65,536 tokens to /detokenize": Crowd(
        path="/detokenize", body=lambda: _json({"tokens": [123] * (64 * 1024)})
    ),
    "responses of 300 items": Crowd(path="/v1/responses", body=lambda: _json({"input": _messages(300)})),
    "an upload of 50,000 lines": Crowd(path="/v1/files", body=_batch_file),
}


async def measure(server: OwnServer, crowd: Crowd | None, seconds: float) -> tuple[list[float], Counter[str]]:
    """Seconds between the events of the stream, and what became of the others."""
    ends: Counter[str] = Counter()
    pauses_s: list[float] = []
    until = asyncio.Event()

    async def ask_again(crowd: Crowd, body: bytes) -> None:
        while not until.is_set():
            ends[str((await _post(server, crowd.path, body))[0])] += 1
            await asyncio.sleep(_COME_AGAIN_S)

    others = []
    if crowd is not None:
        body = crowd.body()
        others = [asyncio.create_task(ask_again(crowd, body)) for _ in range(crowd.num_clients)]
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    stream = _json({"prompt": "y", "max_tokens": 400, "stream": True, "ignore_eos": True})
    while loop.time() - began_s < seconds:
        pauses_s += (await _post(server, _COMPLETIONS, stream))[1]
    until.set()
    await asyncio.gather(*others)
    return pauses_s, ends


async def _post(server: OwnServer, path: str, body: bytes) -> tuple[int, list[float]]:
    last_s, pauses_s = 0.0, []

    def on_event(_: bytes, now_s: float) -> None:
        nonlocal last_s
        if last_s:
            pauses_s.append(now_s - last_s)
        last_s = now_s

    wire = server.target.request("POST", path, body)
    if path == "/v1/files":
        wire = wire.replace(b"application/json", b"multipart/form-data; boundary=b", 1)
    with contextlib.suppress(ExchangeFailed):
        reply = await exchange(server.target, wire, timeouts=Timeouts(whole_s=_TIMEOUT_S), on_event=on_event)
        return reply.status, pauses_s
    return 0, pauses_s


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m campaigns.pauses", allow_abbrev=False)
    parser.add_argument("--beside", choices=("grammars", "bodies"), help="only these; default both")
    parser.add_argument("--seconds", type=float, default=8.0, metavar="S", help="of each round")
    parser.add_argument("--args", default="", metavar="WORDS", help="added to `tokenyard serve`")
    options = parser.parse_args(list(argv))
    kinds = {"grammars": _GRAMMARS, "bodies": _BODIES}
    chosen = kinds[options.beside] if options.beside else {**_GRAMMARS, **_BODIES}
    rounds: dict[str, Crowd | None] = {"alone": None, **chosen}
    print(f"{'':28}{'tokens/s':>9}{'p99':>8}{'longest':>9}  ms; replies to the others by status")
    with (
        tempfile.TemporaryDirectory() as folder,
        own_server(["--state-folder", folder, *options.args.split()]) as server,
    ):
        for name, crowd in rounds.items():
            pauses_s, ends = asyncio.run(measure(server, crowd, options.seconds))
            ordered = sorted(pauses_s) or [0.0]
            rate = len(ordered) / options.seconds
            p99, longest = percentile(ordered, 99) * 1e3, ordered[-1] * 1e3
            print(f"{name:28}{rate:9.0f}{p99:8.0f}{longest:9.0f}  {dict(ends)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

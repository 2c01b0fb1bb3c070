"""Requests of the clients of a soak: a random mix of everything, each with the ends that it may have.

Owns: the acts, how often each is drawn, and what is wrong with an end.
Never: the server or the time that a soak takes (run.py).

An act is sent, and ends in exactly one of: a whole reply, a stream with one finish reason for each choice, an
error that this act may meet, or the hang-up that was part of it. Anything else is a fault.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from bench.load.workload import words
from campaigns.servers.own_server import SERVED_NAME
from server.edge.http.http_client import ExchangeFailed, Reply, Target, Timeouts, exchange

_TIMEOUT_S = 60.0
_NUM_EXAMPLES = 10
_OVERLOAD = frozenset({"server_overloaded"})
_TROUBLE = frozenset({"engine_restarted", "not_ready", "engine_died_twice", "server_error", "low_memory"})
"""Error codes around the death of an engine process, `server_error` by events of /v1/responses, and where
memory has run out."""
_TOO_LATE = frozenset({"deadline_exceeded"})
_COME_AGAIN_S = 0.3
HUNG_UP = "hung up"

_PAGES = (
    *("/metrics", "/health", "/load", "/v1/models", "/api/tags", "/api/ps", "/props", "/tokenizer_info"),
    *("/admin/requests", "/admin/server", "/openapi.json"),
)

Known = tuple[bytes, bytes]
"""The body of a request, and the reply's choices, as JSON, that it has had when it was alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """One request, and what may become of it."""

    name: str
    path: str
    body: bytes
    num_choices: int = 1
    headers: tuple[str, ...] = ()
    method: str = "POST"
    codes: frozenset[str] = frozenset()
    """Errors that are right for it, beside those of an overload; with `must_fail`, the only right ends."""
    must_fail: bool = False
    hangs_up_s: float | None = None
    """When the client leaves, if it does."""
    choices: bytes | None = None
    """Content that the reply must bring; None: anything."""


@dataclass(slots=True)
class Ends:
    """Outcome of all acts."""

    is_engine_gone: bool = False
    """While the engine process is being replaced, and shortly after: then anybody may be told so."""
    is_disturbed: Callable[[], bool] = lambda: False
    """Whether the server may be gone or starved: then a connection may be lost too."""
    ends: dict[str, Counter[str]] = field(default_factory=dict)
    """Count of each end, by act."""
    faults: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def note(self, act: Act, end: str) -> None:
        self.ends.setdefault(act.name, Counter())[end] += 1

    def report(self, act: Act, what: str, details: str) -> None:
        self.note(act, "fault")
        self.faults[f"{act.name}: {what}"] += 1
        if len(self.examples) < _NUM_EXAMPLES:
            self.examples.append(f"{act.name}: {what}: {details[:300]}")

    @property
    def num_acts(self) -> int:
        return sum(counter.total() for counter in self.ends.values())


class Events:
    """The events of one stream: pieces of choices, one finish reason each, perhaps one error, one end."""

    def __init__(self) -> None:
        self.num_events = 0
        self.num_done = 0
        self.error_codes: list[str] = []
        self.finish_reasons: Counter[int] = Counter()

    def take(self, data: bytes, now_s: float) -> None:  # noqa: ARG002  # an event sink is told the time
        """Read the data of one event."""
        self.num_events += 1
        if data == b"[DONE]":
            self.num_done += 1
            return
        chunk = orjson.loads(data)
        if chunk.get("type") in ("response.completed", "response.incomplete"):
            self.finish_reasons[0] += 1
            self.num_done += 1  # such a stream has no other end
        elif chunk.get("type") in ("error", "response.failed"):
            error = chunk.get("response", {}).get("error") or chunk
            self.error_codes.append(str(error.get("code")))
            self.num_done += 1
        elif chunk.get("error"):
            self.error_codes.append(str(chunk["error"].get("code")))
        for choice in chunk.get("choices", ()):
            self.finish_reasons[choice["index"]] += choice.get("finish_reason") is not None

    def fault(self, num_choices: int) -> str:
        """Fault of the act, now that it has ended; empty if there is none."""
        if self.num_done != 1:
            return f"{self.num_done} ends"
        if len(self.error_codes) > 1:
            return "several errors"
        if not self.error_codes and self.finish_reasons != Counter(range(num_choices)):
            return f"finish reasons by choice {dict(self.finish_reasons)}"
        return ""


async def perform(target: Target, act: Act, ends: Ends) -> bool:
    """Send it, see it end, and judge the end; whether it was not refused."""
    events = Events()
    head, _, rest = target.request(act.method, act.path, act.body).partition(b"\r\n")
    wire = b"".join([head, b"\r\n", *(f"{line}\r\n".encode() for line in act.headers), rest])
    try:
        timeout_s = _TIMEOUT_S if act.hangs_up_s is None else act.hangs_up_s
        reply = await exchange(target, wire, timeouts=Timeouts(whole_s=timeout_s), on_event=events.take)
    except ExchangeFailed as failure:
        if act.hangs_up_s is not None and failure.kind == "timeout":
            ends.note(act, HUNG_UP)
        elif ends.is_disturbed():
            ends.note(act, f"disturbed: {failure.kind}")
        else:
            ends.report(act, failure.kind, str(failure))
        return True
    _judge(act, reply, events, ends)
    return reply.status not in (429, 503)


def _judge(act: Act, reply: Reply, events: Events, ends: Ends) -> None:
    if reply.status != 200:
        _judge_error(act, _code_of(reply), ends, details=f"{reply.status} {reply.body[:200]!r}")
        return
    if reply.headers.get("content-type", "").startswith("text/event-stream"):
        fault = events.fault(act.num_choices)
        if fault:
            ends.report(act, fault, f"after {events.num_events} events, {events.error_codes}")
            return
        if events.error_codes:
            _judge_error(act, events.error_codes[0], ends, details="in the stream")
            return
    elif act.path.endswith("/completions"):
        choices = orjson.loads(reply.body)["choices"]
        if len(choices) != act.num_choices:
            ends.report(act, f"{len(choices)} choices", repr(reply.body[:200]))
            return
        if act.choices not in (None, orjson.dumps(choices)):
            ends.report(act, "another text than alone", f"{reply.body!r}, not {act.choices!r}")
            return
    if act.must_fail:
        ends.report(act, "served", repr(reply.body[:200]))
    else:
        ends.note(act, "served")


def _judge_error(act: Act, code: str, ends: Ends, *, details: str) -> None:
    allowed = (
        act.codes | _OVERLOAD | (_TROUBLE if ends.is_engine_gone or ends.is_disturbed() else frozenset())
    )
    if code in allowed:
        ends.note(act, code)
    else:
        ends.report(act, f"error {code}", details)


def _code_of(reply: Reply) -> str:
    try:
        body = orjson.loads(reply.body)
        if "state" in body or isinstance(body["error"], str):  # a page of health, and an error of Ollama's
            return "not_ready" if reply.status == 503 else "refused"
        return str(body["error"]["code"])
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return f"none in a reply of status {reply.status}"


async def ask_alone(target: Target, *, num: int, seed: int) -> list[Known]:
    """A few greedy requests, and what becomes of them while nobody else is there. Raises ExchangeFailed."""
    dice, known = random.Random(seed), []
    for _ in range(num):
        fields = {"prompt": words(dice.randint(2, 40), dice), "max_tokens": dice.randint(8, 80)}
        body = orjson.dumps({"model": SERVED_NAME, **fields, "temperature": 0, "ignore_eos": True})
        reply = await exchange(
            target, target.request("POST", "/v1/completions", body), timeouts=Timeouts(whole_s=_TIMEOUT_S)
        )
        if reply.status != 200:
            raise ExchangeFailed("alone", f"{reply.status} {reply.body[:200]!r}")
        known.append((body, orjson.dumps(orjson.loads(reply.body)["choices"])))
    return known


class Acts:
    """Draws them. A prompt and its reply may have `max_model_len` tokens together."""

    def __init__(self, dice: random.Random, known: Sequence[Known], *, max_model_len: int) -> None:
        self._dice = dice
        self._known = known
        self._max_model_len = max_model_len
        self._kinds: tuple[tuple[Callable[[], Act], float], ...] = (
            (self._known_text, 3),
            (self._completion, 5),
            (self._several, 2),
            (self._chat, 3),
            (self._response, 2),
            (self._long_prompt, 2),
            (self._grammar, 1),
            (self._tools, 1),
            (self._hurried, 1),
            (self._hung_up, 6),
            (self._broken_body, 1),
            (self._wrong_field, 1),
            (self._too_long, 1),
            (self._embedding, 0.5),
            (self._tokenized, 0.5),
            (self._page, 0.5),
        )

    def draw(self) -> Act:
        kinds, weights = zip(*self._kinds, strict=True)
        make: Callable[[], Act] = self._dice.choices(kinds, weights)[0]
        return make()

    def pause_s(self) -> float:
        return self._dice.uniform(0, _COME_AGAIN_S)

    def _words(self, most: int) -> str:
        return words(self._dice.randint(1, most), self._dice)

    def _act(self, name: str, path: str, fields: dict[str, Any], **others: Any) -> Act:
        """With a tenant and a priority by chance, in a header or in the body."""
        dice, headers = self._dice, []
        body = {"model": SERVED_NAME, **fields}
        if dice.random() < 0.5:
            headers.append(f"x-tokenyard-tenant: tenant-{dice.randrange(4)}")
        if dice.random() < 0.3:
            headers.append(f"x-tokenyard-priority: {dice.randint(-3, 3)}")
        elif dice.random() < 0.5:
            body["priority"] = dice.randint(-3, 3)
        return Act(name=name, path=path, body=orjson.dumps(body), headers=tuple(headers), **others)

    def _reply_fields(self) -> dict[str, Any]:
        dice = self._dice
        fields: dict[str, Any] = {"max_tokens": dice.randint(1, 60), "stream": dice.random() < 0.6}
        chance: dict[str, Any] = {
            "temperature": dice.choice((0, 0.7, 1.5)),
            "seed": dice.randrange(1000),
            "stop": dice.choice(("e", " the", ["a", "zz"])),
            "frequency_penalty": 0.5,
            "logit_bias": {"20": -100},
            "min_p": 0.1,
            "ignore_eos": True,
        }
        return fields | {name: value for name, value in chance.items() if dice.random() < 0.25}

    def _known_text(self) -> Act:
        body, choices = self._dice.choice(self._known)
        priority = f"x-tokenyard-priority: {self._dice.randint(-3, 3)}"
        return Act(name="known text", path="/v1/completions", body=body, headers=(priority,), choices=choices)

    def _completion(self) -> Act:
        fields = {"prompt": self._words(30), **self._reply_fields()}
        if self._dice.random() < 0.2:
            fields["logprobs"] = 3
        return self._act("completion", "/v1/completions", fields)

    def _several(self) -> Act:
        n, prompts = self._dice.randint(1, 3), [self._words(12) for _ in range(self._dice.randint(1, 3))]
        fields = {"prompt": prompts, "n": n, **self._reply_fields()}
        return self._act("several choices", "/v1/completions", fields, num_choices=n * len(prompts))

    def _messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self._words(20)}]

    def _chat(self) -> Act:
        n = self._dice.choice((1, 1, 2))
        fields = {"messages": self._messages(), "n": n, **self._reply_fields()}
        return self._act("chat", "/v1/chat/completions", fields, num_choices=n)

    def _response(self) -> Act:
        fields = {"input": self._words(20), "max_output_tokens": self._dice.randint(16, 40)}
        fields |= {"stream": self._dice.random() < 0.5, "store": self._dice.random() < 0.5}
        return self._act("response", "/v1/responses", fields)

    def _long_prompt(self) -> Act:
        num_tokens = self._dice.randint(self._max_model_len // 2, self._max_model_len - 9)
        prompt = [20 + self._dice.randrange(200) for _ in range(num_tokens)]
        fields = {"prompt": prompt, "max_tokens": 8, "stream": self._dice.random() < 0.5}
        return self._act("long prompt", "/v1/completions", fields)

    def _grammar(self) -> Act:
        ways: tuple[dict[str, Any], ...] = (
            {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}},
            {"structured_outputs": {"regex": "[a-f]{2,8}"}},
            {"response_format": {"type": "json_object"}},
        )
        fields = {"messages": self._messages(), **self._dice.choice(ways), **self._reply_fields()}
        for name in ("ignore_eos", "stop"):  # what ends a text and what must match it exclude each other
            fields.pop(name, None)
        return self._act("grammar", "/v1/chat/completions", fields)

    def _tools(self) -> Act:
        parameters = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}}
        function = {"name": "weather", "parameters": {**parameters, "required": ["city"]}}
        fields: dict[str, Any] = {
            "messages": self._messages(),
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "required",
            "max_tokens": 60,
            "stream": self._dice.random() < 0.5,
        }
        return self._act("tools", "/v1/chat/completions", fields)

    def _hurried(self) -> Act:
        name = self._dice.choice(("timeout", "queue_timeout", "first_token_timeout"))
        fields = {"prompt": self._words(20), name: self._dice.uniform(0.01, 0.3), **self._reply_fields()}
        return self._act("hurried", "/v1/completions", fields, codes=_TOO_LATE)

    def _hung_up(self) -> Act:
        fields = {"prompt": self._words(30), "n": self._dice.randint(1, 3), **self._reply_fields()}
        fields |= {"max_tokens": 120, "ignore_eos": True}
        return self._act(
            "hung up",
            "/v1/completions",
            fields,
            num_choices=fields["n"],
            hangs_up_s=self._dice.choice((0.001, 0.02, 0.2, 1.0)) * self._dice.random(),
        )

    def _broken_body(self) -> Act:
        whole = orjson.dumps({"prompt": self._words(5), "max_tokens": 3})
        cut = whole[: self._dice.randrange(1, len(whole))]
        body = self._dice.choice((cut, b"\xff" + whole, b"[" * 200, whole.replace(b"3", b"NaN"), b"[]"))
        codes = frozenset({"invalid_json"})
        return Act(name="broken body", path="/v1/completions", body=body, codes=codes, must_fail=True)

    def _wrong_field(self) -> Act:
        wrong: tuple[dict[str, Any], ...] = (
            {"max_tokens": -1},
            {"temperature": "hot"},
            {"n": 10**9},
            {"prompt": [2**40]},
            {"prompt": {}},
            {"use_beam_search": True},
            {"structured_outputs": {"regex": "("}},
        )
        codes = frozenset({"invalid_value", "unsupported_parameter", "invalid_grammar"})
        fields = {"prompt": "x", **self._dice.choice(wrong)}
        return self._act("wrong field", "/v1/completions", fields, codes=codes, must_fail=True)

    def _too_long(self) -> Act:
        fields = {"prompt": [25] * (self._max_model_len + self._dice.randrange(1000)), "max_tokens": 2}
        codes = frozenset({"context_length_exceeded"})
        return self._act("too long", "/v1/completions", fields, codes=codes, must_fail=True)

    def _embedding(self) -> Act:
        codes = frozenset({"wrong_task"})
        fields = {"input": self._words(5)}
        return self._act("embedding", "/v1/embeddings", fields, codes=codes, must_fail=True)

    def _tokenized(self) -> Act:
        return self._act("tokenized", "/tokenize", {"prompt": self._words(50)})

    def _page(self) -> Act:
        path = self._dice.choice(_PAGES)
        return Act(name="page", path=path, body=b"", method="GET", codes=frozenset())


@dataclass(frozen=True, slots=True)
class Pace:
    """Load that clients and attackers make."""

    num_clients: int = 48
    rest_s: float = 0.0
    """Seconds that each client and each attacker rests after an act, on a machine that has other work."""
    num_silent: int = 3000
    """Connections of a silent crowd of the attackers'."""


async def keep_acting(
    target: Target, acts: Acts, ends: Ends, until: asyncio.Event, *, rest_s: float = 0.0
) -> None:
    """One act after the other; after a refusal with a pause, so that others get their turn."""
    while not until.is_set():
        if not await perform(target, acts.draw(), ends):
            await asyncio.sleep(acts.pause_s())
        if rest_s:
            await asyncio.sleep(rest_s)

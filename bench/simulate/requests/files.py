"""Files of requests: JSON lines of our own, or a public trace.

Owns: the form of our own file.
Never: draws requests (arrivals.py).
"""

from array import array
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import orjson

from bench.simulate.requests.arrivals import ArrivalsError, SimRequest
from bench.simulate.requests.public_traces import public_trace_of, whole_number, whole_numbers


def read_requests(path: Path) -> list[SimRequest]:
    """Read the requests of a JSON lines file, by arrival. Raises ArrivalsError with the line number.

    Fields: `arrival_s`; `prompt_len`, or `prompt` as text or token ids; `max_tokens` or `output_len`, the
    smaller if both are there; and, where wanted, `priority`, `tenant`, `prefix_group` and `prefix_len`, or
    `block_ids` and `block_id_len`. Or a public trace, by the fields of its first line (public_traces.py).
    """
    requests: list[SimRequest] = []
    first_s = 0.0
    try:
        with path.open("rb") as file:
            lines = ((f"{path}:{number}", line) for number, line in enumerate(file, start=1) if line.strip())
            where, first = next(lines, (str(path), b""))
            trace = public_trace_of(first)
            if trace is None:
                requests = [_parse(line, where) for where, line in chain([(where, first)], lines) if line]
            else:
                requests = trace.read(chain([(where, first)], lines))
                first_s = min((request.arrival_s for request in requests), default=0.0)
    except OSError as error:
        raise ArrivalsError(f"cannot read {path}: {error.strerror}") from None
    if not requests:
        raise ArrivalsError(f"{path} holds no requests")
    if first_s:
        requests = [request._replace(arrival_s=request.arrival_s - first_s) for request in requests]
    requests.sort(key=lambda request: request.arrival_s)
    return requests


def write_requests(path: Path, workload: Iterable[SimRequest]) -> None:
    """Write a file that `read_requests` reads. Raises ArrivalsError."""
    try:
        with path.open("wb") as lines:
            for request in workload:
                entry = request._asdict()
                del entry["prompt_len" if request.prompt else "prompt"]
                if not request.block_ids:
                    del entry["block_ids"], entry["block_id_len"]
                lines.write(orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE))
    except OSError as error:
        raise ArrivalsError(f"cannot write {path}: {error.strerror}") from None


_FIELDS = {
    *("arrival_s", "prompt_len", "prompt", "max_tokens", "output_len"),
    *("priority", "tenant", "prefix_group", "prefix_len", "block_ids", "block_id_len"),
}


def _parse(line: bytes, where: str) -> SimRequest:
    try:
        entry: Any = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ArrivalsError(f"{where}: {error}") from None
    if not isinstance(entry, dict):
        raise ArrivalsError(f"{where}: expected an object")
    if unknown := set(entry) - _FIELDS:
        raise ArrivalsError(f"{where}: unknown field {min(unknown)!r}")
    prompt = _prompt_tokens(entry.get("prompt"), where)
    limits = [whole_number(entry, name, where, 1) for name in ("max_tokens", "output_len") if name in entry]
    if not limits:
        raise ArrivalsError(f"{where}: neither max_tokens nor output_len is there")
    arrival_s = entry.get("arrival_s")
    if not isinstance(arrival_s, int | float) or isinstance(arrival_s, bool) or arrival_s < 0:
        raise ArrivalsError(f"{where}: arrival_s must be a number of seconds, 0 or more")
    return SimRequest(
        arrival_s=float(arrival_s),
        prompt_len=len(prompt) or whole_number(entry, "prompt_len", where, 1),
        max_tokens=min(limits),
        priority=whole_number({"priority": 0} | entry, "priority", where, -(2**31)),
        tenant=str(entry.get("tenant", "")),
        prefix_group=str(entry.get("prefix_group", "")),
        prefix_len=whole_number({"prefix_len": 0} | entry, "prefix_len", where, 0),
        prompt=prompt,
        block_ids=whole_numbers(entry, "block_ids", where) if "block_ids" in entry else (),
        block_id_len=whole_number(entry, "block_id_len", where, 1) if "block_ids" in entry else 0,
    )


def _prompt_tokens(prompt: Any, where: str) -> tuple[int, ...]:
    """Return token ids as they are; for text, one for each four bytes, so equal beginnings stay equal."""
    if prompt is None:
        return ()
    if isinstance(prompt, str) and prompt:
        data = prompt.encode()
        return tuple(array("I", data + bytes(-len(data) % 4)))
    if (
        isinstance(prompt, list)
        and prompt
        and all(type(each) is int and 0 <= each < 2**32 for each in prompt)
    ):
        return tuple(prompt)
    raise ArrivalsError(f"{where}: prompt must be text or token ids, and not empty")

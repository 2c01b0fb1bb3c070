"""An engine process without a model: one token for each stream, at an even pace.

    python stand_in.py NUM_STREAMS INTERVAL_S STEPS_FILE -P -m engine.core.process DIRECTORY …

Waits until so many sequences are there, then gives each of them one token a step until all have as many as
they asked for, and writes when it sent each step, and what processor time the server had used before the
first. A sequence draws the first of its allowed tokens again and again. A step that is late makes the next
ones late too, as on a device: nothing is caught up with.

Owns: its side of what crosses between the processes, in the wire form of engine/process_messages.py.
Never: imports what it stands in for: it measures older trees of sources too.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from scheduler.counters import SchedulerStats
from scheduler.messages import (
    FinishReason,
    SequenceId,
    SequenceOutput,
    SequenceStart,
)

_BEAT_EVERY_S = 0.5
_FACTS: dict[str, Any] = {
    "model_type": "none",
    "num_parameters": 0,
    "weight_bytes": 0,
    "dtype": "float32",
    "device": "stand-in",
    "vocab_size": 1 << 20,
    "max_model_len": 1 << 20,
    "block_size": 16,
    "num_blocks": 1 << 20,
    "kv_cache_bytes": 0,
    "eos_token_ids": (),
}


class Params(msgspec.Struct, frozen=True):
    """Fields of SamplingParams that are read here."""

    max_tokens: int
    allowed_token_ids: tuple[int, ...]


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    """Fields of the message that are read here; likewise the next classes."""

    sequence_ids: tuple[SequenceId, ...]
    params: Params


class EndSequences(msgspec.Struct, frozen=True, tag=True):
    sequence_ids: tuple[SequenceId, ...]


class Explain(msgspec.Struct, frozen=True, tag=True):
    question: int


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    pass


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    pass


class Ready(msgspec.Struct, frozen=True, tag=True):
    facts: dict[str, Any]


class Outputs(msgspec.Struct, frozen=True, tag=True):
    outputs: list[SequenceOutput]


class Beat(msgspec.Struct, frozen=True, tag=True):
    num_turns: int
    stats: SchedulerStats
    times: dict[str, float]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(AddRequest | EndSequences | Explain | ResetPrefixCache | Shutdown).decode


class StandIn:
    """Serves until told to leave."""

    def __init__(self, directory: Path, *, num_streams: int, interval_s: float, steps_file: Path) -> None:
        context = zmq.Context(io_threads=1)
        self._in, self._out = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        for socket, street in ((self._in, "to-engine"), (self._out, "to-client")):
            socket.set_hwm(0)
            socket.connect(f"ipc://{directory / street}")
        self._num_streams = num_streams
        self._interval_s = interval_s
        self._file = steps_file
        self._live: dict[SequenceId, Params] = {}
        self._next_step_s = 0.0
        self._next_beat_s = 0.0
        self._is_stopped = False
        self._sent_s: list[float] = []

    def run(self) -> None:
        self._send(Ready(_FACTS))
        while not self._is_stopped:
            self._beat()
            self._take(self._next_beat_s - time.monotonic())
            if len(self._live) >= self._num_streams:
                self._generate()

    def _generate(self) -> None:
        """All steps of the sequences that are there."""
        self._sent_s = []
        processor_s = _processor_s(os.getppid())
        self._next_step_s = time.monotonic()
        while self._live and not self._is_stopped:
            self._step()
            self._next_step_s = max(self._next_step_s + self._interval_s, time.monotonic())
            while (left_s := self._next_step_s - time.monotonic()) > 0 and self._live:
                self._take(left_s)
            self._beat()
        self._file.write_text(json.dumps({"sent_s": self._sent_s, "processor_s": processor_s}))

    def _step(self) -> None:
        number = len(self._sent_s)
        start = SequenceStart(queue_s=0.0, num_cached_tokens=0) if number == 0 else None
        outputs = []
        for sequence_id, params in list(self._live.items()):
            is_last = number + 1 >= params.max_tokens
            reason = FinishReason.LENGTH if is_last else None
            outputs.append(SequenceOutput(sequence_id, params.allowed_token_ids[:1], reason, start=start))
            if is_last:
                del self._live[sequence_id]
        self._sent_s.append(time.monotonic())
        self._send(Outputs(outputs))

    def _take(self, wait_s: float) -> None:
        """Return the messages that come within this time: with the first one, all that came with it."""
        timeout_ms = max(0, int(wait_s * 1000))
        if timeout_ms == 0 and wait_s > 0:  # finer than the clock of a poll
            time.sleep(wait_s)
        while self._in.poll(timeout_ms):
            timeout_ms = 0
            match _decode(self._in.recv()):
                case AddRequest(sequence_ids, params):
                    self._live.update(dict.fromkeys(sequence_ids, params))
                case EndSequences(sequence_ids):
                    for sequence_id in sequence_ids:
                        self._live.pop(sequence_id, None)
                case Shutdown():
                    self._is_stopped = True

    def _beat(self) -> None:
        now_s = time.monotonic()
        if now_s < self._next_beat_s:
            return
        self._next_beat_s = now_s + _BEAT_EVERY_S
        stats = SchedulerStats(num_running=len(self._live), num_blocks=1)
        self._send(Beat(num_turns=int(now_s / _BEAT_EVERY_S), stats=stats, times={}))

    def _send(self, message: msgspec.Struct) -> None:
        self._out.send(_encode(message))


def _processor_s(pid: int) -> float:
    """Count as campaigns/stack_cost.py does, which older trees may lack."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    num_streams, interval_s, steps_file = sys.argv[1:4]
    StandIn(
        Path(sys.argv[sys.argv.index("engine.core.process") + 1]),
        num_streams=int(num_streams),
        interval_s=float(interval_s),
        steps_file=Path(steps_file),
    ).run()

"""A load on the scheduler and the worker, in the order of the engine's loop, and the records of its requests.

Owns: when requests are added, and the records of bench/load/report.py for them.
Never: reads the tokens (readers.py), or decides who runs.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.load.request_record import COMPLETED, CUT_OFF, RequestRecord
from campaigns.gpu.driving import Drive
from campaigns.gpu.served.readers import Arrivals, Readers
from scheduler.messages import FinishReason, SequenceId, SequenceOutput

_NAP_S = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    prompt: list[int]
    max_tokens: int
    arrival_s: float = 0.0
    """After the start of an open load."""


@dataclass(slots=True)
class _Sent:
    request: Request
    sent_s: float
    late_s: float
    is_done: bool = False


class Load:
    """One run. Its requests have all they ask for when it returns, or `within_s` is over."""

    def __init__(self, drive: Drive, readers: Readers, within_s: float) -> None:
        self._drive, self._readers, self._within_s = drive, readers, within_s
        drive.tell = self._take
        self._sent: dict[SequenceId, _Sent] = {}
        self._num_done = 0
        self._started_s = time.perf_counter()

    def run_closed(self, requests: Sequence[Request], *, concurrency: int) -> list[RequestRecord]:
        """Keep `concurrency` of them under way."""
        line = deque(requests)
        while self._num_done < len(requests) and not self._is_over:
            while line and len(self._sent) - self._num_done < concurrency:
                self._send(line.popleft(), late_s=0.0)
            self._drive.turn()
        return self._records()

    def run_open(self, requests: Sequence[Request]) -> list[RequestRecord]:
        """Add each at its arrival, however many are under way."""
        line = deque(requests)
        while self._num_done < len(requests) and not self._is_over:
            while line and line[0].arrival_s <= self._now_s:
                self._send(line[0], late_s=self._now_s - line[0].arrival_s)
                line.popleft()
            if self._num_done == len(self._sent):
                time.sleep(_NAP_S)
            self._drive.turn()
        return self._records()

    @property
    def _now_s(self) -> float:
        return time.perf_counter() - self._started_s

    @property
    def _is_over(self) -> bool:
        return self._now_s > self._within_s

    def _send(self, request: Request, *, late_s: float) -> None:
        sequence_id = self._drive.add(request.prompt, request.max_tokens)
        self._sent[sequence_id] = _Sent(request, time.perf_counter(), late_s)

    def _take(self, outputs: Sequence[SequenceOutput]) -> None:
        news = [(each.sequence_id, each.token_ids) for each in outputs if each.token_ids]
        if news:
            self._readers.send(news)
        for each in outputs:
            if each.finish_reason is not None:
                self._sent[each.sequence_id].is_done = each.finish_reason is FinishReason.LENGTH
                self._num_done += 1

    def _records(self) -> list[RequestRecord]:
        """In the order in which they were sent. Gives the worker its rows back."""
        if self._num_done < len(self._sent):
            self._drive.end_all()
        self._drive.free_rows()
        arrivals = self._readers.collect()
        return [
            self._record(index, sent, arrivals.get(sequence_id, Arrivals([], [], 0)))
            for index, (sequence_id, sent) in enumerate(self._sent.items())
        ]

    def _record(self, index: int, sent: _Sent, arrivals: Arrivals) -> RequestRecord:
        times_s, num_tokens = arrivals.times_s, sum(arrivals.counts)
        num_later = num_tokens - arrivals.counts[0] if times_s else 0
        end_s = times_s[-1] if times_s else time.perf_counter()
        return RequestRecord(
            index=index,
            priority=0,
            outcome=COMPLETED if sent.is_done else CUT_OFF,
            message="" if sent.is_done else "the load took too long",
            start_s=sent.sent_s - self._started_s,
            late_s=sent.late_s,
            ttft_s=times_s[0] - sent.sent_s if times_s else None,
            e2e_s=end_s - sent.sent_s,
            chunk_gaps_s=tuple(later - earlier for earlier, later in pairwise(times_s)),
            tpot_s=(times_s[-1] - times_s[0]) / num_later if num_later else None,
            num_prompt_tokens=len(sent.request.prompt),
            num_cached_tokens=0,
            num_output_tokens=num_tokens,
            finish_reason="length" if sent.is_done else "",
        )

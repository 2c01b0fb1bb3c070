"""Explanations of live sequences, made in parts: to find a far page, thousands of waiting ones are looked at.

Owns: the questions under way, one after the other, and how many sequences a turn of the loop looks at.
Never: decides what a report says (scheduler/queues/request_queues.py), or what a page is.
"""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

from engine.process_messages import Explain, Explanation
from scheduler.messages import SequenceReport
from scheduler.scheduler import Scheduler

_MOST_AT_ONCE = 256
"""Sequences that a turn looks at: 2 ms, in which no step is planned."""


class Explanations:
    """Each question is answered once; there are as many at a time as clients that ask."""

    def __init__(self, scheduler: Scheduler, send: Callable[[Explanation], None]) -> None:
        self._scheduler = scheduler
        self._send = send
        self._asked: deque[Explain] = deque()
        self._ahead: Iterator[SequenceReport | None] | None = None
        self._found: list[SequenceReport] = []

    @property
    def are_due(self) -> bool:
        return bool(self._asked)

    def ask(self, asked: Explain) -> None:
        """Take in a question."""
        self._asked.append(asked)

    def go_on(self, *, now_s: float) -> None:
        """Look at the next part of the sequences, and answer the first question if that was the last part."""
        if not self._asked:
            return
        if self._ahead is None:
            self._ahead = self._scheduler.reports(self._asked[0].page, now_s=now_s)
        part = list(islice(self._ahead, _MOST_AT_ONCE))
        self._found += [report for report in part if report is not None]
        if len(part) == _MOST_AT_ONCE:
            return
        num_live = sum(self._scheduler.get_request_counts())
        question = self._asked.popleft().question
        found, self._found, self._ahead = self._found, [], None
        self._send(Explanation(question=question, num_live=num_live, reports=found))

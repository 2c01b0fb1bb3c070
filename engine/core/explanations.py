"""Explanations of live sequences, made in parts: to find a far page, thousands of waiting ones are looked at.

Owns: the questions under way, one after the other, and how many sequences a turn of the loop looks at.
"""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from engine.process_messages import Explain, Explanation, ForgetQuestion
from scheduler.messages import SequenceReport

if TYPE_CHECKING:
    from scheduler.scheduler import Scheduler

_MOST_AT_ONCE = 256
"""Sequences that a turn looks at, for all questions: 2 ms, in which no step is planned."""
_LOOKS_TO_BEGIN = 16
"""Looks that a question counts as by itself: the waiting queue is copied for it."""
_MOST_ASKED = 128
"""Questions under way: more than clients may await (engine/reports/questions.py)."""


class Explanations:
    """Each question is answered once, or dropped as soon as its client gives up."""

    def __init__(self, scheduler: "Scheduler", send: Callable[[Explanation], None]) -> None:
        self._scheduler = scheduler
        self._send = send
        self._asked: deque[Explain] = deque()
        self._ahead: Iterator[SequenceReport | None] | None = None
        self._found: list[SequenceReport] = []

    @property
    def are_due(self) -> bool:
        return bool(self._asked)

    def take(self, message: Explain | ForgetQuestion) -> None:
        """Take in a question, or the end of one whose client gave up."""
        if isinstance(message, Explain):
            self._ask(message)
        else:
            self._forget(message.question)

    def _ask(self, asked: Explain) -> None:
        """Take in a question; one too many takes the place of the oldest."""
        if len(self._asked) == _MOST_ASKED:
            self._leave_first()
        self._asked.append(asked)

    def _forget(self, question: int) -> None:
        """Drop a question whose client gave up, unless it is answered."""
        if self._asked and self._asked[0].question == question:
            self._leave_first()
        else:
            self._asked = deque(each for each in self._asked if each.question != question)

    def go_on(self, *, now_s: float) -> None:
        """Look at the next part of the sequences, and answer the questions for which that was the last."""
        num_left = _MOST_AT_ONCE
        while self._asked and num_left > 0:
            if self._ahead is None:
                self._ahead = self._scheduler.reports(self._asked[0].page, now_s=now_s)
            part = list(islice(self._ahead, num_left))
            self._found += [report for report in part if report is not None]
            if len(part) == num_left:
                return
            num_left -= len(part) + _LOOKS_TO_BEGIN
            self._answer_first()

    def _answer_first(self) -> None:
        num_live = sum(self._scheduler.get_request_counts())
        self._send(Explanation(question=self._asked[0].question, num_live=num_live, reports=self._found))
        self._leave_first()

    def _leave_first(self) -> None:
        self._asked.popleft()
        self._found, self._ahead = [], None

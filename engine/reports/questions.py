"""Questions to all engines about their live sequences, and one answer for all."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from engine.errors import EngineUnavailable
from engine.process_messages import Explain, Explanation, ForgetQuestion, ToEngine
from scheduler.messages import ReportPage, SequenceReport

_MAX_ANSWER_S = 30.0
"""A far page is found in parts, one with each step; steps may be long."""
_MOST_AWAITED = 64
"""Questions that are awaited at a time."""


class InLine(Protocol):
    """A request that no engine has."""

    request: Any
    arrived_s: float

    @property
    def first_id(self) -> Any: ...

    @property
    def num_prompt_tokens(self) -> int: ...


class Questions:
    """Each question goes to every engine; the answers are joined."""

    def __init__(self, send: Callable[[int, ToEngine], None]) -> None:
        self._send = send
        self._num_asked = 0
        self._answers: dict[tuple[int, int], asyncio.Future[Explanation]] = {}
        """Answers that are awaited, by question and engine."""

    async def ask(
        self, page: ReportPage, engines: Sequence[int], in_line: Sequence[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], int]:
        """Return a page of reports, and how many there are: running, then waiting, then those in the line.

        Raises EngineUnavailable. If it is cancelled, the engines look no further.
        """
        if len(self._answers) >= _MOST_AWAITED * len(engines):
            raise EngineUnavailable(f"{_MOST_AWAITED} questions for live sequences are awaited already")
        self._num_asked += 1
        question = self._num_asked
        whole = page if len(engines) == 1 else ReportPage(0, page.first + page.most)
        loop = asyncio.get_running_loop()
        answers = {engine: loop.create_future() for engine in engines}
        self._answers |= {(question, engine): answer for engine, answer in answers.items()}
        for engine in engines:
            self._send(engine, Explain(question=question, page=whole))
        try:
            async with asyncio.timeout(_MAX_ANSWER_S):
                found = [await answer for answer in answers.values()]
        except TimeoutError:
            raise EngineUnavailable("the engine did not answer in time") from None
        finally:
            for engine, answer in answers.items():
                del self._answers[question, engine]
                if answer.cancelled() or not answer.done():
                    self._send(engine, ForgetQuestion(question=question))
                else:
                    answer.exception()  # seen: asyncio would log an unread error
        num_live = sum(each.num_live for each in found) + len(in_line)
        reports = [
            {**report._asdict(), "engine": engine}
            for engine, explanation in zip(engines, found, strict=True)
            for report in explanation.reports
        ]
        if len(engines) > 1:
            reports.sort(key=lambda report: report["state"] != "running")
            return [*reports, *in_line][page.first :][: page.most], num_live
        return [*reports, *in_line][: page.most], num_live

    def answer(self, engine: int, explanation: Explanation) -> None:
        """Take in an answer; one that came too late is dropped."""
        answer = self._answers.get((explanation.question, engine))
        if answer is not None and not answer.done():
            answer.set_result(explanation)

    def forget(self, engine: int) -> None:
        """End the questions to an engine that is gone."""
        for (_, asked), answer in self._answers.items():
            if asked == engine and not answer.done():
                answer.set_exception(EngineUnavailable("the engine stopped"))


def report_in_line(place: int, waiting: InLine) -> dict[str, Any]:
    """Report on a request in the line, by its first sequence."""
    terms = waiting.request.terms
    report = SequenceReport(
        sequence_id=waiting.first_id,
        state="waiting",
        place=place,
        priority=terms.priority,
        rank=(),
        tenant=terms.tenant,
        num_prompt_tokens=waiting.num_prompt_tokens,
        num_output_tokens=0,
        num_computed_tokens=0,
        num_blocks=0,
        num_host_blocks=0,
        num_preemptions=0,
        num_bypasses=0,
        age_s=time.monotonic() - waiting.arrived_s,
        wait_reason="engine",
        expected_start_s=None,
        blocks_by_group={},  # the default is no type of JSON's
    )
    return {**report._asdict(), "engine": None}

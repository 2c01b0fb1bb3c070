"""Questions for live sequences: as many at a time as an engine can be asked."""

import asyncio

import pytest

from engine.errors import EngineUnavailable
from engine.process_messages import Explain, Explanation, ToEngine
from engine.reports.questions import Questions
from scheduler.messages import Page


@pytest.mark.parametrize("engines", [[0], [0, 1]])
async def test_questions_beyond_those_that_may_be_awaited_are_refused_by_name(engines: list[int]) -> None:
    asked: list[tuple[int, int]] = []

    def send(engine: int, message: ToEngine) -> None:
        assert isinstance(message, Explain)
        asked.append((engine, message.question))

    questions = Questions(send)
    awaited = [asyncio.create_task(questions.ask(Page(0, 9), engines, [])) for _ in range(64)]
    await asyncio.sleep(0)
    with pytest.raises(EngineUnavailable, match="64 questions for live sequences are awaited"):
        await questions.ask(Page(0, 9), engines, [])
    for engine, question in asked:
        questions.answer(engine, Explanation(question=question, num_live=0, reports=[]))
    assert await asyncio.gather(*awaited) == [([], 0)] * 64
    later = asyncio.create_task(questions.ask(Page(0, 9), engines, []))
    await asyncio.sleep(0)
    assert len(asked) == 65 * len(engines)
    later.cancel()

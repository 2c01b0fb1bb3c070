"""Questions for live sequences: as many at a time as an engine can be asked."""

import asyncio
import gc

import pytest

from engine.errors import EngineUnavailable
from engine.process_messages import Explain, Explanation, ForgetQuestion, ToEngine
from engine.reports.questions import Questions
from scheduler.messages import ReportPage


@pytest.mark.parametrize("engines", [[0], [0, 1]])
async def test_questions_beyond_those_that_may_be_awaited_are_refused_by_name(engines: list[int]) -> None:
    asked: list[tuple[int, int]] = []

    def send(engine: int, message: ToEngine) -> None:
        if isinstance(message, ForgetQuestion):
            return
        assert isinstance(message, Explain)
        asked.append((engine, message.question))

    questions = Questions(send)
    awaited = [asyncio.create_task(questions.ask(ReportPage(0, 9), engines, [])) for _ in range(64)]
    await asyncio.sleep(0)
    with pytest.raises(EngineUnavailable, match="64 questions for live sequences are awaited"):
        await questions.ask(ReportPage(0, 9), engines, [])
    for engine, question in asked:
        questions.answer(engine, Explanation(question=question, num_live=0, reports=[]))
    assert await asyncio.gather(*awaited) == [([], 0)] * 64
    later = asyncio.create_task(questions.ask(ReportPage(0, 9), engines, []))
    await asyncio.sleep(0)
    assert len(asked) == 65 * len(engines)
    later.cancel()


async def test_engines_hear_that_a_question_is_given_up_unless_they_have_answered_it() -> None:
    sent: list[tuple[int, ToEngine]] = []
    questions = Questions(lambda engine, message: sent.append((engine, message)))
    asked = asyncio.create_task(questions.ask(ReportPage(0, 9), [0, 1], []))
    await asyncio.sleep(0)
    questions.answer(0, Explanation(question=1, num_live=0, reports=[]))
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert sent[2:] == [(1, ForgetQuestion(question=1))]


async def test_an_engine_that_ends_while_the_client_leaves_is_no_error_of_the_server() -> None:
    logged: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: logged.append(context["message"]))
    questions = Questions(lambda _engine, _message: None)
    asked = asyncio.create_task(questions.ask(ReportPage(0, 9), [0], []))
    await asyncio.sleep(0.01)
    asked.cancel()
    questions.forget(0)
    await asyncio.gather(asked, return_exceptions=True)
    del asked
    await asyncio.sleep(0)
    gc.collect()
    assert logged == []

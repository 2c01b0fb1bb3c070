"""The step loop over a fake worker, with messages put in by hand."""

from collections import deque

import msgspec
import pytest

from engine.core.loop import EngineLoop, WorkerBroken
from engine.process_messages import (
    AddRequest,
    Beat,
    EndSequences,
    Explain,
    Explanation,
    ForgetQuestion,
    Outputs,
    Shutdown,
    ToClient,
    ToEngine,
    decode_to_client,
    decode_to_engine,
    encode,
)
from scheduler.messages import (
    FinishReason,
    ModelRunnerOutput,
    ReportPage,
    SamplingParams,
    SchedulerOutput,
    SequenceId,
    SequenceOutput,
    SequenceStart,
    ServiceTerms,
    TimeLimits,
    TokenLogprobs,
)
from scheduler.scheduler import Scheduler
from tests.fakes import FakeWorker, continuation
from tests.world import small_config

PROMPT = [1, 2, 3, 4, 5]


class Desk:
    """A mailbox that is filled and read by the test; everything takes the way over the wire form."""

    def __init__(self) -> None:
        self.letters: deque[list[ToEngine]] = deque()
        self.sent: list[ToClient] = []
        self.now_s = 0.0

    def receive(self, *, wait_s: float) -> list[ToEngine]:
        if self.letters:
            return [decode_to_engine(encode(letter)) for letter in self.letters.popleft()]
        self.now_s += wait_s
        return []

    def send(self, message: ToClient) -> None:
        self.sent.append(decode_to_client(encode(message)))

    def news(self) -> list[SequenceOutput]:
        return [output for message in self.sent if isinstance(message, Outputs) for output in message.outputs]

    def beats(self) -> list[Beat]:
        return [message for message in self.sent if isinstance(message, Beat)]


def request(*ids: int, max_tokens: int = 3, prompt: list[int] = PROMPT) -> AddRequest:
    return AddRequest(
        sequence_ids=tuple(SequenceId(i) for i in ids),
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(max_tokens=max_tokens),
        terms=ServiceTerms(),
    )


def make_loop(desk: Desk, worker: object = None, **changes: object) -> EngineLoop:
    scheduler = Scheduler(small_config(**changes))
    return EngineLoop(scheduler, worker or FakeWorker(4), desk, lambda: desk.now_s)  # type: ignore[arg-type]


def test_a_request_goes_in_and_its_tokens_come_out_in_order() -> None:
    desk = Desk()
    desk.letters.append([request(1)])
    loop = make_loop(desk)
    for _ in range(5):
        loop.turn()
    news = desk.news()
    assert [token for output in news for token in output.token_ids] == continuation(PROMPT, 3)
    assert [output.finish_reason for output in news] == [None, None, FinishReason.LENGTH]
    assert news[0].start == SequenceStart(queue_s=0.0, num_cached_tokens=0, num_kept_tokens=4)


def test_n_sequences_of_one_request_draw_with_different_seeds() -> None:
    seeds: list[int] = []

    class SeedReader(FakeWorker):
        def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
            seeds.extend(new.params.seed for new in plan.new_sequences)
            return super().execute(plan)

    desk = Desk()
    desk.letters.append([request(1, 2, 3)])
    make_loop(desk, SeedReader(4)).turn()
    assert seeds == [0, 1, 2]


def test_one_of_n_sequences_scores_the_prompt_for_all() -> None:
    asked: list[int | None] = []

    class Watching(FakeWorker):
        def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
            asked.extend(new.params.num_prompt_logprobs for new in plan.new_sequences)
            return super().execute(plan)

    desk = Desk()
    asking = SamplingParams(max_tokens=1, num_prompt_logprobs=2)
    desk.letters.append([msgspec.structs.replace(request(1, 2, 3), params=asking)])
    loop = make_loop(desk, Watching(4))
    for _ in range(3):
        loop.turn()
    assert asked == [2, None, None]


def test_an_abort_that_arrives_while_the_worker_computes_wins_over_the_result() -> None:
    desk = Desk()
    desk.letters.append([request(1, 2)])
    desk.letters.append([EndSequences(sequence_ids=(SequenceId(1),), reason=FinishReason.ABORTED)])
    make_loop(desk).turn()
    assert {output.sequence_id: output.finish_reason for output in desk.news()} == {
        1: FinishReason.ABORTED,
        2: None,
    }


def test_what_can_never_fit_is_rejected_and_the_next_request_runs() -> None:
    desk = Desk()
    desk.letters.append([request(1, prompt=list(range(40))), request(2)])
    loop = make_loop(desk)
    loop.turn()
    rejected, served = desk.news()
    assert rejected.finish_reason is FinishReason.REJECTED
    assert "the KV cache holds 32" in rejected.message
    assert served.sequence_id == 2


def test_one_failed_step_fails_its_requests_and_the_loop_goes_on() -> None:
    desk, worker = Desk(), FakeWorker(4)
    worker.explode_next = True
    loop = make_loop(desk, worker)
    desk.letters.append([request(1)])
    loop.turn()
    desk.letters.append([request(2, max_tokens=1)])
    loop.turn()
    assert [output.finish_reason for output in desk.news()] == [FinishReason.FAILED, FinishReason.LENGTH]


def test_what_a_failed_step_should_have_written_is_forgotten_although_its_request_was_aborted() -> None:
    """The abort waits in the mailbox while the step fails."""
    desk, worker = Desk(), FakeWorker(4)
    loop = make_loop(desk, worker)
    worker.explode_next = True
    desk.letters.append([request(1, prompt=[1] * 9)])
    desk.letters.append([EndSequences(sequence_ids=(SequenceId(1),), reason=FinishReason.ABORTED)])
    loop.turn()
    desk.letters.append([request(2, prompt=[1] * 9, max_tokens=2)])
    for _ in range(3):
        loop.turn()
    tokens = [token for output in desk.news() if output.sequence_id == 2 for token in output.token_ids]
    assert tokens == continuation([1] * 9, 2)


def test_a_worker_that_fails_three_steps_in_a_row_is_given_up_after_everybody_was_told() -> None:
    desk, worker = Desk(), FakeWorker(4)
    loop = make_loop(desk, worker)

    def fail_a_step(sequence_id: int) -> None:
        worker.explode_next = True
        desk.letters.append([request(sequence_id)])
        loop.turn()

    fail_a_step(1)
    fail_a_step(2)
    with pytest.raises(WorkerBroken):
        fail_a_step(3)
    assert [output.finish_reason for output in desk.news()] == [FinishReason.FAILED] * 3


def test_an_idle_loop_beats_once_a_second_and_says_that_nothing_is_left() -> None:
    desk = Desk()
    loop = make_loop(desk)
    for _ in range(4):
        loop.turn()
    assert desk.now_s == pytest.approx(3.0)
    assert [beat.num_turns for beat in desk.beats()] == [1, 2, 3, 4]
    assert desk.beats()[-1].stats.num_running == 0


def test_a_busy_loop_beats_a_few_times_a_second_only_and_at_its_end() -> None:
    desk = Desk()
    desk.letters.append([request(1, max_tokens=20)])
    loop = make_loop(desk)
    for _ in range(20):
        loop.turn()
        desk.now_s += 0.01
    assert len(desk.beats()) < 8
    assert desk.beats()[-1].stats.num_used_blocks == 0


def test_shutdown_ends_the_loop() -> None:
    desk = Desk()
    desk.letters.append([Shutdown()])
    make_loop(desk).run()


def test_the_wire_form_keeps_every_field() -> None:
    logprobs = TokenLogprobs(7, -0.5, 1, ((7, -0.5), (3, -1.25)))
    start = SequenceStart(queue_s=0.25, num_cached_tokens=8)
    sent = Outputs([SequenceOutput(SequenceId(5), (7,), FinishReason.STOP, (logprobs,), start, "text")])
    assert decode_to_client(encode(sent)) == sent
    asked = AddRequest(
        sequence_ids=(SequenceId(2**40 + 1),),
        prompt_token_ids=(0, 2**31),
        params=SamplingParams(seed=2**64 - 1, logit_bias=((3, -1.5),), num_logprobs=0),
        terms=ServiceTerms(priority=-5, cache_salt="é", time_limits=TimeLimits(queue_s=1.5)),
    )
    assert decode_to_engine(encode(asked)) == asked


def test_a_far_page_of_live_sequences_is_found_in_parts_while_steps_go_on() -> None:
    desk = Desk()
    loop = make_loop(desk)
    desk.letters.append([request(*range(1000), max_tokens=9), Explain(question=7, page=ReportPage(900, 3))])
    told: list[Explanation] = []
    num_turns = 0
    while not told:
        loop.turn()
        num_turns += 1
        told = [message for message in desk.sent if isinstance(message, Explanation)]
    assert num_turns == 4
    assert len(desk.news()) > num_turns
    (answer,) = told
    assert (answer.question, answer.num_live) == (7, 1000)
    assert [report.sequence_id for report in answer.reports] == [900, 901, 902]


def test_many_short_questions_are_answered_in_one_turn_and_a_far_page_is_shared_out() -> None:
    desk = Desk()
    loop = make_loop(desk)
    near = [Explain(question=number, page=ReportPage(0, 3)) for number in range(8)]
    desk.letters.append(
        [request(*range(1000), max_tokens=9), *near, Explain(question=8, page=ReportPage(900, 3))]
    )
    loop.turn()
    answers = [message for message in desk.sent if isinstance(message, Explanation)]
    assert [(answer.question, len(answer.reports)) for answer in answers] == [(num, 3) for num in range(8)]


def test_of_too_many_questions_the_oldest_are_left() -> None:
    desk = Desk()
    loop = make_loop(desk)
    desk.letters.append([Explain(question=number, page=ReportPage(0, 9)) for number in range(1000)])
    while not desk.sent or loop._explanations.are_due:
        loop.turn()
    answers = [message.question for message in desk.sent if isinstance(message, Explanation)]
    assert answers == list(range(872, 1000))


def test_a_question_whose_client_gave_up_is_dropped_wherever_it_stands() -> None:
    desk = Desk()
    loop = make_loop(desk)
    far = [Explain(question=number, page=ReportPage(900, 3)) for number in range(4)]
    desk.letters.append([request(*range(1000), max_tokens=9), *far])
    desk.letters.append([ForgetQuestion(question=number) for number in (0, 2, 77)])
    num_turns = 0
    while loop._explanations.are_due or not num_turns:
        loop.turn()
        num_turns += 1
    answers = [message.question for message in desk.sent if isinstance(message, Explanation)]
    assert answers == [1, 3]
    assert num_turns == 1 + 2 * 4


def test_an_idle_loop_finishes_what_it_was_asked() -> None:
    desk = Desk()
    loop = make_loop(desk)
    desk.letters.append([request(*range(1000))])
    loop.turn()
    desk.letters.append(
        [EndSequences(sequence_ids=tuple(map(SequenceId, range(1000))), reason=FinishReason.ABORTED)]
    )
    desk.letters.append([Explain(question=number, page=ReportPage(0, 9)) for number in range(30)])
    for _ in range(2):
        loop.turn()
    assert loop._explanations.are_due
    while loop._explanations.are_due:
        loop.turn()
    answers = [message for message in desk.sent if isinstance(message, Explanation)]
    assert [(answer.question, answer.reports) for answer in answers] == [(number, []) for number in range(30)]
    assert desk.now_s == 0, "it did not wait for messages meanwhile"

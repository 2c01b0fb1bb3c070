"""Grammars that are compiled beside the steps of a real loop: who waits for them, and who does not.

Each of these holds where the rank that samples is another one, too: its calls are encoded, as for a process.
"""

import threading
from collections.abc import Callable, Iterator, Sequence

import msgspec
import pytest

from engine.core.between_steps import GrammarsOfLastStage, GrammarsOfRank
from engine.core.interfaces import BesideSteps, CompilesAhead
from engine.core.loop import EngineLoop
from engine.nodes.rank_plans import GrammarOrder, decode_order, encode_plan
from engine.process_messages import EndSequences, ToEngine
from scheduler.messages import (
    FinishReason,
    Grammar,
    GrammarKind,
    ModelRunnerOutput,
    SamplingParams,
    SchedulerOutput,
    SequenceId,
)
from scheduler.scheduler import Scheduler
from tests.engine.core.test_loop import Desk, request
from tests.fakes import FakeWorker, OutOfMemory
from tests.world import small_config
from worker.sampling.compile_ahead import CompileAhead
from worker.sampling.grammar_rows import RowGrammar

GRAMMAR = Grammar(kind=GrammarKind.REGEX, text="[ab]+")
TURNS = 500


class SamplingWorker(FakeWorker):
    """It takes the compiled row of each sequence that is admitted, and fails one whose row failed."""

    ahead: CompileAhead

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        for new in plan.new_sequences:
            if new.params.grammar is not None:
                row = self.ahead.take_row(new.params.grammar, new.token_ids[new.num_prompt_tokens :])
                assert row is not None, "admitted before its grammar was compiled"
                if row.failure:
                    self.poisoned.add(new.sequence_id)
        return super().execute(plan)


def over_ranks(ahead: CompilesAhead) -> CompilesAhead:
    """Let the rank with the loop call the one that compiles."""
    compiled: list[SequenceId] = []
    rank = GrammarsOfRank(ahead, lambda report: compiled.extend(report.sequence_ids))

    def send(order: GrammarOrder) -> None:
        received = decode_order(encode_plan(order))
        assert isinstance(received, GrammarOrder)
        rank.carry_out(received)

    def take_compiled() -> list[SequenceId]:
        if rank.is_busy:
            rank.report()
        taken = compiled[:]
        compiled.clear()
        return taken

    return GrammarsOfLastStage(send, take_compiled)


class Compiler:
    """A thread that compiles when the test lets it, and a loop beside it."""

    def __init__(self, way: Callable[[CompilesAhead], CompilesAhead]) -> None:
        self.may_go_on = threading.Event()
        self.begun: list[tuple[Grammar, tuple[int, ...]]] = []
        self.ahead = CompileAhead(self.compile)
        self.desk = Desk()
        scheduler = Scheduler(small_config(max_compiling_s=0.01))
        beside = BesideSteps(grammars=way(self.ahead))
        worker = SamplingWorker(4)
        worker.ahead = self.ahead
        self.loop = EngineLoop(scheduler, worker, self.desk, lambda: self.desk.now_s, None, beside)  # type: ignore[arg-type]

    def compile(self, grammar: Grammar, generated: Sequence[int]) -> RowGrammar:
        self.begun.append((grammar, tuple(generated)))
        assert self.may_go_on.wait(60)
        if grammar.text == "broken":
            raise ValueError("it broke")
        return RowGrammar(None, None)

    def ends(self) -> dict[int, FinishReason]:
        return {each.sequence_id: each.finish_reason for each in self.desk.news() if each.finish_reason}

    def turn(self, *messages: ToEngine) -> None:
        self.desk.letters.append(list(messages))
        self.loop.turn()

    def turn_until_ended(self, *ids: int) -> None:
        for _ in range(TURNS * 100):
            if set(ids) <= self.ends().keys():
                return
            self.loop.turn()
            threading.Event().wait(0.001)
        raise AssertionError(f"{self.ends()} without one of {ids}")

    def num_tokens(self, sequence_id: int) -> int:
        return sum(len(each.token_ids) for each in self.desk.news() if each.sequence_id == sequence_id)


@pytest.fixture(params=[lambda ahead: ahead, over_ranks], ids=["in this process", "of another rank"])
def compiler(request: pytest.FixtureRequest) -> Iterator[Compiler]:
    compiler = Compiler(request.param)
    yield compiler
    compiler.may_go_on.set()


def asking(*ids: int, grammar: Grammar = GRAMMAR) -> ToEngine:
    return msgspec.structs.replace(request(*ids), params=SamplingParams(max_tokens=3, grammar=grammar))


def test_a_neighbour_goes_on_to_its_end_while_a_grammar_is_compiled(compiler: Compiler) -> None:
    compiler.turn(asking(1), request(2, max_tokens=20))
    for _ in range(22):
        compiler.loop.turn()
    assert compiler.ends() == {2: FinishReason.LENGTH}
    assert compiler.num_tokens(2) == 20
    assert not compiler.num_tokens(1)
    compiler.may_go_on.set()
    compiler.turn_until_ended(1)
    assert compiler.num_tokens(1) == 3


def test_with_nothing_else_to_do_the_loop_waits_instead_of_spinning(compiler: Compiler) -> None:
    compiler.turn(asking(1))
    before_s = compiler.desk.now_s
    for _ in range(10):
        compiler.loop.turn()
    assert compiler.desk.now_s > before_s
    compiler.may_go_on.set()
    compiler.turn_until_ended(1)


def test_the_time_of_a_compilation_is_no_wait_of_the_worker_for_a_plan(compiler: Compiler) -> None:
    waits: list[float] = []

    def observe(plan: object, seconds: float, passes: object, *, waited_s: float) -> None:
        waits.append(waited_s)

    compiler.loop._scheduler.observe_step = observe  # type: ignore[method-assign, assignment]
    compiler.turn(asking(1), request(2))
    compiler.turn_until_ended(2)
    for _ in range(10):
        compiler.loop.turn()
    compiler.may_go_on.set()
    compiler.turn_until_ended(1)
    assert waits == [0.0] * 6


def test_one_that_leaves_meanwhile_ends_once_and_nothing_of_it_is_kept(compiler: Compiler) -> None:
    compiler.turn(asking(1))
    compiler.turn(EndSequences(sequence_ids=(SequenceId(1),), reason=FinishReason.ABORTED))
    assert [each.finish_reason for each in compiler.desk.news()] == [FinishReason.ABORTED]
    compiler.may_go_on.set()
    compiler.turn(asking(2, grammar=Grammar(kind=GrammarKind.REGEX, text="[cd]+")))
    compiler.turn_until_ended(2)
    assert len(compiler.desk.news()) == 4
    assert compiler.ahead.take_row(GRAMMAR, ()) is None


def test_a_compiler_that_breaks_fails_its_own_sequence_alone(compiler: Compiler) -> None:
    broken = Grammar(kind=GrammarKind.REGEX, text="broken")
    compiler.may_go_on.set()
    compiler.turn(asking(1, grammar=broken), asking(2))
    compiler.turn_until_ended(1, 2)
    assert compiler.ends() == {1: FinishReason.FAILED, 2: FinishReason.LENGTH}
    assert (compiler.num_tokens(1), compiler.num_tokens(2)) == (0, 3)


def test_choices_of_one_request_have_a_row_each(compiler: Compiler) -> None:
    compiler.may_go_on.set()
    compiler.turn(asking(1, 2, 3))
    compiler.turn_until_ended(1, 2, 3)
    assert compiler.begun == [(GRAMMAR, ())] * 3


def test_a_row_whose_step_failed_before_it_was_taken_is_not_kept(compiler: Compiler) -> None:
    worker = compiler.loop._worker
    assert isinstance(worker, SamplingWorker)
    worker.out_of_memory = OutOfMemory.BEFORE_ANYTHING
    compiler.may_go_on.set()
    compiler.turn(asking(1))
    compiler.turn_until_ended(1)
    assert compiler.ends() == {1: FinishReason.FAILED}
    compiler.loop.turn()
    assert compiler.ahead.take_row(GRAMMAR, ()) is None


def test_a_compilation_that_was_given_up_while_its_report_was_under_way_can_begin_again() -> None:
    begun: list[Grammar] = []

    def compile_row(grammar: Grammar, _: Sequence[int]) -> RowGrammar:
        begun.append(grammar)
        return RowGrammar(None, None)

    rank = GrammarsOfRank(CompileAhead(compile_row), lambda _: None)

    def compile_whole() -> None:
        rank.carry_out(GrammarOrder("begin", (SequenceId(1),), GRAMMAR))
        while rank.is_busy:
            rank.report()

    compile_whole()
    rank.carry_out(GrammarOrder("give_up", (SequenceId(1),)))
    rank.carry_out(GrammarOrder("discard", (SequenceId(1),)))
    compile_whole()
    assert begun == [GRAMMAR, GRAMMAR]

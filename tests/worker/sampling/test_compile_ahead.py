"""Rows that are compiled beside the steps sample what rows that are compiled in a step would."""

import threading
from dataclasses import replace

import pytest

from scheduler.messages import Grammar, GrammarKind, SequenceId
from tests.worker.sampling.test_grammar import PERSON, World, regex, schema
from worker.sampling import compile_ahead
from worker.sampling.compile_ahead import CompileAhead
from worker.sampling.grammar_rows import Grammars, RowGrammar


def compile_one(ahead: CompileAhead, grammar: Grammar, generated: list[int]) -> None:
    """Have the row of a sequence compiled, and handed out to the step that admits it."""
    ahead.begin(SequenceId(1), grammar, generated)
    finished: list[SequenceId] = []
    for _ in range(60_000):
        finished = finished or ahead.take_finished()
        if finished:
            break
        threading.Event().wait(0.001)
    assert finished == [1]
    ahead.hand_out(finished)


@pytest.mark.parametrize("cut", [0, 7])
def test_a_row_that_was_compiled_ahead_draws_the_same_and_is_used_once(demo: World, cut: int) -> None:
    grammar = schema(PERSON)
    params = replace(demo.base, grammar=grammar, seed=3)
    whole = demo.generate(params, seed=3)
    sampler, output = demo.sampler(), whole[:cut]
    ahead = sampler.compile_ahead
    assert ahead is not None
    compile_one(ahead, grammar, output)
    sampler.add_row(0, params, [5, *output], 1)
    assert ahead.take_row(grammar, output) is None
    while demo.eos not in output:
        output += sampler.sample(demo.logits(3, len(output)), [0]).token_ids
    assert output == whole


def test_the_matcher_of_a_row_that_is_gone_is_freed_in_the_thread_that_compiles(demo: World) -> None:
    freed_in: list[str] = []

    class Matcher:
        def __del__(self) -> None:
            freed_in.append(threading.current_thread().name)

    sampler = demo.sampler()
    sampler.add_row(0, replace(demo.base, grammar=regex("[ab]+")), [5], 1)
    sampler._rows[0].grammar = RowGrammar(Matcher(), None)  # type: ignore[arg-type]
    sampler.remove_row(0)
    assert sampler.compile_ahead is not None
    compile_one(sampler.compile_ahead, regex("a"), [])  # behind it
    assert [name.partition("_")[0] for name in freed_in] == ["compile"]


def test_a_row_is_for_its_own_text_and_grammar_alone(grammars: Grammars) -> None:
    ahead = CompileAhead(grammars.row_ahead)
    compile_one(ahead, regex("[ab]+"), [])
    assert ahead.take_row(regex("[ab]+"), [7]) is None
    assert ahead.take_row(regex("[ab]*"), []) is None
    assert ahead.take_row(replace(regex("[ab]+"), begins_after=3), []) is None
    assert ahead.take_row(regex("[ab]+"), []) is not None


@pytest.mark.parametrize("text", ["(", "[a-"])
def test_a_grammar_that_cannot_be_compiled_fails_its_own_row(grammars: Grammars, text: str) -> None:
    ahead = CompileAhead(grammars.row_ahead)
    compile_one(ahead, Grammar(kind=GrammarKind.REGEX, text=text), [])
    row = ahead.take_row(Grammar(kind=GrammarKind.REGEX, text=text), [])
    assert row is not None
    assert row.failure.startswith("the grammar failed")


def test_a_compiler_that_panics_fails_its_own_row_and_the_next_one_is_compiled() -> None:
    class Panic(BaseException):
        pass

    def panic(*_: object) -> None:
        raise Panic

    ahead = CompileAhead(panic)  # type: ignore[arg-type]
    for _ in range(2):
        compile_one(ahead, regex("a"), [])
    row = ahead.take_row(regex("a"), [])
    assert row is not None
    assert row.failure == "the grammar failed: Panic"


def test_a_row_that_its_step_did_not_take_is_freed_before_the_next_step() -> None:
    rows: list[RowGrammar] = []

    def make_row(*_: object) -> RowGrammar:
        rows.append(RowGrammar(Matcher(), None))  # type: ignore[arg-type]
        return rows[-1]

    class Matcher: ...

    ahead = CompileAhead(make_row)
    compile_one(ahead, regex("a"), [])
    assert rows[0].matcher is not None
    ahead.hand_out([])
    assert rows[0].matcher is None
    assert ahead.take_row(regex("a"), []) is None


def test_a_compilation_that_has_not_begun_when_its_sequence_ends_is_skipped() -> None:
    may_go_on, compiled = threading.Event(), list[str]()

    def make_row(grammar: Grammar, _: object) -> RowGrammar:
        assert may_go_on.wait(60)
        compiled.append(grammar.text)
        return RowGrammar(None, None)

    ahead = CompileAhead(make_row)
    for sequence_id, text in enumerate("abc", 1):
        ahead.begin(SequenceId(sequence_id), regex(text), [])
    ahead.give_up(SequenceId(2))
    may_go_on.set()
    finished: list[SequenceId] = []
    while len(finished) < 3:
        finished += ahead.take_finished()
        threading.Event().wait(0.001)
    assert finished == [1, 2, 3]
    assert compiled == ["a", "c"]
    ahead.discard(SequenceId(2))


def test_memory_of_freed_matchers_is_given_back_after_they_are_gone_and_seldom(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    class Matcher:
        def __del__(self) -> None:
            events.append("freed")

    are_given_back = threading.Event()

    def trim() -> None:
        events.append("trimmed")
        if events.count("trimmed") > 1:
            are_given_back.set()

    monkeypatch.setattr(compile_ahead, "trim_heaps", trim)
    monkeypatch.setattr(compile_ahead, "_TRIM_EVERY_S", 2.0)
    ahead = CompileAhead(grammars.row_ahead)
    for _ in range(3):
        ahead.free(RowGrammar(Matcher(), None))  # type: ignore[arg-type]
    assert are_given_back.wait(60), "those of the end of a burst"
    assert events[:2] == ["freed", "trimmed"]
    assert sorted(events[2:]) == ["freed", "freed", "trimmed"]

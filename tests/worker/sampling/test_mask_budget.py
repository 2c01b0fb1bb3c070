"""The time that grammars may take is divided fairly: a dear row, a draft or a long text ends no neighbour."""

from dataclasses import replace

import pytest
import torch

from scheduler.messages import Grammar, GrammarKind
from tests.worker.sampling.test_grammar import World, _Clock, _Matcher, _rows
from worker.sampling.grammar_rows import Grammars, RowGrammar
from worker.sampling.mask_budget import MAX_REPLAY_S, MAX_STEP_S, RowAccount, StepAccount, max_replay_s
from worker.sampling.row_sampler import RowSampler


class _DraftMatcher(_Matcher):
    """Allows every draft."""

    def validate_tokens(self, token_ids: list[int]) -> int:
        return len(token_ids)


def test_once_a_step_is_spent_rows_within_an_equal_share_go_on_and_dearer_ones_end() -> None:
    step = StepAccount(num_threads=2, num_rows=20)  # 2 ms each
    modest, fair, dear = (RowAccount(average_s=average_s) for average_s in (0.0006, 0.0019, 0.0021))
    assert step.affords("dear", dear)
    step.pay("new", 0.045)
    assert step.affords("modest", modest)
    assert step.affords("fair", fair)
    assert not step.affords("dear", dear)
    assert not step.affords("new", modest)


def test_a_new_row_that_spends_the_step_ends_no_neighbour_in_another_part_of_it(
    clock: _Clock, grammars: Grammars
) -> None:
    (new,) = _rows(clock, [MAX_STEP_S * grammars._num_threads + 0.005], name=1)
    others = _rows(clock, [0.0006] * 8, name=2)
    grammars.begin_step(len(others))
    grammars.bitmasks(others)  # they have an average now
    grammars.begin_step(1 + len(others))
    grammars.bitmasks([new])
    grammars.bitmasks(others)
    assert not any(row.failure for row in others)
    assert sum(row._matcher.num_masks for row in others) == 16


def test_a_sampler_divides_a_step_by_its_rows_with_active_grammars(
    demo: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    begin = Grammars.begin_step
    monkeypatch.setattr(Grammars, "begin_step", lambda self, num: (counted.append(num), begin(self, num))[0])
    sampler: RowSampler = demo.sampler()
    grammar = Grammar(kind=GrammarKind.REGEX, text="a+")
    waiting = Grammar(kind=GrammarKind.REGEX, text="a+", begins_after=9)
    for row, of_row in enumerate((None, grammar, grammar, waiting)):
        sampler.add_row(row, replace(demo.base, grammar=of_row), [5], 1)
    sampler.sample(demo.logits(0, 0, 4), [0, 1, 2, 3])
    sampler.verify(torch.zeros(2, demo.vocab_size), [0, 1], [(), ()])
    assert counted == [2, 1]


def test_drafts_are_followed_in_time_that_is_left_and_take_none_from_rows(
    clock: _Clock, grammars: Grammars
) -> None:
    cost_s = MAX_STEP_S / 4
    drafted, late = (RowGrammar(_DraftMatcher(clock, cost_s), None, name=name) for name in (1, 2))
    grammars.begin_step(2)
    copies = grammars.along(drafted, range(100))
    assert 1 < len(copies) <= 6
    assert not drafted.failure
    assert grammars._step.spent_s == pytest.approx(cost_s)
    assert len(grammars.along(late, range(100))) == 1
    assert not late.failure


def test_a_long_text_has_more_time_to_be_read_again(clock: _Clock) -> None:
    assert max_replay_s(10) == MAX_REPLAY_S
    row = RowGrammar(_Matcher(clock, 0.0, 0.00001), None)
    for token_id in range(20_000):
        row.record(token_id)
    row.read(max_s=max_replay_s(20_000))
    assert not row.failure
    assert row._matcher.num_consumed == 20_000

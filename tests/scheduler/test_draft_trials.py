"""Turns with a draft model's drafts are measured against turns without, and rest for long where they lose."""

from random import Random

import pytest

from scheduler.config import DraftAdmission, DraftSupply
from scheduler.drafts.draft_trials import DraftTrials
from scheduler.messages import ModelRunnerOutput, SamplingParams, SequenceId
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from tests.world import small_config

PLAIN_S = 0.001


class Turns:
    """A scheduler whose worker takes a time for each turn, and more for what drafts bring."""

    def __init__(self, *, rate: float, pass_s: float, unseen_s: float, num_seqs: int = 1) -> None:
        """Take in how often a draft is right, the time of one, and that of a plan, which no step shows."""
        changes = {
            "draft_admission": DraftAdmission.PAYING,
            "draft_supply": DraftSupply.ASKED,
            "max_drafts": 3,
        }
        self.scheduler = Scheduler(small_config(num_blocks=200, max_model_len=500, **changes))
        self.num_seqs, self.num_added = num_seqs, 0
        self.rate, self.pass_s, self.unseen_s, self.random = rate, pass_s, unseen_s, Random(1)
        self.now_s = 0.0
        self.num_tokens = self.num_asked = 0

    def run(self, num_turns: int) -> float:
        """Return the tokens a second of so many turns, for each sequence."""
        began_s, num_before = self.now_s, self.num_tokens
        for _ in range(num_turns):
            self._turn()
        return (self.num_tokens - num_before) / (self.now_s - began_s) / self.num_seqs

    def _turn(self) -> None:
        while sum(self.scheduler.get_request_counts()[:2]) < self.num_seqs:
            self.num_added += 1
            seq = Sequence(SequenceId(self.num_added), (1,) * 4, SamplingParams(max_tokens=200))
            self.scheduler.add_request(seq, now_s=self.now_s)
        plan = self.scheduler.schedule(now_s=self.now_s)
        sampled = {}
        for share in plan.scheduled:
            drafts = plan.draft_token_ids.get(share.sequence_id, ())  # a right one is 1
            num_right = next((place for place, each in enumerate(drafts) if each != 1), len(drafts))
            sampled[share.sequence_id] = (1,) * (1 + num_right)
        step_s = PLAIN_S * self.random.uniform(0.95, 1.05)
        wanted = plan.num_drafts_wanted
        passes = tuple([(len(wanted), self.pass_s)] * max(wanted.values(), default=0))
        self.num_asked += bool(wanted)
        self.now_s += step_s + sum(each for _, each in passes)
        if wanted or plan.draft_token_ids:
            self.now_s += self.unseen_s
        self.scheduler.observe_step(plan, step_s, passes)
        lengths = {seq.sequence_id: len(seq.token_ids) for seq in self.scheduler.running_sequences()}
        followed = {each: lengths[each] + len(sampled[each]) for each in wanted}
        result = ModelRunnerOutput(token_ids=sampled, logprobs={}, failures={}, num_followed=followed)
        self.scheduler.update_from_output(plan, result)
        self.scheduler.update_draft_token_ids(
            {
                each: tuple(1 if self.random.random() < self.rate else 2 for _ in range(num))
                for each, num in wanted.items()
            }
        )
        self.num_tokens += sum(map(len, sampled.values()))


@pytest.mark.parametrize("num_seqs", [1, 3])
def test_drafts_that_lose_by_what_no_step_shows_are_left_for_long(num_seqs: int) -> None:
    turns = Turns(rate=0.8, pass_s=0.0003, unseen_s=0.004, num_seqs=num_seqs)
    turns.run(1500)
    num_asked = turns.num_asked
    assert turns.run(4000) >= 0.97 / PLAIN_S
    assert 8 <= turns.num_asked - num_asked <= 160, "it is tried again all the same"


def test_a_head_that_is_never_right_costs_next_to_nothing() -> None:
    turns = Turns(rate=0.0, pass_s=0.002, unseen_s=0.001)
    assert turns.run(3000) >= 0.97 / PLAIN_S


def test_drafts_that_win_are_asked_for_in_nearly_all_turns() -> None:
    turns = Turns(rate=0.9, pass_s=0.0001, unseen_s=0.0001)
    turns.run(200)
    num_asked = turns.num_asked
    assert turns.run(1000) >= 2.0 / PLAIN_S
    assert turns.num_asked - num_asked > 950


def test_drafts_are_tried_again_and_kept_once_they_win() -> None:
    turns = Turns(rate=0.9, pass_s=0.0001, unseen_s=0.02)
    turns.run(3000)
    turns.unseen_s = 0.0
    turns.run(2200)
    assert turns.run(300) >= 2.0 / PLAIN_S


def test_turns_without_drafts_are_planned_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(rate=0.0, pass_s=0.002, unseen_s=0.001)
    turns.run(1200)
    planner = turns.scheduler._planner
    planned, plan = [], planner.plan
    monkeypatch.setattr(planner, "plan", lambda **now: planned.append(now) or plan(**now))
    turns.run(400)
    assert len(planned) <= 20


def test_a_turn_in_which_a_sequence_came_or_went_teaches_nothing() -> None:
    trials = DraftTrials()
    trials.begin_turn(0.0, 1, 0)
    before = trials._speeds.num_plain
    trials.begin_turn(9.0, 2, 0)
    trials.begin_turn(9.1, 2, 0)
    assert trials._speeds.num_plain == before

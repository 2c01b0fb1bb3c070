"""Turns with a draft model's drafts are measured against turns without, and rest for long where they lose."""

from random import Random

import pytest

from scheduler.config import DraftAdmission, DraftSupply
from scheduler.drafts.draft_trials import DraftTrials
from scheduler.input_messages import EncoderInput
from scheduler.messages import ModelRunnerOutput, SequenceId
from scheduler.scheduler import Scheduler
from scheduler.step.plan_draft import plan_of_decodes
from tests.fakes import make_sequence
from tests.world import World, small_config

PLAIN_S = 0.001
MODEL_DRAFTS = {
    "draft_admission": DraftAdmission.PAYING,
    "draft_supply": DraftSupply.ASKED,
    "max_drafts": 3,
}


class Turns:
    """A scheduler whose worker takes a time for each turn, and more for what drafts bring.

    `has_prediction`: one of its sequences has a right prediction, which ends it early.
    """

    def __init__(
        self,
        *,
        rate: float,
        pass_s: float,
        unseen_s: float,
        catch_up_s: float = 0.0,
        num_seqs: int = 1,
        has_prediction: bool = False,
    ) -> None:
        """Take in how often a draft is right, and the times of one, of a plan (no step shows it), and of
        each token that is caught up with.
        """
        limits = {"num_blocks": 500, "max_model_len": 500, "max_num_seqs": 8, "max_num_batched_tokens": 64}
        self.scheduler = Scheduler(small_config(**limits, **MODEL_DRAFTS))
        self.num_seqs, self.num_added, self.has_prediction = num_seqs, 0, has_prediction
        self.rate, self.pass_s, self.unseen_s, self.random = rate, pass_s, unseen_s, Random(1)
        self.catch_up_s, self.followed = catch_up_s, dict[SequenceId, int]()
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
            running = self.scheduler.running_sequences()
            is_predicted = self.has_prediction and not any(seq.prediction for seq in running)
            prediction = (1,) * 200 if is_predicted else ()
            seq = make_sequence(self.num_added, [1] * 4, max_tokens=200, prediction=prediction)
            self.scheduler.add_request(seq, now_s=self.now_s)
            if self.has_prediction:
                break  # one in a turn
        plan = self.scheduler.schedule(now_s=self.now_s)
        sampled = {}
        for share in plan.scheduled:
            drafts = plan.draft_token_ids.get(share.sequence_id, ())  # a right one is 1
            num_right = next((place for place, each in enumerate(drafts) if each != 1), len(drafts))
            sampled[share.sequence_id] = (1,) * (1 + num_right)
        step_s = PLAIN_S * self.random.uniform(0.95, 1.05)
        wanted = plan.num_drafts_wanted
        passes = [(len(wanted), self.pass_s)] * max(wanted.values(), default=0)
        running = self.scheduler.running_sequences()
        lengths = {seq.sequence_id: len(seq.token_ids) for seq in running}
        lag = sum(lengths[each] - self.followed.get(each, 0) for each in wanted)
        if lag > 4 * len(wanted):
            passes[0] = (lag, self.pass_s + lag * self.catch_up_s)
        self.num_asked += bool(wanted)
        self.now_s += step_s + sum(each for _, each in passes)
        predicted = {seq.sequence_id for seq in running if seq.prediction}
        if wanted or plan.draft_token_ids.keys() - predicted:
            self.now_s += self.unseen_s
        self.scheduler.observe_step(plan, step_s, tuple(passes))
        followed = {each: lengths[each] + len(sampled[each]) for each in wanted}
        self.followed |= followed
        result = ModelRunnerOutput(token_ids=sampled, logprobs={}, failures={}, num_followed=followed)
        self.scheduler.update_from_output(plan, result)
        self.scheduler.update_draft_token_ids(
            {
                each: tuple(1 if self.random.random() < self.rate else 2 for _ in range(num))
                for each, num in wanted.items()
            }
            | dict.fromkeys(predicted, (1, 1, 1))
        )
        self.num_tokens += sum(map(len, sampled.values()))


@pytest.mark.parametrize("num_seqs", [1, 3])
def test_drafts_that_lose_by_what_no_step_shows_are_left_for_long(num_seqs: int) -> None:
    turns = Turns(rate=0.8, pass_s=0.0003, unseen_s=0.004, num_seqs=num_seqs)
    turns.run(1500)
    num_asked = turns.num_asked
    assert turns.run(4000) >= 0.97 / PLAIN_S
    assert 8 <= turns.num_asked - num_asked <= 160, "it is tried again all the same"


def test_what_a_head_has_to_catch_up_with_before_it_loses_counts_as_lost() -> None:
    turns = Turns(rate=0.8, pass_s=0.0008, unseen_s=0.0008, catch_up_s=0.00003, num_seqs=8)
    turns.run(1000)
    assert turns.run(3000) >= 0.985 / PLAIN_S


def test_a_head_that_is_never_right_costs_next_to_nothing() -> None:
    turns = Turns(rate=0.0, pass_s=0.002, unseen_s=0.001)
    assert turns.run(3000) >= 0.97 / PLAIN_S


def test_a_number_of_sequences_rests_as_fewer_did_for_whom_drafts_lost() -> None:
    turns = Turns(rate=0.8, pass_s=0.0003, unseen_s=0.004, num_seqs=3)
    turns.run(1500)
    num_asked = turns.num_asked
    assert num_asked > 0
    turns.num_seqs = 4
    assert turns.run(300) >= 0.97 / PLAIN_S
    assert turns.num_asked == num_asked


def test_drafts_that_win_are_asked_for_in_nearly_all_turns() -> None:
    turns = Turns(rate=0.9, pass_s=0.0001, unseen_s=0.0001)
    turns.run(200)
    num_asked = turns.num_asked
    assert turns.run(1000) >= 2.0 / PLAIN_S
    assert turns.num_asked - num_asked > 900


def test_drafts_are_tried_again_and_kept_once_they_win() -> None:
    turns = Turns(rate=0.9, pass_s=0.0001, unseen_s=0.004)
    turns.run(3000)
    turns.unseen_s = 0.0
    turns.run(2600)
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
    one, two = (make_sequence(number, [1]) for number in (1, 2))
    scheduler = Scheduler(small_config())
    scheduler.add_request(one, now_s=0.0)
    scheduler.add_request(two, now_s=0.0)
    plan = scheduler.schedule(now_s=0.0)  # of two
    for now_s, running in ((0.0, [one]), (9.0, [one, two]), (18.0, [one])):
        trials.begin_turn(now_s, running)
        trials.note_decodes(plan)
    trials.begin_turn(19.0, [])
    assert not any(speeds.num_plain for speeds in trials._of_sizes.values())
    for now_s in (20.0, 21.0):
        trials.begin_turn(now_s, [one, two])
        trials.note_decodes(plan)
    assert [speeds.num_plain for speeds in trials._of_sizes.values()] == [0, 1, 0], "none, two, one"


def test_a_step_without_shares_before_a_turn_without_sequences_teaches_nothing() -> None:
    world = World(small_config(encoder_cache_tokens=16, **MODEL_DRAFTS))
    world.add(make_sequence(1, [1] * 9, encoder_inputs=(EncoderInput(0, 4, "a cat"),), max_tokens=1))
    plan = world.step(abort_meanwhile=1)
    assert plan.encoder_inputs
    assert not plan.scheduled
    world.step()
    trials = DraftTrials()
    trials.begin_turn(0.0, [])
    trials.note_decodes(plan_of_decodes(1, (), (), {}))
    trials.begin_turn(1.0, [])


def test_a_head_that_wins_with_few_sequences_is_tried_anew_with_more() -> None:
    turns = Turns(rate=0.85, pass_s=0.0001, unseen_s=0.0012, num_seqs=4)
    turns.run(500)
    num_asked = turns.num_asked
    turns.run(200)
    assert turns.num_asked - num_asked > 150, "it wins"
    turns.num_seqs, turns.unseen_s = 7, 0.00245
    turns.run(300)
    assert turns.run(800) >= 0.95 / PLAIN_S


def test_a_slow_stretch_before_a_trial_does_not_make_it_win_for_ever() -> None:
    turns = Turns(rate=0.8, pass_s=0.0003, unseen_s=0.0018)
    turns.run(3000)
    trials = turns.scheduler._drafts.trials
    while not (trials.is_resting and trials._speeds.num_left == 10):
        turns.run(1)
    for _ in range(10):
        turns.run(1)
        turns.now_s += 2 * PLAIN_S
    num_asked = turns.num_asked
    turns.run(28)
    assert turns.num_asked - num_asked > 20, "the trial seems to win"
    turns.run(200)
    assert turns.num_asked - num_asked < 80
    assert turns.run(1000) >= 0.97 / PLAIN_S


@pytest.mark.parametrize(("unseen_s", "least", "most"), [(0.0001, 0.9, 1.0), (0.004, 0.0, 0.1)])
def test_a_prediction_of_one_sequence_neither_ends_nor_wins_trials_of_others(
    unseen_s: float, least: float, most: float
) -> None:
    turns = Turns(rate=0.9, pass_s=0.0001, unseen_s=unseen_s, num_seqs=2, has_prediction=True)
    turns.run(400)
    num_asked = turns.num_asked
    turns.run(500)
    assert least <= (turns.num_asked - num_asked) / 500 <= most


class Clocked:
    """Trials of one sequence, or of others, whose turns take what a test says. Their first rest is over."""

    def __init__(self, *, held_up: bool = False) -> None:
        """Hold up the second turn if asked to."""
        self.trials, self.seq, self.now_s = DraftTrials(), make_sequence(1, [1]), 0.0
        scheduler = Scheduler(small_config())
        scheduler.add_request(self.seq, now_s=0.0)
        self.plan = scheduler.schedule(now_s=0.0)
        self.trials.begin_turn(0.0, [self.seq])
        for number in range(8):
            self.turn(100 * PLAIN_S if held_up and number == 1 else PLAIN_S)

    def turn(self, seconds: float, num_accepted: int = 0, drafts: tuple[int, ...] = ()) -> None:
        """End a turn that took so long, in which drafts held."""
        verified = {self.seq.sequence_id: drafts} if drafts else {}
        self.trials.note_decodes(self.plan._replace(draft_token_ids=verified))
        self.trials.note_accepted(self.seq, num_accepted)
        self.now_s += seconds
        self.trials.begin_turn(self.now_s, [self.seq])

    def num_turns(self, *, resting: bool, seconds: float = PLAIN_S) -> int:
        """Count turns without a draft that holds, until a rest or a trial ends."""
        num = 0
        while self.trials.is_resting == resting and num < 5000:
            self.turn(seconds)
            num += 1
        return num


def test_a_trial_that_loses_by_a_third_is_given_up_early_and_one_that_hardly_wins_at_its_end() -> None:
    clocked = Clocked()
    assert clocked.num_turns(resting=False, seconds=2 * PLAIN_S) == 6
    assert clocked.num_turns(resting=True) == 64, "the first is free"
    assert clocked.num_turns(resting=False, seconds=2 * PLAIN_S) == 6
    assert clocked.num_turns(resting=True) == 600, "a hundred for each of six that were lost"
    assert clocked.num_turns(resting=False, seconds=PLAIN_S / 1.01) == 16


def test_rests_grow_up_to_a_limit_and_are_short_again_behind_a_trial_that_won() -> None:
    clocked = Clocked()
    rests = []
    for _ in range(6):
        clocked.num_turns(resting=False, seconds=2 * PLAIN_S)
        rests.append(clocked.num_turns(resting=True))
    assert rests == [64, 600, 600, 600, 1024, 1024]
    for _ in range(16):
        clocked.turn(PLAIN_S, num_accepted=1)
    clocked.num_turns(resting=False, seconds=3 * PLAIN_S)
    assert clocked.num_turns(resting=True) == 8


def test_one_turn_of_a_trial_that_the_machine_held_up_does_not_lose_it() -> None:
    clocked = Clocked()
    for number in range(16):
        clocked.turn(100 * PLAIN_S if number == 9 else 1.3 * PLAIN_S, num_accepted=1)
    assert not clocked.trials.is_resting


@pytest.mark.parametrize("is_first_rest", [True, False])
def test_one_turn_without_drafts_that_the_machine_held_up_does_not_make_a_trial_win(
    is_first_rest: bool,
) -> None:
    clocked = Clocked(held_up=is_first_rest)
    if not is_first_rest:
        clocked.num_turns(resting=False, seconds=2 * PLAIN_S)
        for number in range(64):
            clocked.turn(100 * PLAIN_S if number == 54 else PLAIN_S)
    assert clocked.num_turns(resting=False, seconds=1.2 * PLAIN_S) == 16


def test_turns_of_a_clock_that_stands_teach_nothing() -> None:
    clocked = Clocked()
    for _ in range(20):
        clocked.turn(0.0)
    assert not clocked.trials.is_resting


def test_drafts_that_were_left_from_a_trial_are_none_of_the_turns_without() -> None:
    clocked = Clocked()
    clocked.num_turns(resting=False, seconds=2 * PLAIN_S)
    num_left = clocked.trials._speeds.num_left
    clocked.turn(9 * PLAIN_S, drafts=(1, 1))
    assert clocked.trials._speeds.num_left == num_left


def test_turns_of_predictions_alone_are_neither_kind() -> None:
    trials, seq = DraftTrials(), make_sequence(1, [1], max_tokens=9, prediction=(1, 1))
    clocked = Clocked()
    for now_s in range(30):
        trials.begin_turn(float(now_s), [seq])
        trials.note_decodes(clocked.plan)
    assert trials._speeds.num_plain == 0


def test_speeds_of_few_sizes_are_kept_at_a_time() -> None:
    trials, seq = DraftTrials(), make_sequence(1, [1])
    with_text = make_sequence(2, [1], max_tokens=9, prediction=(1, 1))
    for number in range(4200):
        trials.begin_turn(float(number), [seq] * (number % 65) + [with_text] * (number // 65))
    assert len(trials._of_sizes) < 4200


def test_a_trial_that_wins_rests_for_a_moment_soon_and_then_ever_more_seldom() -> None:
    clocked, lengths = Clocked(), []
    for _ in range(7):
        num = 0
        while not clocked.trials.is_resting and num < 2000:
            clocked.turn(PLAIN_S, num_accepted=1)
            num += 1
        lengths.append(num)
        assert clocked.num_turns(resting=True) == 8
    assert lengths == [32, 64, 128, 256, 512, 1024, 1024]


def test_what_catching_up_takes_is_lost_and_does_not_make_a_trial_lose() -> None:
    for num_accepted, is_winning in ((1, True), (0, False)):
        clocked = Clocked()
        clocked.num_turns(resting=False, seconds=2 * PLAIN_S)
        clocked.num_turns(resting=True)
        clocked.turn(40 * PLAIN_S)
        for _ in range(15):
            clocked.turn(1.6 * PLAIN_S, num_accepted=num_accepted)
        assert clocked.trials.is_resting != is_winning
    # Five turns are lost by 0.6, and the first by 39; the ten behind them were without drafts.
    assert 4190 <= clocked.num_turns(resting=True) + 10 <= 4200


def test_a_trial_that_ends_since_nothing_is_asked_any_more_is_paid_for_too() -> None:
    clocked = Clocked()
    clocked.num_turns(resting=False, seconds=2 * PLAIN_S)
    clocked.num_turns(resting=True)
    clocked.turn(9 * PLAIN_S)
    clocked.trials.note_nothing_asked()
    assert clocked.num_turns(resting=True) == 800
    clocked.trials.note_nothing_asked()
    assert clocked.num_turns(resting=True) == 64, "of which nothing was asked"


def test_a_trial_that_won_for_long_is_given_up_soon_where_it_loses() -> None:
    clocked = Clocked()
    for _ in range(400):
        clocked.turn(PLAIN_S, num_accepted=1)
    assert clocked.num_turns(resting=False, seconds=3 * PLAIN_S) <= 16

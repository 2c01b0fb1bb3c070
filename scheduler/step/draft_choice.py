"""Choice of the drafts that pay: how many the next step verifies, and how many a draft model makes for it.

Owns: how often drafts were right, for each sequence and each place among its drafts; the time of a step, and
of a pass of a draft model, by its tokens; the choices by these. No draft is a normal choice.
Never: proposes or verifies a draft (the worker does both), gives a share (token_shares.py), or reads a clock.
Source: speculative decoding pays while expected tokens a second rise: arXiv:2211.17192, section 3.3; here the
time of a step is measured, not assumed, and drafts of all sequences compete for the same step.

A draft at place j is kept if the j before it are. Its survival is the product of the rates of all places up
to its own. So drafts in order of their survival are, of each sequence, in order of their places:

    tokens(m) = sequences + survival of the best m          seconds(m) = measured, by tokens of the step
    the choice is the m with the most tokens(m) / seconds(m)

An offer that was not verified teaches as well: the token that was sampled shows whether it was right.

Drafts of a model are asked for one step ahead, and there their own time counts: a pass computes one place of
all sequences that want it, and seconds(m) grow by the passes for m drafts. Once made, they are offers.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scheduler.draft_messages import DraftChoice, DraftReason, PredictionUse
from scheduler.messages import (
    ModelRunnerOutput,
    SchedulerOutput,
    SequenceId,
)
from scheduler.sequence import Sequence as TokenSequence

_RATE_OF_STRANGERS = 0.6  # until anything is known
_LEARNING = 0.1  # weight of the latest outcome of a sequence
_LEARNING_OF_ALL = 0.02
_COST_LEARNING = 0.1
_MAX_SURPRISE = 2.0  # a step that took longer than so many times the usual counts as such
_NUM_SETTLED = 10  # observations of a size, from which on it shows a trend
_TREND_LEARNING = 0.05
_LEAST_TREND, _MAX_TREND = 0.04, 0.1  # less is noise
_LEAST_LEFT = 0.95
_LEAST_GAIN = 1.03  # less is within the error of what is measured
_PROBE_INTERVAL = 64
_LEAST_SURVIVAL_OF_PROBE = 0.3
_EXACT_SIZES = 16


class StepCosts:
    """Measured seconds of steps without prompts, by their number of tokens; straight lines between.

    Growing contexts add time to steps of all sizes. So where settled sizes take more than they did, or less,
    for a while, those not seen meanwhile follow: else they would look cheap.
    """

    def __init__(self) -> None:
        self._means: dict[int, float] = {}
        self._nums: dict[int, int] = {}  # of observations, of each size
        self._trend = 0.0  # of late: time beyond the expected, as a part of it
        self._sizes: list[int] = []  # in order; some two hundred at most

    def observe(self, num_tokens: int, seconds: float) -> None:
        size = _rounded(num_tokens)
        mean = self._means.get(size)
        self._nums[size] = self._nums.get(size, 0) + 1
        if mean is None:
            self._means[size] = seconds
            self._sizes = sorted(self._means)
            return
        surprise = min(seconds / mean, _MAX_SURPRISE) - 1.0
        if self._nums[size] >= _NUM_SETTLED:
            self._trend += _TREND_LEARNING * (surprise - self._trend)
            if abs(self._trend) > _LEAST_TREND:
                self._shift(_COST_LEARNING * max(-_MAX_TREND, min(self._trend, _MAX_TREND)) * mean)
        self._means[size] = mean * (1.0 + _COST_LEARNING * surprise)

    def _shift(self, seconds: float) -> None:
        """Add so much to the time of all sizes; they keep most of it if that is less than nothing."""
        for size, mean in self._means.items():
            self._means[size] = max(mean + seconds, _LEAST_LEFT * mean)

    def has_measured(self, num_tokens: int) -> bool:
        return _rounded(num_tokens) in self._means

    @property
    def largest(self) -> int:
        """Most tokens of a step that was measured; 0 before any."""
        return self._sizes[-1] if self._sizes else 0

    def seconds(self, num_tokens: int) -> float:
        """Expected time of a step. Beyond what was measured, as if it grew on like between the ends."""
        sizes, means = self._sizes, self._means
        if not sizes:
            return 1.0
        above = next((size for size in sizes if size >= num_tokens), None)
        if above is not None and (above == num_tokens or above == sizes[0]):
            return means[above]
        first, last = sizes[0], sizes[-1]
        if above is None:
            slope = 0.0 if first == last else max(means[last] - means[first], 0.0) / (last - first)
            return means[last] + slope * (num_tokens - last)
        below = sizes[sizes.index(above) - 1]
        share = (num_tokens - below) / (above - below)
        return means[below] + share * (means[above] - means[below])


class _Record:
    """Rates of one sequence, and its latest offer."""

    __slots__ = ("num_known", "offer", "rates")

    def __init__(self, rates: Sequence[float]) -> None:
        self.rates = list(rates)
        self.offer: tuple[int, ...] = ()
        self.num_known = 0  # tokens of the sequence when the offer was made


class Slot(NamedTuple):
    """One draft that may be verified."""

    survival: float
    sequence_id: SequenceId


class DraftRule:
    """The choice for one step after the other."""

    def __init__(self, max_drafts: int) -> None:
        self._rates_of_all = [_RATE_OF_STRANGERS] * max_drafts
        self._max_drafts = max_drafts
        self._records: dict[SequenceId, _Record] = {}
        self._num_choices = self._num_asks = 0
        self.costs = StepCosts()
        self.pass_costs = StepCosts()
        """The same of passes of a draft model."""

    @property
    def is_idle(self) -> bool:
        """Whether no running sequence was ever offered drafts: then no step needs to be measured."""
        return not self._records

    def note_offer(self, sequence_id: SequenceId, known: Sequence[int], offer: tuple[int, ...]) -> None:
        """Take in drafts that continue the `known` tokens, and learn from those offered before."""
        record = self._records.get(sequence_id)
        if record is None:
            record = self._records[sequence_id] = _Record(self._rates_of_all)
        self._learn(record, known)
        record.offer, record.num_known = offer[: self._max_drafts], len(known)

    def forget(self, sequence_id: SequenceId) -> None:
        self._records.pop(sequence_id, None)

    def rates(self, sequence_id: SequenceId) -> list[float]:
        """Rates at which a draft at each place is right, if all before it are."""
        record = self._records.get(sequence_id)
        return list(self._rates_of_all if record is None else record.rates)

    def choose(
        self, offers: Mapping[SequenceId, tuple[int, ...]], *, num_decodes: int, has_prefill: bool
    ) -> tuple[dict[SequenceId, int], DraftChoice]:
        """Choose the number of drafts of each sequence, for a step of `num_decodes` sequences."""
        slots = self._slots(offers)
        if has_prefill:
            return {}, DraftChoice(len(slots), 0, DraftReason.PREFILL, 0.0, 0.0)
        num_chosen = self._num_that_pay(slots, num_decodes)
        self._num_choices += 1
        if self._num_choices % _PROBE_INTERVAL == 0:
            num_chosen = max(num_chosen, self._num_to_probe(slots, num_chosen))
        chosen: dict[SequenceId, int] = {}
        for slot in slots[:num_chosen]:
            chosen[slot.sequence_id] = chosen.get(slot.sequence_id, 0) + 1
        reason = DraftReason.ALL if num_chosen == len(slots) else DraftReason.COST
        tokens = num_decodes + sum(slot.survival for slot in slots[:num_chosen])
        seconds = self.costs.seconds(num_decodes + num_chosen)
        return chosen, DraftChoice(len(slots), num_chosen, reason, tokens, seconds)

    def ask(self, room: Mapping[SequenceId, int], *, num_decodes: int) -> dict[SequenceId, int]:
        """Choose the number of drafts that a model makes for each sequence, for a step of `num_decodes`.

        `room` has the most of each. Now and then one is asked for though it is not expected to pay:
        nothing else shows how often it is right.
        """
        if not self.costs.has_measured(num_decodes):
            return {}
        self._num_asks += 1
        if not self.pass_costs.largest or self._num_asks % _PROBE_INTERVAL == 0:
            return {each: 1 for each, num in room.items() if num}
        slots = self._slots({each: range(num) for each, num in room.items()})
        asked: dict[SequenceId, int] = {}
        for slot in slots[: self._num_worth_making(slots, num_decodes)]:
            asked[slot.sequence_id] = asked.get(slot.sequence_id, 0) + 1
        return asked

    def _num_worth_making(self, slots: Sequence[Slot], num_decodes: int) -> int:
        """Count the best slots with which tokens a second are most, the time to draft them included."""
        most = min(len(slots), self._num_foreseeable(num_decodes))
        tokens, drafting_s = float(num_decodes), 0.0
        num_in_pass = [0] * self._max_drafts
        places: dict[SequenceId, int] = {}
        best_num, best = 0, _LEAST_GAIN * tokens / self.costs.seconds(num_decodes)
        for num, slot in enumerate(slots[:most], start=1):
            place = places.get(slot.sequence_id, 0)
            places[slot.sequence_id] = place + 1
            num_before = num_in_pass[place]
            num_in_pass[place] += 1
            drafting_s += self.pass_costs.seconds(num_before + 1)
            drafting_s -= self.pass_costs.seconds(num_before) if num_before else 0.0
            tokens += slot.survival
            speed = tokens / (self.costs.seconds(num_decodes + num) + drafting_s)
            if speed > best:
                best_num, best = num, speed
        return best_num

    def _num_foreseeable(self, num_decodes: int) -> int:
        """Count drafts up to twice the largest step that was measured: costs beyond are a guess."""
        return max(2 * self.costs.largest, 2 * num_decodes) - num_decodes

    def _num_that_pay(self, slots: Sequence[Slot], num_decodes: int) -> int:
        """Count the best slots with which tokens a second are most; 0 if they hardly gain."""
        if not self.costs.has_measured(num_decodes):
            return 0  # without drafts first: else nothing shows what they cost
        most = min(len(slots), self._num_foreseeable(num_decodes))
        tokens = float(num_decodes)
        best_num, best = 0, _LEAST_GAIN * tokens / self.costs.seconds(num_decodes)
        for num in range(1, most + 1):
            tokens += slots[num - 1].survival
            speed = tokens / self.costs.seconds(num_decodes + num)
            if speed > best:
                best_num, best = num, speed
        return best_num

    def _num_to_probe(self, slots: Sequence[Slot], num_chosen: int) -> int:
        """Count slots for a step that is made larger once in a while, lest one slow step count for ever."""
        num = min(2 * num_chosen + 1, len(slots))
        return num if num and slots[num - 1].survival >= _LEAST_SURVIVAL_OF_PROBE else 0

    def _slots(self, offers: Mapping[SequenceId, Sequence[int]]) -> list[Slot]:
        slots = []
        for sequence_id, offer in offers.items():
            survival = 1.0
            for _, rate in zip(offer, self.rates(sequence_id), strict=False):
                survival *= rate
                slots.append(Slot(survival, sequence_id))
        slots.sort(key=lambda slot: -slot.survival)  # stable: of equals the earlier place first
        return slots

    def _learn(self, record: _Record, known: Sequence[int]) -> None:
        sampled = known[record.num_known : record.num_known + len(record.offer)]
        for place, (draft, token_id) in enumerate(zip(record.offer, sampled, strict=False)):
            is_right = float(draft == token_id)
            record.rates[place] += _LEARNING * (is_right - record.rates[place])
            self._rates_of_all[place] += _LEARNING_OF_ALL * (is_right - self._rates_of_all[place])
            if not is_right:
                break


def _rounded(num_tokens: int) -> int:
    """Round larger sizes, so that few are told apart: to an eighth of themselves."""
    if num_tokens <= _EXACT_SIZES:
        return num_tokens
    unit = 1 << (num_tokens.bit_length() - 4)
    return -(-num_tokens // unit) * unit


def prediction_use(
    seq: TokenSequence, kept_ids: tuple[int, ...], plan: SchedulerOutput, result: ModelRunnerOutput
) -> PredictionUse | None:
    """Count the drafts of a sequence that were accepted, up to its end, and the others."""
    num_drafts = len(plan.draft_token_ids.get(seq.sequence_id, ()))
    num_accepted = min(len(result.token_ids[seq.sequence_id]) - 1, len(kept_ids))
    return PredictionUse(num_accepted, num_drafts - num_accepted) if num_drafts else None

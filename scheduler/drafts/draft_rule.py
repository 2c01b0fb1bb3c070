"""Choice of the drafts that pay: how many the next step verifies, and how many a draft model makes for it.

Owns: the choices by how often drafts were right (draft_rates.py) and by what they cost, which is measured
here, and the time that may be spent to learn more. No draft is a normal choice.
Source: speculative decoding pays while expected tokens a second rise: arXiv:2211.17192, section 3.3; here the
time of a step is measured, not assumed, and drafts of all sequences compete for the same step.

A draft at place j is kept if the j before it are. Its survival is the product of the rates of all places up
to its own. So drafts in order of their survival are, of each sequence, in order of their places:

    tokens(m) = sequences + survival of the best m          seconds(m) = measured, by tokens of the step
    the choice is the m with the most tokens(m) / seconds(m)

An offer that was not verified teaches as well: the token that was sampled shows whether it was right.

Drafts of a model are asked for one step ahead, and there their own time counts: a pass computes one place of
all sequences that want it, and seconds(m) grow by the passes for m drafts. Once made, they are offers. A
sequence that the draft model has not followed also has to win back the time of its prompt.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

from scheduler.draft_messages import DraftChoice, DraftReason
from scheduler.drafts.draft_rates import FIRST_RATES, DraftSource, Rates
from scheduler.messages import SequenceId

_LEAST_GAIN = 1.03  # less is within the error of measurement
_PROBE_INTERVAL = 64
_LEAST_SURVIVAL_OF_PROBE = 0.3
_FURTHER_ROWS, _FURTHER_TIMES = 8, 4
"""A step may have this many rows more than the largest that was measured, or be this many times as large."""
_EXPLORED_PART = 0.01
"""Part of all time that drafts may take that are not expected to pay."""
_FEW_OUTCOMES = 8.0
_NEAR = 16  # tokens that a draft model catches up with in the passes of others
_LEAST_AHEAD = 32
"""Tokens that a sequence is expected to get at least, if it may; otherwise as many as it has."""

_FIXED_ROWS = 12
"""Rows that take as long as the fixed part of a step: assumed until sizes are measured."""
_COST_LEARNING = 0.1
_MAX_SURPRISE = 2.0  # a step that took longer than this many times the usual counts as that; so does a wait
_MAX_SURPRISE_AT_FIRST = 1.3  # a disturbance only ever adds
_NUM_SETTLED = 10  # observations of a size, from which on it shows a trend
_TREND_LEARNING = 0.05
_LEAST_TREND, _MAX_TREND = 0.04, 0.1  # less is noise
_LEAST_LEFT = 0.95
_EXACT_SIZES = 16
_WAIT_MEMORY = 0.95


class StepCosts:
    """Measured seconds of steps without prompts, by their number of tokens; straight lines between.

    Growing contexts add time to steps of all sizes. So where settled sizes take more than they did, or less,
    for a while, those not seen meanwhile follow: otherwise they would look cheap.
    """

    def __init__(self) -> None:
        self._means: dict[int, float] = {}
        self._nums: dict[int, int] = {}  # of observations, of each size
        self._trend = 0.0  # of late: time beyond the expected, as a part of it
        self._sizes: list[int] = []  # in order; some two hundred at most

    def observe(self, num_tokens: int, seconds: float) -> None:
        size = _rounded(num_tokens)
        mean = self._means.get(size)
        self._nums[size] = num = self._nums.get(size, 0) + 1
        if mean is None:
            self._means[size] = seconds
            self._sizes = sorted(self._means)
            return
        surprise = min(seconds / mean, _MAX_SURPRISE if num >= _NUM_SETTLED else _MAX_SURPRISE_AT_FIRST) - 1.0
        if num >= _NUM_SETTLED:
            self._trend += _TREND_LEARNING * (surprise - self._trend)
            if abs(self._trend) > _LEAST_TREND:
                self._shift(_COST_LEARNING * max(-_MAX_TREND, min(self._trend, _MAX_TREND)) * mean)
        # A size that was seen seldom must not look cheaper than one that is seen always: both are means.
        self._means[size] = mean * (1.0 + max(_COST_LEARNING, 1.0 / num) * surprise)

    def _shift(self, seconds: float) -> None:
        """Add so much to the time of all sizes; they keep most of it if that is less than nothing."""
        for size, mean in self._means.items():
            self._means[size] = max(mean + seconds, _LEAST_LEFT * mean)

    def knows(self, num_tokens: int) -> bool:
        """Tell whether a size was measured, or smaller and larger ones were."""
        return bool(self._sizes) and self._sizes[0] <= _rounded(num_tokens) <= self._sizes[-1]

    @property
    def largest(self) -> int:
        """Most tokens of a step that was measured; 0 before any."""
        return self._sizes[-1] if self._sizes else 0

    def seconds(self, num_tokens: int) -> float:
        """Expected time of a step.

        Beyond the largest measurement it grows on like between the ends, if these lie apart.
        """
        sizes, means = self._sizes, self._means
        if not sizes:
            return 1.0
        above = next((size for size in sizes if size >= num_tokens), None)
        first, last = sizes[0], sizes[-1]
        if num_tokens <= first:
            return means[first] * (_FIXED_ROWS + num_tokens) / (_FIXED_ROWS + first)
        if above is None:
            slope = means[last] / (_FIXED_ROWS + last)
            if last >= 2 * first:
                slope = max(means[last] - means[first], 0.0) / (last - first)
            return means[last] + slope * (num_tokens - last)
        below = sizes[sizes.index(above) - 1]
        share = (num_tokens - below) / (above - below)
        return means[below] + share * (means[above] - means[below])


class DraftWaits:
    """Time that the worker stands still for one step with drafts, where plans are made ahead.

    Such a step waits until the last token is known and its plan is made, and so does the step behind it.
    Other steps count as time that passes: the next wait then counts for more.
    """

    def __init__(self) -> None:
        self._all_s = self._num_drafted = 0.0
        self._is_behind = False

    def observe(self, seconds: float, step_s: float, *, has_drafts: bool) -> None:
        """Take in how long the worker waited for a step.

        A wait far beyond the usual, and beyond the time of a step, has causes that no draft brings.
        """
        most_s = max(step_s, _MAX_SURPRISE * self.seconds)
        self._all_s *= _WAIT_MEMORY
        self._num_drafted = self._num_drafted * _WAIT_MEMORY + has_drafts
        if has_drafts or self._is_behind:
            self._all_s += min(seconds, most_s)
        self._is_behind = has_drafts

    @property
    def seconds(self) -> float:
        return self._all_s / self._num_drafted if self._num_drafted else 0.0


def _rounded(num_tokens: int) -> int:
    """Round larger sizes to an eighth of themselves, so that there are few."""
    if num_tokens <= _EXACT_SIZES:
        return num_tokens
    unit = 1 << (num_tokens.bit_length() - 4)
    return -(-num_tokens // unit) * unit


@dataclass(slots=True, eq=False)
class _Record:
    """Rates of one sequence, and its latest offer."""

    rates: Rates
    offer: tuple[int, ...] = ()
    num_known: int = 0  # tokens of the sequence when the offer was made


class Slot(NamedTuple):
    """One draft that may be verified."""

    survival: float
    sequence_id: SequenceId


class Drafting(NamedTuple):
    """A sequence that a draft model may draft for."""

    most: int
    """Drafts that it has room for."""
    lag: int
    """Tokens that the draft model has to catch up with."""
    num_generated: int
    num_left: int
    """Tokens that it may still get."""


class DraftRule:
    """The choice for one step after the other."""

    def __init__(self, max_drafts: int) -> None:
        self._of_source = {each: Rates(max_drafts, rate) for each, rate in FIRST_RATES.items()}
        self._max_drafts = max_drafts
        self._records: dict[SequenceId, _Record] = {}
        self._num_choices = 0
        self._observed_s = self._explored_s = 0.0
        self._waits = DraftWaits()
        self._has_looked = False
        self.costs = StepCosts()
        self.pass_costs = StepCosts()
        """Costs of passes of a draft model."""

    @property
    def is_idle(self) -> bool:
        """Whether no running sequence was ever offered drafts: then no step needs to be measured."""
        return not self._records

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn how long a step without prompts took."""
        self.costs.observe(num_tokens, seconds)
        self._observed_s += seconds

    def observe_wait(self, seconds: float, *, has_drafts: bool) -> None:
        """Learn how long the worker waited for a step, where steps without drafts are planned ahead."""
        self._waits.observe(seconds, self.costs.seconds(1), has_drafts=has_drafts)

    def note_offer(
        self, sequence_id: SequenceId, known: Sequence[int], offer: tuple[int, ...], source: DraftSource
    ) -> None:
        """Take in drafts that continue the `known` tokens, and learn from those offered before."""
        record = self._records.get(sequence_id)
        if record is None:
            record = self._records[sequence_id] = _Record(Rates(self._max_drafts, self._of_source[source]))
        self._learn(record, known, self._of_source[source])
        record.offer, record.num_known = offer[: self._max_drafts], len(known)

    def forget(self, sequence_id: SequenceId) -> None:
        self._records.pop(sequence_id, None)

    def rates(self, sequence_id: SequenceId) -> list[float]:
        """Rates at which a draft at each place is right, if all before it are."""
        record = self._records.get(sequence_id)
        return (self._of_source[DraftSource.MODEL] if record is None else record.rates).of_places()

    def choose(
        self, offers: Mapping[SequenceId, int], *, num_decodes: int, has_prefill: bool
    ) -> tuple[dict[SequenceId, int], DraftChoice]:
        """Choose how many offered drafts of each sequence a step of `num_decodes` sequences verifies."""
        slots = self._slots(offers)
        if has_prefill:
            return {}, DraftChoice(len(slots), 0, DraftReason.PREFILL, 0.0, 0.0)
        num_chosen = 0
        if self.costs.knows(num_decodes):  # without drafts first: their cost is measured against that
            num_chosen, _ = self._best(slots, num_decodes, repeat(0.0))
        self._num_choices += 1
        if not num_chosen and self._may_look_beyond(num_decodes):
            num_chosen = min(_FURTHER_ROWS, len(slots))
        elif self._num_choices % _PROBE_INTERVAL == 0:
            num_chosen = max(num_chosen, self._num_to_probe(slots, num_chosen, num_decodes))
        chosen: dict[SequenceId, int] = {}
        for slot in slots[:num_chosen]:
            chosen[slot.sequence_id] = chosen.get(slot.sequence_id, 0) + 1
        reason = DraftReason.ALL if num_chosen == len(slots) else DraftReason.COST
        tokens = num_decodes + sum(slot.survival for slot in slots[:num_chosen])
        seconds = self._step_s(num_decodes, num_chosen)
        return chosen, DraftChoice(len(slots), num_chosen, reason, tokens, seconds)

    def ask(self, drafting: Mapping[SequenceId, Drafting], *, num_decodes: int) -> dict[SequenceId, int]:
        """Choose the number of drafts that a model makes for each sequence, for a step of `num_decodes`.

        Where none is expected to pay, one is made once in a while: only that shows how often it is right.
        """
        if not self.costs.knows(num_decodes):
            return {}
        model = self._of_source[DraftSource.MODEL]
        asked: dict[SequenceId, int] = {}
        if self.pass_costs.largest:
            slots = self._slots({each: one.most for each, one in drafting.items()})
            num_slots, saved_s = self._best(slots, num_decodes, self._making_s(slots))
            for slot in slots[:num_slots]:
                one = drafting[slot.sequence_id]
                if self._wins_back(one, saved_s):
                    asked[slot.sequence_id] = asked.get(slot.sequence_id, 0) + 1
        if model.num_outcomes < _FEW_OUTCOMES and asked:  # little is known: one sequence shows it to all
            first = min(asked, key=lambda each: drafting[each].lag)
            return {first: min(asked[first], 1 + 2 * int(model.num_outcomes))}
        return asked or self._explore(drafting, num_decodes)

    def _wins_back(self, one: Drafting, saved_s: float) -> bool:
        """Tell whether drafts save the time in which a sequence's prompt is caught up with."""
        num_ahead = min(one.num_left, max(one.num_generated, _LEAST_AHEAD))
        return num_ahead * saved_s >= self._catch_up_s(one)

    def _catch_up_s(self, one: Drafting) -> float:
        return self.pass_costs.seconds(one.lag) if one.lag > _NEAR else 0.0

    def _explore(self, drafting: Mapping[SequenceId, Drafting], num_decodes: int) -> dict[SequenceId, int]:
        """Ask for one draft of the sequence for which it takes least, if that time may be spent."""
        able = [each for each, one in drafting.items() if one.most]
        if not able:
            return {}
        cheapest = min(able, key=lambda each: drafting[each].lag)
        spent_s = self._growth_s(num_decodes, 0, 1)
        if self.pass_costs.largest:
            spent_s += max(self.pass_costs.seconds(1), self._catch_up_s(drafting[cheapest]))
            if not self._may_explore(spent_s):
                return {}
        return {cheapest: 1}

    def _may_explore(self, seconds: float) -> bool:
        """Tell whether so much time may be spent to learn more, and count it if so."""
        if self._explored_s + seconds > _EXPLORED_PART * self._observed_s:
            return False
        self._explored_s += seconds
        return True

    def _best(self, slots: Sequence[Slot], num_decodes: int, making_s: Iterable[float]) -> tuple[int, float]:
        """Count the best slots with which tokens a second are most; 0 if they hardly gain.

        `making_s` is the time to draft the first one, the first two and so on. Returns the seconds, too, that
        they save for each token.
        """
        most = min(len(slots), self._num_foreseeable(num_decodes))
        tokens = float(num_decodes)
        without = tokens / self.costs.seconds(num_decodes)
        best_num, best = 0, _LEAST_GAIN * without
        for num, (slot, drafting_s) in enumerate(zip(slots[:most], making_s, strict=False), start=1):
            tokens += slot.survival
            speed = tokens / (self._step_s(num_decodes, num) + drafting_s)
            if speed > best:
                best_num, best = num, speed
        return best_num, 1.0 / without - 1.0 / best if best_num else 0.0

    def _making_s(self, slots: Sequence[Slot]) -> Iterator[float]:
        """Yield the time of the passes that make the first slot, the first two and so on."""
        drafting_s, num_in_pass = 0.0, [0] * self._max_drafts
        places: dict[SequenceId, int] = {}
        for slot in slots:
            place = places.get(slot.sequence_id, 0)
            places[slot.sequence_id] = place + 1
            num_before = num_in_pass[place]
            num_in_pass[place] += 1
            drafting_s += self.pass_costs.seconds(num_before + 1)
            drafting_s -= self.pass_costs.seconds(num_before) if num_before else 0.0
            yield drafting_s

    def _num_foreseeable(self, num_decodes: int) -> int:
        """Count drafts up to some times the largest step that was measured: costs beyond are a guess."""
        largest = max(self.costs.largest, num_decodes)
        return max(_FURTHER_TIMES * largest, largest + _FURTHER_ROWS) - num_decodes

    def _may_look_beyond(self, num_decodes: int) -> bool:
        """Tell whether drafts are tried because nothing shows yet what they would cost; at first they are."""
        if not num_decodes >= self.costs.largest > 0:
            return False
        if self._has_looked and not self._may_explore(self._growth_s(num_decodes, 0, _FURTHER_ROWS)):
            return False
        self._has_looked = True
        return True

    def _num_to_probe(self, slots: Sequence[Slot], num_chosen: int, num_decodes: int) -> int:
        """Count slots for a larger step, made at times so that one slow step does not count for ever."""
        num = min(2 * num_chosen + 1, len(slots))
        if not num or slots[num - 1].survival < _LEAST_SURVIVAL_OF_PROBE:
            return 0
        return num if self._may_explore(self._growth_s(num_decodes, num_chosen, num)) else 0

    def _growth_s(self, num_decodes: int, num_drafts: int, num_instead: int) -> float:
        return self._step_s(num_decodes, num_instead) - self._step_s(num_decodes, num_drafts)

    def _step_s(self, num_decodes: int, num_drafts: int) -> float:
        """Return the expected time of a step, and of the waits that its drafts bring."""
        return self.costs.seconds(num_decodes + num_drafts) + (self._waits.seconds if num_drafts else 0.0)

    def _slots(self, offers: Mapping[SequenceId, int]) -> list[Slot]:
        slots = []
        for sequence_id, num_offered in offers.items():
            survival = 1.0
            for rate in self.rates(sequence_id)[:num_offered]:
                survival *= rate
                slots.append(Slot(survival, sequence_id))
        slots.sort(key=lambda slot: -slot.survival)  # stable: of equals the earlier place first
        return slots

    def _learn(self, record: _Record, known: Sequence[int], rates_of_source: Rates) -> None:
        sampled = known[record.num_known : record.num_known + len(record.offer)]
        for place, (draft, token_id) in enumerate(zip(record.offer, sampled, strict=False)):
            is_right = draft == token_id
            record.rates.learn(place, is_right=is_right)
            rates_of_source.learn(place, is_right=is_right)
            if not is_right:
                break

"""Trials of a draft model or a head: whether turns with its drafts bring more tokens a second than others.

    without .... | trial .. | without, twice as long after each trial that loses .... | trial .. | ...

A turn lasts from one plan to the next. So what plans, samples and answers take counts as well, of which the
times of steps and passes (draft_rule.py) know nothing: of a small model it is most. Turns without drafts are
planned the short way.

A trial that wins goes on, with a short rest at times: only turns without drafts show what they take by now.
In the first turn of a trial the model or head catches up with the rest, which counts as lost.

Owns: the speed of both kinds of turn, by the number of sequences, and the turns until the next trial.
"""

from collections.abc import Collection

from scheduler.messages import SchedulerOutput
from scheduler.sequence import Sequence

_FIRST_REST, _LEAST_REST, _MAX_REST = 8, 64, 1024
"""Turns without drafts: before the first trial and after one that had won, after one that lost or asked for
nothing, and after many that lost, of each of which a trial is a sixtieth."""
_REST_BY_LOSS = 100
"""Turns without drafts for each that a trial lost: trials that lose cost a hundredth of all time at most."""
_TRIAL, _TRIAL_IN_VAIN = 16, 6
"""Turns of a trial, and of one that loses by a third."""
_FIRST_RENEWAL, _RENEWAL = 32, 1024
"""Turns of a trial that wins until turns without drafts are measured again: twice as many each time, since
the machine may have been slow when they were measured."""
_MAX_SIZES = 4096  # numbers of sequences for which speeds are kept
_LEAST_GAIN, _LOSS = 1.02, 0.67
_MAX_SURPRISE = 3.0  # a turn that took longer than this many times the usual counts as that
_MAX_SURPRISE_AT_FIRST = 1.3  # a start is slow
_LEARNING = 0.1


class _Speeds:
    """Speeds with a number of sequences. Times are seconds for each sequence."""

    def __init__(self, of_fewer: "_Speeds | None" = None) -> None:
        """Begin with the rest of fewer sequences where drafts lost: more sequences gain less by them."""
        self.rest, self.num_left = _LEAST_REST, _FIRST_REST
        """Turns of the next rest, and of this one that are left; below 0 those of a trial."""
        self.last_rest = 0
        """Turns of the rest after the last trial, if that lost; else 0."""
        if of_fewer is not None and of_fewer.last_rest:
            self.num_left = self.last_rest = of_fewer.last_rest
        self.renewal = _FIRST_RENEWAL
        self.num_plain = self.num_turns = 0
        self.plain_s = self.catch_up_s = self.trial_s = self.trial_tokens = 0.0

    def learn_plain(self, seconds: float) -> None:
        self.num_left -= 1
        self.num_plain += 1
        if self.num_plain == 1:
            self.plain_s = seconds
        most = self.plain_s * (_MAX_SURPRISE if self.num_plain > _FIRST_REST else _MAX_SURPRISE_AT_FIRST)
        self.plain_s += max(_LEARNING, 1.0 / self.num_plain) * (min(seconds, most) - self.plain_s)

    def learn_trial(self, seconds: float, tokens: float) -> None:
        """Take in a turn of a trial with its tokens for each sequence; end the trial if it does not pay."""
        self.num_left -= 1
        self.num_turns += 1
        if self.num_turns == 1:  # no later one is like it
            self.catch_up_s = seconds - tokens * self.plain_s
            return
        self.trial_s += min(seconds, _MAX_SURPRISE * (1.0 + tokens) * self.plain_s)
        self.trial_tokens += tokens
        gain = self.trial_tokens * self.plain_s / self.trial_s
        if self.num_turns >= _TRIAL and gain >= _LEAST_GAIN:
            # Should it lose later on, turns without drafts may be slower too: their contexts have grown.
            self.rest, self.last_rest, self.num_turns = _FIRST_REST, 0, _TRIAL // 2
            self.trial_s, self.trial_tokens = self.trial_s / 2, self.trial_tokens / 2
            if self.num_left <= -self.renewal:  # what was known counts as one turn
                self.num_left, self.num_plain = _FIRST_REST, 1
                self.renewal = min(2 * self.renewal, _RENEWAL)
        elif self.num_turns >= _TRIAL or (self.num_turns >= _TRIAL_IN_VAIN and gain < _LOSS):
            self.end_trial(self.rest)

    def end_trial(self, num_turns: int) -> None:
        """Draft nothing for this number of turns, or for longer if the trial lost much.

        The first one is free, and so is that behind one which won: it may have been a bad moment.
        """
        if self.rest > _LEAST_REST:
            num_lost = (self.catch_up_s + self.trial_s) / self.plain_s - self.trial_tokens
            num_turns = max(num_turns, round(_REST_BY_LOSS * num_lost))
        self.num_left = self.last_rest = num_turns
        self.rest = max(min(2 * self.rest, _MAX_REST), _LEAST_REST)
        self.num_turns, self.renewal = 0, _FIRST_RENEWAL
        self.catch_up_s = self.trial_s = self.trial_tokens = 0.0


class DraftTrials:
    """Trials by the numbers of sequences with a prediction and of others."""

    def __init__(self) -> None:
        self._of_sizes: dict[tuple[int, int], _Speeds] = {}
        self._size = 0, 0
        self._speeds = _Speeds()
        self._began_s = 0.0
        self._num_accepted = 0  # in the present turn
        self._done: SchedulerOutput | None = None
        self.is_resting = True
        """Whether the turn that began last drafts nothing."""

    def begin_turn(self, now_s: float, running: Collection[Sequence]) -> None:
        """Take in the turn that ends here, if its step was one of decodes, and decide about the next."""
        done, self._done = self._done, None
        seconds, self._began_s = now_s - self._began_s, now_s
        num_accepted, self._num_accepted = self._num_accepted, 0
        num_running = len(running)
        predicted = {seq.sequence_id for seq in running if seq.prediction}  # in no trial: they have drafts
        last, self._size = self._size, (len(predicted), num_running - len(predicted))
        may_learn = last == self._size and num_running > len(predicted) and seconds > 0.0
        if done is not None and may_learn and len(done.scheduled) == num_running:
            if not self.is_resting:
                self._speeds.learn_trial(seconds / num_running, 1.0 + num_accepted / num_running)
            elif done.draft_token_ids.keys() <= predicted:
                self._speeds.learn_plain(seconds / num_running)
        if len(self._of_sizes) > _MAX_SIZES:
            self._of_sizes.clear()
        if self._size not in self._of_sizes:
            fewer = (each for each in self._of_sizes if each[0] == self._size[0] and each < self._size)
            self._of_sizes[self._size] = _Speeds(self._of_sizes.get(max(fewer, default=self._size)))
        self._speeds = self._of_sizes[self._size]
        self.is_resting = self._speeds.num_left > 0

    def note_accepted(self, seq: Sequence, num_accepted: int) -> None:
        """Count drafts of a sequence that held, unless they were its prediction."""
        self._num_accepted += 0 if seq.prediction else num_accepted

    def note_decodes(self, plan: SchedulerOutput) -> None:
        """Note that the present turn's step was one of decodes, with drafts or without."""
        self._done = plan

    def note_nothing_asked(self) -> None:
        """End a trial in which no draft is expected to pay; the present turn is one without."""
        self._speeds.end_trial(_LEAST_REST)
        self.is_resting = True

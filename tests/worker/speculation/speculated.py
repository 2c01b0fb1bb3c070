"""A scheduler over a real worker, with drafts that a test makes up in place of the worker's own."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from scheduler.config import DraftSupply, SchedulerConfig
from scheduler.messages import (
    FinishReason,
    ModelRunnerOutput,
    SamplingParams,
    SchedulerOutput,
    SequenceId,
    SequenceInputs,
    SequenceOutput,
    TokenLogprobs,
)
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence as TokenSequence
from tests.invariants import check_invariants
from worker.steps.protocol import LaunchedStep
from worker.worker import Worker
from worker.worker_config import ModelFacts

Answer = tuple[list[int], list[TokenLogprobs], FinishReason | None]
"""Tokens, log-probabilities, end of one sequence."""

Drafts = Mapping[SequenceId, tuple[int, ...]]
Guess = Callable[[int, list[int]], tuple[int, ...]]
"""Drafts for a sequence, given its number and the tokens generated so far."""

NO_GUESS: Guess = lambda number, generated: ()  # noqa: E731


@dataclass
class Speculated:
    """Requests to one worker. Sequence ids go on from one run to the next: a worker knows no runs."""

    worker: Worker
    facts: ModelFacts
    changes: dict[str, Any] = field(default_factory=dict)
    adapters: Sequence[str] = ("",)
    """Requests take turns with them."""
    next_id: int = 1
    offers: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    """Drafts by sequence and number of tokens generated, of the last time."""
    num_drafted: int = 0
    num_accepted: int = 0
    num_preemptions: int = 0
    num_found: int = 0
    """Tokens that were there already, on the device or on the host."""

    def answers(
        self,
        requests: Sequence[tuple[list[int], SamplingParams]],
        guess: Guess = NO_GUESS,
        *,
        aborted: frozenset[int] = frozenset(),
    ) -> list[Answer]:
        """Run requests to their end; numbers in `aborted` are ended after their third token."""
        scheduler = Scheduler(SchedulerConfig(**(self._settings() | self.changes)))
        first, self.next_id = self.next_id, self.next_id + len(requests)
        for offset, (prompt, params) in enumerate(requests):
            inputs = SequenceInputs(adapter=self.adapters[offset % len(self.adapters)])
            seq = TokenSequence(SequenceId(first + offset), tuple(prompt), params, inputs=inputs)
            scheduler.add_request(seq, now_s=0.0)
        answers: list[Answer] = [([], [], None) for _ in requests]
        in_flight: deque[tuple[SchedulerOutput, LaunchedStep]] = deque()
        while scheduler.has_unfinished_requests:
            while scheduler.can_schedule and not (plan := scheduler.schedule(now_s=0.0)).is_empty:
                in_flight.append((plan, self._launch(plan)))
            result = None
            outputs = {}
            if in_flight:
                plan, launched = in_flight.popleft()
                result = launched.result()
                outputs = scheduler.update_from_output(plan, result)
            self._take(outputs.get(0, []) + scheduler.take_outputs().get(0, []), first, answers)
            for number in aborted:
                if len(answers[number][0]) >= 3 and answers[number][2] is None:
                    scheduler.finish_requests([SequenceId(first + number)], FinishReason.ABORTED)
                    self._take(scheduler.take_outputs().get(0, []), first, answers)
            drafts: Drafts = {
                seq.sequence_id: guess(seq.sequence_id - first, answers[seq.sequence_id - first][0])
                for seq in scheduler.running_sequences()
            }
            drafts = drafts if result is None else self._drafts(drafts, result)
            self._note_offers(drafts, first, answers)
            scheduler.update_draft_token_ids(drafts)
            check_invariants(scheduler)
        released = tuple(SequenceId(first + offset) for offset in range(len(requests)))
        self.worker.execute(scheduler.schedule(now_s=0.0)._replace(released=released))
        stats = scheduler.stats()
        self.num_drafted += stats.num_draft_tokens
        self.num_accepted += stats.num_accepted_tokens
        self.num_preemptions += sum(stats.num_preemptions.values())
        self.num_found += stats.num_prefix_hits
        return answers

    def _note_offers(self, drafts: Drafts, first: int, answers: list[Answer]) -> None:
        for sequence_id, offer in drafts.items():
            number = sequence_id - first
            self.offers[number, len(answers[number][0])] = offer

    def _launch(self, plan: SchedulerOutput) -> LaunchedStep:
        return self.worker.launch(plan)

    def _drafts(self, made_up: Drafts, result: ModelRunnerOutput) -> Drafts:
        return made_up

    def _settings(self) -> dict[str, Any]:
        return {
            "num_blocks": self.facts.num_blocks,
            "block_size": self.facts.block_size,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 128,
            "max_model_len": self.facts.max_model_len,
            "watermark": 0.0,
            "num_host_blocks": self.facts.num_host_blocks,
            "groups": self.facts.groups,
        }

    @staticmethod
    def _take(outputs: Sequence[SequenceOutput], first: int, answers: list[Answer]) -> None:
        for output in outputs:
            number = output.sequence_id - first
            tokens, logprobs, _ = answers[number]
            tokens += output.token_ids
            logprobs += output.logprobs
            answers[number] = (tokens, logprobs, output.finish_reason)


@dataclass
class ModelDrafted(Speculated):
    """The same with drafts of the worker's draft model, so many for each sequence."""

    num_asked: int = 3
    ask_every: int = 1
    """Steps from one for which drafts are asked to the next."""
    num_steps: int = 0

    def _settings(self) -> dict[str, Any]:
        supply = DraftSupply.ASKED if self.num_asked else DraftSupply.FREE
        return {**super()._settings(), "max_drafts": self.num_asked, "draft_supply": supply}

    def _launch(self, plan: SchedulerOutput) -> LaunchedStep:
        self.num_steps += 1
        return super()._launch(plan if self.num_steps % self.ask_every == 0 else without_asking(plan))

    def _drafts(self, made_up: Drafts, result: ModelRunnerOutput) -> Drafts:
        return result.draft_token_ids


def without_asking(plan: SchedulerOutput) -> SchedulerOutput:
    """Take away what a plan asks of a draft model."""
    return plan._replace(num_drafts_wanted={})


def oracle(expected: Sequence[Answer], num: int) -> Guess:
    """Guess what comes indeed, beyond the end too."""
    return lambda number, generated: tuple((*expected[number][0], 7, 8, 9)[len(generated) :][:num])


def half_right(expected: Sequence[Answer], random: Random, vocab_size: int) -> Guess:
    """Guess some tokens rightly and then perhaps one wrongly, and then rightly again."""

    def guess(number: int, generated: list[int]) -> tuple[int, ...]:
        drafts = [*expected[number][0], 1, 2][len(generated) :][: random.randint(0, 6)]
        if drafts and random.random() < 0.6:
            drafts[random.randrange(len(drafts))] = random.randrange(vocab_size)
        return tuple(drafts)

    return guess


def nonsense(random: Random, vocab_size: int) -> Guess:
    """Guess at random."""
    return lambda number, generated: tuple(random.randrange(vocab_size) for _ in range(random.randint(0, 5)))

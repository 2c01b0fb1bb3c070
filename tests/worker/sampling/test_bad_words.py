"""Bad words are never completed by what is generated, and ban nothing else."""

from dataclasses import replace

import numpy as np

from scheduler.messages import SamplingParams
from tests.worker.plan_driver import GREEDY, PlanDriver
from worker.sampling.state import BadWords

PROMPT = [10, 20, 30, 40]


def banned(words: BadWords) -> set[int]:
    return {int(token_id) for ids in words.banned_ids() for token_id in ids}


def test_the_last_token_of_a_word_is_banned_where_the_others_stand() -> None:
    words = BadWords([(5,), (1, 2), (1, 3), (9, 1, 4)], [], vocab_size=10)
    assert banned(words) == {5}
    words.record(1)
    assert banned(words) == {5, 2, 3}
    words.record(9)
    assert banned(words) == {5}
    words.record(1)
    assert banned(words) == {5, 2, 3, 4}


def test_a_sequence_that_comes_back_remembers_what_it_said() -> None:
    assert banned(BadWords([(1, 2)], [7, 1], vocab_size=10)) == {2}
    assert banned(BadWords([(1, 2)], [1, 7], vocab_size=10)) == set()


def test_tokens_that_cannot_be_drawn_need_no_ban() -> None:
    assert BadWords([(10,), (1, 99)], [1], vocab_size=10).banned_ids() == []


def test_ids_are_fit_for_an_index_of_logits() -> None:
    (ids,) = BadWords([(5,), (3,)], [], vocab_size=10).banned_ids()
    assert ids.dtype == np.int64
    assert ids.tolist() == [3, 5]


def say(llama: PlanDriver, params: SamplingParams, num_tokens: int = 6) -> list[int]:
    sequence = llama.add(PROMPT, params)
    llama.generate([sequence], num_tokens)
    return llama.generated(sequence)


def test_the_worker_says_something_else_instead(llama: PlanDriver) -> None:
    free = say(llama, GREEDY)
    word = tuple(free[2:4])
    careful = say(llama, replace(GREEDY, bad_words=(word,)))
    assert careful[:3] == free[:3]
    assert all(tuple(careful[at : at + 2]) != word for at in range(len(careful)))


def test_a_word_that_the_prompt_begins_may_be_finished(llama: PlanDriver) -> None:
    (first,) = say(llama, GREEDY, 1)
    assert say(llama, replace(GREEDY, bad_words=((PROMPT[-1], first),)), 1) == [first]


def test_a_preemption_does_not_let_a_word_through(llama: PlanDriver) -> None:
    params = replace(GREEDY, bad_words=(tuple(say(llama, GREEDY)[2:4]),))
    undisturbed = say(llama, params)
    sequence = llama.add(PROMPT, params)
    llama.generate([sequence], 3)
    llama.preempt(sequence)
    llama.generate([sequence], 6)
    assert llama.generated(sequence) == undisturbed


def test_only_allowed_tokens_are_drawn(llama: PlanDriver) -> None:
    params = SamplingParams(temperature=2.0, seed=3, allowed_token_ids=(5, 250, 10**9))
    assert set(say(llama, params, 20)) == {5, 250}

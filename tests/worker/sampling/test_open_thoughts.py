"""Thoughts before an answer: no end of the reply inside of them, and no more tokens than they may have."""

import math
from dataclasses import replace

import torch

from scheduler.input_messages import AnswerStart
from scheduler.messages import Grammar, GrammarKind, SamplingParams
from worker.sampling.logits import edit_logits
from worker.sampling.state import SamplingRow

END, OTHER_END, OPENING, CLOSING, CALLERS = 1, 2, 3, 4, 5
LOGITS = [0.0, 3.0, 2.0, 1.0, 0.5, 4.0, -1.0, 0.25]
WAITING = SamplingParams(
    stop_token_ids=(END, OTHER_END, CALLERS),
    grammar=Grammar(kind=GrammarKind.REGEX, text="a", begins_after=CLOSING),
    answer=AnswerStart(token_ids=(CLOSING,), text="</think>", stop_token_ids=(CALLERS,)),
)


def edited(params: SamplingParams, *generated: int) -> list[float]:
    row = SamplingRow(params, [0, *generated], num_prompt_tokens=1, vocab_size=len(LOGITS))
    logits = torch.tensor([LOGITS, LOGITS])
    if row.edits_logits:
        edit_logits(logits, [row, SamplingRow(SamplingParams(), [0], num_prompt_tokens=1, vocab_size=8)])
    assert logits[1].tolist() == LOGITS, "the neighbour's"
    return [round(value, 4) for value in logits[0].tolist()]


def test_the_wish_to_end_a_reply_ends_the_thoughts_before_a_grammar() -> None:
    total = math.log(sum(math.exp(LOGITS[token]) for token in (END, OTHER_END, CLOSING)))
    found = edited(WAITING, 6)
    assert found[END] == found[OTHER_END] == -math.inf
    assert math.isclose(found[CLOSING], total, abs_tol=1e-3)
    assert found[CALLERS] == LOGITS[CALLERS], "a token like others"


def test_behind_the_thoughts_a_reply_ends_as_it_does() -> None:
    assert edited(WAITING, 6, CLOSING) == LOGITS


def test_thoughts_that_have_had_their_tokens_are_closed() -> None:
    budget = AnswerStart(token_ids=(CLOSING,), text="</think>", max_tokens=2)
    params = SamplingParams(answer=budget, allowed_token_ids=(0, 6), repetition_penalty=1.5)
    assert edited(params, 6)[6] != -math.inf
    only_closing = [0.0 if token == CLOSING else -math.inf for token in range(len(LOGITS))]
    assert edited(params, 6, 0) == edited(params, 6, 0, 6) == only_closing
    assert edited(params, 6, 0, CLOSING)[6] != -math.inf


def test_a_reply_without_thoughts_has_no_budget_of_them() -> None:
    budget = AnswerStart(
        token_ids=(CLOSING,), text="</think>", begin="<think>", begin_token_ids=(OPENING,), max_tokens=1
    )
    params = SamplingParams(answer=budget)
    assert edited(params) == edited(params, 6) == edited(params, 6, 0) == LOGITS
    assert edited(params, OPENING) != LOGITS
    assert edited(replace(params, answer=replace(budget, max_tokens=None)), OPENING) == LOGITS


def test_a_copy_for_a_draft_knows_the_tokens_before_it() -> None:
    budget = AnswerStart(token_ids=(CLOSING,), text="</think>", max_tokens=1)
    row = SamplingRow(SamplingParams(answer=budget), [0], num_prompt_tokens=1, vocab_size=8)
    assert row.thoughts is not None
    assert not row.thoughts.must_close
    later = row.after(6)
    assert later.thoughts is not None
    assert later.thoughts.must_close
    assert not row.thoughts.must_close

"""Log-probabilities of prompts are those of transformers' own forward, however the prompt was computed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scheduler.messages import ModelRunnerOutput, TokenLogprobs
from tests.checkpoints import FAMILIES
from tests.worker.conftest import BLOCK_SIZE, MakeCheckpoint, load_worker
from tests.worker.plan_driver import GREEDY, PlanDriver
from tests.worker.transformers_generate import reference
from worker.steps import prompt_logprobs
from worker.worker import Worker

PROMPT = [10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120, 130]
OTHER = [200, 100, 3]
ASKING = replace(GREEDY, num_prompt_logprobs=3)


def expected(folder: Path, prompt: list[int]) -> torch.Tensor:
    """[len(prompt) - 1, V]: of each token after the first, given those before it."""
    with torch.inference_mode():
        logits = reference(folder)(input_ids=torch.tensor([prompt]), use_cache=False).logits
    return logits[0, :-1].float().log_softmax(-1)


def check(found: tuple[TokenLogprobs, ...], folder: Path, prompt: list[int], num_top: int = 3) -> None:
    logprobs = expected(folder, prompt)
    assert [entry.token_id for entry in found] == prompt[1:]
    for entry, line in zip(found, logprobs, strict=True):
        assert entry.logprob == pytest.approx(float(line[entry.token_id]), abs=2e-4)
        best = line.topk(num_top)
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=2e-4)
        assert entry.rank == int((line > line[entry.token_id]).sum()) + 1


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param


def test_every_family_scores_a_prompt_as_it_does_by_itself(family: str, checkpoints: MakeCheckpoint) -> None:
    folder = checkpoints(family)
    driver = PlanDriver(load_worker(folder)[0], BLOCK_SIZE)
    sequence = driver.add(PROMPT, ASKING)
    output = driver.step({sequence: None})
    check(output.prompt_logprobs[sequence], folder, PROMPT)
    assert output.token_ids[sequence]


def test_chunks_beside_others_in_small_slices_tell_the_same(
    llama: PlanDriver, checkpoints: MakeCheckpoint, llama_worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_small_slices = prompt_logprobs.PromptScorer(vocab_size=2**22)
    monkeypatch.setattr(llama_worker._steps, "_prompt_logprobs", in_small_slices)
    decoding, asking = llama.add(OTHER), llama.add(PROMPT, ASKING)
    llama.step({decoding: None})
    outputs: list[ModelRunnerOutput] = [
        llama.step({decoding: None, asking: num_tokens}) for num_tokens in (5, 1, 3, None)
    ]
    found = [output.prompt_logprobs[asking] for output in outputs]
    assert [len(part) for part in found] == [5, 1, 3, 3]
    check(sum(found, ()), checkpoints("llama"), PROMPT)
    assert all(decoding not in output.prompt_logprobs for output in outputs)
    assert not llama.step({decoding: None, asking: None}).prompt_logprobs


def test_a_preempted_prompt_is_scored_again_from_its_first_token(
    llama: PlanDriver, checkpoints: MakeCheckpoint
) -> None:
    asking = llama.add(PROMPT, ASKING)
    llama.step({asking: 6})
    llama.preempt(asking)
    check(llama.step({asking: None}).prompt_logprobs[asking], checkpoints("llama"), PROMPT)
    llama.preempt(asking)  # now with a generated token, of which nothing is told
    check(llama.step({asking: None}).prompt_logprobs[asking], checkpoints("llama"), PROMPT)


def test_the_tokens_drawn_are_those_of_one_who_does_not_ask(llama: PlanDriver) -> None:
    asking, silent = llama.add(PROMPT, ASKING), llama.add(PROMPT)
    llama.generate([asking, silent], 5)
    assert llama.generated(asking) == llama.generated(silent)


def test_zero_alternatives_are_the_token_alone_and_one_token_tells_nothing(llama: PlanDriver) -> None:
    alone = llama.add(PROMPT, replace(GREEDY, num_prompt_logprobs=0))
    short = llama.add([7], ASKING)
    output = llama.step({alone: None, short: None})
    assert [entry.top for entry in output.prompt_logprobs[alone]] == [()] * (len(PROMPT) - 1)
    assert short not in output.prompt_logprobs
    assert output.token_ids[short]

"""Prompts with pictures: the logits of each sampled token are those of transformers' own forward over all."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import save

from scheduler.config import PreemptionMode, SchedulingPolicy
from scheduler.messages import FinishReason, SequenceId
from scheduler.step import pace
from tests.tiers import by_day
from tests.worker.conftest import BLOCK_SIZE
from tests.worker.pictures.seeing import FAMILIES, Prompt, Reference, Served, load, payloads_of
from worker.model.body import whole_body_of
from worker.pictures.eyes import Eyes
from worker.pictures.outputs import OutputCache
from worker.worker import Worker
from worker.worker_config import ModelFacts

Loaded = tuple[Worker, ModelFacts]

BOUND = 1e-4
BEFORE, BETWEEN, AFTER = [3, 4, 5, 6, 7, 592], [593, 8, 9, 592], [593, 8, 9, 10, 11, 12, 13]


KINDS = ("qwen3_vl", "qwen3_5_moe", "gemma4, large", "smolvlm", "mistral3")
"""One of each kind: places of three numbers; states; spans that are seen whole, and rows for each layer;
tiles; rows of tokens. What differs between the others lies in their towers."""


@pytest.fixture(scope="module", params=by_day(KINDS, KINDS[:1]))
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def loaded(reference: Reference) -> Loaded:
    return load(reference.folder)


def least_tokens(loaded: Loaded) -> int:
    """Tokens of a step that has room for a picture, where one must be computed at once."""
    vision = loaded[1].vision
    return 17 if vision is not None and vision.computes_at_once else 1


def three(reference: Reference) -> Prompt:
    """A prompt with three pictures, of which the last is the first again."""
    cat, dog = reference.picture(0), reference.picture(1)
    return Prompt(BEFORE, cat, BETWEEN, dog, BETWEEN, cat, AFTER)


@pytest.mark.parametrize("most_tokens", [64, 7], ids=["whole", "in chunks that cut pictures"])
def test_pictures_in_a_prompt(reference: Reference, loaded: Loaded, most_tokens: int) -> None:
    most_tokens = max(most_tokens, least_tokens(loaded))
    served = Served(*loaded, {"max_num_batched_tokens": most_tokens, "max_num_seqs": 4})
    prompt = three(reference)
    with payloads_of(prompt.pictures) as payloads:
        one = served.add(Prompt(BEFORE, prompt.pictures[1], AFTER), payloads[1:])
        all_three = served.add(prompt, payloads)
        served.run()
    assert served.error(one, reference) < BOUND
    assert served.error(all_three, reference) < BOUND


@pytest.mark.parametrize("most_tokens", [64, 19], ids=["whole", "in chunks"])
def test_log_probabilities_of_a_prompt_with_pictures(
    reference: Reference, loaded: Loaded, most_tokens: int
) -> None:
    served = Served(*loaded, {"max_num_batched_tokens": most_tokens, "max_num_seqs": 4})
    prompt = three(reference)
    with payloads_of(prompt.pictures) as payloads:
        number = served.add(prompt, payloads, max_tokens=1, num_prompt_logprobs=0)
        served.run()
    theirs = reference.logits(prompt.token_ids, prompt.pictures).log_softmax(-1)
    expected = [float(line[token]) for line, token in zip(theirs, prompt.token_ids[1:], strict=False)]
    assert served.prompt_logprobs[number] == pytest.approx(expected, abs=1e-3)


# With the kinds first, each has the index that the fixture gives it, and is made once.
@pytest.mark.parametrize(
    "reference", [*KINDS, *(each for each in FAMILIES if each not in KINDS)], indirect=True, scope="module"
)
@pytest.mark.night
def test_every_family_reads_pictures_in_chunks_that_cut_them_and_in_bfloat16(
    reference: Reference, loaded: Loaded
) -> None:
    test_pictures_in_a_prompt(reference, loaded, most_tokens=7)
    served = Served(*load(reference.folder, dtype="bfloat16"))
    # Experts, Gemma's scaled embeddings and layers that look numbers up stand between calls.
    is_one_call = whole_body_of(pictures_of(served)._eyes._model) is not None
    assert is_one_call != any(word in reference.name for word in ("moe", "gemma"))
    prompt = three(reference)
    with payloads_of(prompt.pictures) as payloads:
        number = served.add(prompt, payloads, max_tokens=1)
        served.run()
    assert not served.failures
    expected = reference.logits(prompt.token_ids, prompt.pictures)[-1]
    [ours] = served.logits[number]
    assert (ours.float() - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
def test_one_that_is_preempted_in_a_picture_goes_on(
    reference: Reference, loaded: Loaded, mode: PreemptionMode
) -> None:
    urgently = {"policy": SchedulingPolicy.PRIORITY, "preemption_mode": mode}
    most_tokens = max(9, least_tokens(loaded))
    served = Served(*loaded, {"max_num_batched_tokens": most_tokens, "max_num_seqs": 1, **urgently})
    prompt = three(reference)
    with payloads_of(prompt.pictures) as payloads:
        patient = served.add(prompt, payloads, priority=5)
        served.step()
        served.step()
        urgent = served.add(Prompt(BEFORE, prompt.pictures[1], AFTER), payloads[1:], priority=0)
        served.run()
    assert sum(served.scheduler.stats().num_preemptions.values()) == 1
    assert served.error(urgent, reference) < BOUND
    assert served.error(patient, reference) < BOUND


def test_a_prefix_is_found_over_the_same_picture_and_not_over_another(
    reference: Reference, loaded: Loaded
) -> None:
    served = Served(*loaded)
    cat, dog = reference.picture(0), reference.picture(3)
    assert cat.num_tokens == dog.num_tokens
    with payloads_of([cat, dog]) as payloads:
        served.add(Prompt(BEFORE, cat, AFTER), payloads[:1], restore_at=(len(BEFORE) + cat.num_tokens + 4,))
        served.run()
        again = served.add(Prompt(BEFORE, cat, AFTER, 17), payloads[:1])
        plan = served.step()
        assert plan.scheduled[0].start > len(BEFORE) + cat.num_tokens
        assert not plan.encoder_inputs
        served.run()
        other = served.add(Prompt(BEFORE, dog, AFTER, 17), payloads[1:])
        assert served.step().scheduled[0].start < len(BEFORE)
        served.run()
    assert served.error(again, reference) < BOUND
    assert served.error(other, reference) < BOUND


def test_a_picture_that_comes_again_is_not_computed_again(
    reference: Reference, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    monkeypatch.setattr(Eyes, "read", noting(Eyes.read, read))
    served = Served(*loaded)
    cat, other = reference.picture(6), reference.picture(4)
    with payloads_of([cat, other]) as payloads:
        numbers = [
            served.add(Prompt(BEFORE, cat, AFTER), payloads[:1]),
            served.add(Prompt([20, 21], cat, [22], other, AFTER), payloads),
        ]
        served.run()
        served.scheduler.reset_prefix_cache()
        numbers.append(served.add(Prompt([30], cat, AFTER), payloads[:1]))
        served.run()
    assert len(read) == 2
    assert max(served.error(number, reference) for number in numbers) < BOUND


def test_a_picture_is_computed_in_slices_while_others_go_on(
    reference: Reference, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "_SHORTEST_SLICE_S", 1e-9)
    served = Served(*loaded, {"target_itl_s": 1e-9})
    cat, dog = reference.picture(15), reference.picture(16)
    with payloads_of([cat, dog]) as payloads:
        seeing = served.add(Prompt(BEFORE, cat, AFTER), payloads[:1])
        given_up = served.add(Prompt(BETWEEN, dog, AFTER), payloads[1:])
        talking = served.add(Prompt([40, 41, 42]), [], max_tokens=12)
        for _ in range(12):
            served.step()
        assert len(served.tokens[talking]) == 12
        assert not served.tokens[seeing]
        served.scheduler.finish_requests([SequenceId(given_up)], FinishReason.ABORTED)
        served.run()
    assert served.error(seeing, reference) < BOUND
    assert served.error(talking, reference) < BOUND


def test_a_picture_that_nobody_waits_for_any_more_is_given_up(reference: Reference, loaded: Loaded) -> None:
    served = Served(*loaded, {"target_itl_s": 1e-9})
    cat = reference.picture(18)
    with payloads_of([cat]) as payloads:
        first = served.add(Prompt(BEFORE, cat, AFTER), payloads)
        for _ in range(3):
            served.step()
        assert "sliced call" in [thread.name for thread in threading.enumerate()]
        served.scheduler.finish_requests([SequenceId(first)], FinishReason.ABORTED)
        other = served.add(Prompt(BEFORE, AFTER), [])
        served.run()
        assert "sliced call" not in [thread.name for thread in threading.enumerate()]
        again = served.add(Prompt(BEFORE, cat, AFTER), payloads)
        served.run()
    assert served.error(other, reference) < BOUND
    assert served.error(again, reference) < BOUND


def test_drafts_behind_a_picture_change_no_token(reference: Reference, loaded: Loaded) -> None:
    served = Served(*loaded, {"max_drafts": 3})
    prompt = three(reference)
    with payloads_of(prompt.pictures) as payloads:
        number = served.add(prompt, payloads, max_tokens=16)
        served.run()
        drafted = served.add(prompt, payloads, max_tokens=16, prediction=tuple(served.tokens[number]))
        served.run()
    assert served.scheduler.stats().num_accepted_tokens > 4
    served.check_tokens(drafted, reference)


def test_a_picture_that_is_there_waits_for_none_that_is_under_way(
    reference: Reference, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "_SHORTEST_SLICE_S", 1e-9)
    served = Served(*loaded, {"target_itl_s": 1e-9})
    cat, dog = reference.picture(21), reference.picture(22)
    with payloads_of([cat, dog]) as payloads:
        served.add(Prompt(BEFORE, cat, AFTER), payloads[:1])
        served.run()
        talking = served.add(Prompt([40, 41, 42]), [], max_tokens=12)
        waiting = served.add(Prompt(BETWEEN, dog, AFTER), payloads[1:])
        again = served.add(Prompt([50], cat, AFTER), payloads[:1])
        for _ in range(8):
            served.step()
        assert served.tokens[again]
        assert not served.tokens[waiting]
        served.run()
    assert max(served.error(number, reference) for number in (talking, waiting, again)) < BOUND


def test_a_prefix_found_as_far_as_into_a_picture_waits_until_it_is_encoded(
    reference: Reference, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    cat, dog = reference.picture(0), reference.picture(3)
    room = max(cat.num_tokens, dog.num_tokens)
    served = Served(*loaded, {"encoder_cache_tokens": room})
    monkeypatch.setattr(pictures_of(served), "_outputs", OutputCache(room))
    before = BEFORE + [30] * ((BLOCK_SIZE // 2 - len(BEFORE) - cat.num_tokens) % BLOCK_SIZE)
    with payloads_of([cat, dog]) as payloads:
        for picture, payload in zip((cat, dog), payloads, strict=True):
            served.add(Prompt(before, picture, AFTER), [payload])
            served.run()
        again = served.add(Prompt(before, cat, [17, 18, 19]), payloads[:1])
        talking = served.add(Prompt([40, 41, 42]), [])
        served.run()
    assert served.error(again, reference) < BOUND
    assert served.error(talking, reference) < BOUND


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("none left"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
    ids=["of a device", "of the host", "of Python"],
)
def test_a_tower_without_memory_fails_its_request_alone(
    reference: Reference, loaded: Loaded, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def raising(**_: object) -> None:
        raise error

    served = Served(*loaded)
    cat = reference.picture(24)
    monkeypatch.setattr(pictures_of(served), "_outputs", OutputCache(cat.num_tokens))
    with payloads_of([cat]) as payloads, monkeypatch.context() as patch:
        patch.setattr(pictures_of(served)._eyes._model, "get_image_features", raising)
        failing = served.add(Prompt(cat, AFTER), payloads)
        going_on = served.add(Prompt([40, 41, 42]), [])
        served.run()
    assert set(served.failures) == {failing}
    assert "too little memory" in served.failures[failing]
    assert served.error(going_on, reference) < BOUND
    with payloads_of([cat]) as payloads:
        again = served.add(Prompt(cat, AFTER), payloads)
        served.run()
    assert served.error(again, reference) < BOUND


@pytest.mark.parametrize(
    "change",
    [
        lambda content: b"?",
        lambda content: content[:-4],
        lambda content: save({"pixel_values": torch.ones(3, 3)}),
    ],
    ids=["empty", "cut", "of another shape"],
)
def test_broken_bytes_fail_one_request_alone(
    reference: Reference, loaded: Loaded, change: Callable[[bytes], bytes]
) -> None:
    served = Served(*loaded)
    fine, broken = reference.picture(9), reference.picture(10)
    with payloads_of([fine]) as payloads, payloads_of([broken], change) as broken_ones:
        failing = served.add(Prompt(BEFORE, broken, AFTER), broken_ones)
        missing = served.add(Prompt([30], broken, AFTER), [broken_ones[0]._replace(segment="none_such")])
        going_on = served.add(Prompt(BEFORE, fine, AFTER), payloads)
        served.run()
    assert set(served.failures) == {failing, missing}
    assert served.error(going_on, reference) < BOUND


def test_a_picture_that_makes_other_rows_than_it_has_places_fails_its_request(
    reference: Reference, loaded: Loaded
) -> None:
    served = Served(*loaded)
    cat = reference.picture(12)
    with payloads_of([cat]) as payloads:
        failing = served.add(Prompt(BEFORE, replace(cat, num_rows=cat.num_rows - 1, run=0), AFTER), payloads)
        served.run()
    assert "places" in served.failures[failing]


def pictures_of(served: Served) -> Any:
    return served.worker._steps._pictures


def noting(function: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    def called(*arguments: Any) -> Any:
        calls.append(arguments)
        return function(*arguments)

    return called

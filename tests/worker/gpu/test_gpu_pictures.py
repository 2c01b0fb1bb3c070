"""Prompts with pictures on a GPU: what holds on a CPU, with a second plan in flight.

Owns: the worker of these tests, whose decodes are captured; other steps are launched kernel by kernel.
"""

from pathlib import Path

import pytest

from tests.tiers import by_day, by_night
from tests.worker.gpu.interpreted_gpu import HAS_GPU
from tests.worker.gpu.test_gpu_worker import load_gpu, steps_of
from tests.worker.pictures import test_pictures as on_cpu
from tests.worker.pictures.seeing import Prompt, Reference, Served, payloads_of
from tests.worker.pictures.test_heads_with_pictures import (
    ASKED,
    check_guesses,
    check_without_rows,
    with_large_weights,
)
from tests.worker.pictures.test_pictures import (  # noqa: F401 - some of these tests, of another worker
    AFTER,
    BEFORE,
    BOUND,
    KINDS,
    Loaded,
    test_a_picture_is_computed_in_slices_while_others_go_on,
    test_pictures_in_a_prompt,
    three,
)
from tests.worker.speculation.head_checkpoints import write_head
from tests.worker.speculation.test_draft_heads import MTP
from worker.gpu import graphs
from worker.pictures.sliced_call import SlicedCall

test_a_prefix_is_found = by_night(on_cpu.test_a_prefix_is_found_over_the_same_picture_and_not_over_another)
test_drafts_change_no_token = by_night(on_cpu.test_drafts_behind_a_picture_change_no_token)
test_log_probabilities = by_night(on_cpu.test_log_probabilities_of_a_prompt_with_pictures)
test_a_preempted_one_goes_on = by_night(on_cpu.test_one_that_is_preempted_in_a_picture_goes_on)


@pytest.fixture(scope="module", params=by_day(KINDS, KINDS[:1]))
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def loaded(reference: Reference) -> Loaded:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "_MIXED", ())
        patch.setattr(graphs, "_DRAFTED", ())
        return load_gpu(reference.folder, num_blocks=120, max_num_batched_tokens=64)


@pytest.mark.skipif(HAS_GPU, reason="a stand-in counts the waits")
def test_before_each_part_of_a_picture_the_host_waits_for_the_device(
    reference: Reference, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[bool] = []
    monkeypatch.setattr(SlicedCall, "pause", lambda _: waits.append(True))
    served, device, cat = Served(*loaded), loaded[0]._device, reference.picture(28)
    with payloads_of([cat]) as payloads:
        served.add(Prompt(BEFORE, cat, AFTER), payloads, max_tokens=1)
        num_before = device.num_events  # type: ignore[union-attr]
        served.run()
    assert device.num_events - num_before >= len(waits) > 10  # type: ignore[union-attr]


def test_decodes_behind_a_picture_are_replayed_and_it_is_counted_once(
    reference: Reference, loaded: Loaded
) -> None:
    served, steps = Served(*loaded), steps_of(loaded[0])
    num_replayed, cat = steps._num_replayed, reference.picture(27)
    with payloads_of([cat]) as payloads:
        first = served.add(Prompt(BEFORE, cat, AFTER), payloads)
        served.run()
        again = served.add(Prompt(AFTER, cat, BEFORE), payloads)
        served.run()
    assert max(served.error(first, reference), served.error(again, reference)) < BOUND
    assert steps._num_replayed == num_replayed + 6
    stats = served.scheduler.stats()
    assert (stats.num_encoded, stats.num_encoder_hits) == (1, 1)


@pytest.mark.night
def test_a_head_guesses_behind_pictures_on_a_gpu_and_may_find_one_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "_MIXED", ())
    monkeypatch.setattr(graphs, "_DRAFTED", (4,))
    reference = Reference("qwen3_5", tmp_path / "plain")
    folder = with_large_weights(write_head(tmp_path / "with a head", reference.folder))
    loaded = load_gpu(folder, num_blocks=120, max_num_batched_tokens=64, max_num_seqs=4, speculation=MTP)
    check_guesses(Served(*loaded, ASKED), reference, folder, three(reference))
    check_without_rows(Served(*loaded, ASKED), reference, monkeypatch)

"""Layers that take the keys and values of an earlier one keep none of their own."""

import pytest
import torch

from scheduler.cache_groups import Lifetime, LifetimeKind
from tests.families import MATRIX
from tests.worker import family_trial
from worker.attention.interface import AttentionOptions
from worker.attention.kv_cache import LayerShape
from worker.attention.probe_attention import SharingProbe
from worker.startup.ready_model import start_loaded
from worker.worker_errors import UnsupportedAttention

OPTIONS = AttentionOptions(1.0)


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
def test_shared_layers_are_kept_once_and_compute_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def start(*args: object, **kwargs: object) -> object:
        started.append(start_loaded(*args, **kwargs))  # type: ignore[arg-type]
        return started[-1]

    monkeypatch.setattr(family_trial, "start_loaded", start)
    found = family_trial.try_family(next(each for each in MATRIX if each.name == name))
    assert found.refused is None
    assert found.error < 2e-5
    # Two of four layers take what the two before them have.
    assert sorted(started[0].pools.cache.layout.layers) == [0, 1]


def test_equal_numbers_in_another_place_are_not_shared() -> None:
    probe, key = SharingProbe(), torch.ones(1, 2, 8)
    for layer_idx, given in enumerate((key, key.clone(), key)):
        probe.attend(layer_idx, key, given, given, OPTIONS)
    assert probe.shared == {2: 0}
    assert probe.shapes == dict.fromkeys((0, 1), LayerShape(1, 8, 8))


def test_keys_that_are_seen_in_a_window_are_not_those_of_a_full_layer() -> None:
    probe, key = SharingProbe(), torch.ones(1, 2, 8)
    probe.attend(0, key, key, key, OPTIONS)
    probe.attend(1, key, key, key, OPTIONS._replace(lifetime=Lifetime(LifetimeKind.WINDOW, 4)))
    assert not probe.shared


@pytest.mark.parametrize("other", ["key", "value"])
def test_two_calls_of_a_layer_with_other_keys_or_values_are_refused(other: str) -> None:
    probe, given = SharingProbe(), dict.fromkeys(("query", "key", "value"), torch.ones(1, 2, 8))
    probe.attend(0, **given, options=OPTIONS)
    with pytest.raises(UnsupportedAttention, match="twice for layer 0"):
        probe.attend(0, **given | {other: torch.ones(1, 2, 8)}, options=OPTIONS)

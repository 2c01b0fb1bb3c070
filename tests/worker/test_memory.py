"""Bytes to blocks: every number by hand."""

from dataclasses import replace

import pytest

from scheduler.cache_groups import CacheGroup, Lifetime, LifetimeKind
from worker.memory_sizes import (
    CacheRequest,
    check_host_memory,
    check_weights_fit,
    cpu_budget_bytes,
    cuda_budget_bytes,
    num_host_blocks,
    size_cache,
)
from worker.worker_errors import StartupError

GIB = 1 << 30
WINDOW = Lifetime(LifetimeKind.WINDOW, 113)
REQUEST = CacheRequest(
    block_bytes=1000,
    block_size=16,
    budget_bytes=101_000,
    num_blocks=None,
    max_model_len=None,
    checkpoint_len=4096,
    max_num_seqs=64,
    num_step_tokens=16,
)


def test_the_budget_pays_for_the_padding_block_too() -> None:
    assert size_cache(REQUEST).num_blocks == 100


def test_a_sequence_may_grow_to_what_the_cache_holds() -> None:
    assert size_cache(REQUEST).max_model_len == 1600
    assert size_cache(replace(REQUEST, checkpoint_len=512)).max_model_len == 512


def test_more_blocks_than_all_sequences_could_fill_twice_are_not_taken() -> None:
    small = replace(REQUEST, checkpoint_len=40, max_num_seqs=4)
    assert size_cache(small).num_blocks == 2 * 4 * 3


def test_asked_blocks_override_the_budget() -> None:
    assert size_cache(replace(REQUEST, num_blocks=7)).num_blocks == 7


def test_an_asked_length_must_fit_and_the_error_says_what_would() -> None:
    assert size_cache(replace(REQUEST, max_model_len=1600)).max_model_len == 1600
    with pytest.raises(StartupError, match=r"--max-model-len 1600 or less, or give the cache 102000 bytes"):
        size_cache(replace(REQUEST, max_model_len=1601))


def test_an_asked_length_beyond_the_models_own_is_refused() -> None:
    with pytest.raises(StartupError, match="context window of 4096"):
        size_cache(replace(REQUEST, max_model_len=4097))


@pytest.mark.parametrize("budget_bytes", [0, 1999])
def test_a_budget_below_two_blocks_is_refused(budget_bytes: int) -> None:
    with pytest.raises(StartupError, match=r"at least 2000 bytes \(--kv-cache-memory on CPU"):
        size_cache(replace(REQUEST, budget_bytes=budget_bytes))


def test_weights_larger_than_memory_are_refused_and_others_leave_the_rest() -> None:
    assert check_weights_fit(3 * GIB, available_bytes=8 * GIB, where="the GPU") == 5 * GIB
    assert check_weights_fit(8 * GIB, available_bytes=8 * GIB, where="the GPU") == 0
    with pytest.raises(StartupError, match=r"weights take 9.00 GiB, but the GPU has 8.00 GiB .*bfloat16"):
        check_weights_fit(9 * GIB, available_bytes=8 * GIB, where="the GPU")


def cpu_budget(available: int, asked: int | None, *, swap: int = 0) -> int:
    return cpu_budget_bytes(available, asked_bytes=asked, swap_bytes=swap)


def test_the_cpu_gives_a_quarter_of_what_is_free_up_to_a_limit() -> None:
    assert cpu_budget(8 * GIB, None) == 2 * GIB
    assert cpu_budget(100 * GIB, None) == 4 * GIB
    assert cpu_budget(8 * GIB, 6 * GIB) == 6 * GIB
    with pytest.raises(
        StartupError, match=r"KV cache of 9.00 GiB does not fit into the 8.00 GiB.*--kv-cache-memory"
    ):
        cpu_budget(8 * GIB, 9 * GIB)


def test_swap_space_comes_out_of_the_same_memory_as_the_cache_of_a_cpu() -> None:
    assert cpu_budget(8 * GIB, None, swap=4 * GIB) == 1 * GIB
    assert cpu_budget(8 * GIB, 4 * GIB, swap=4 * GIB) == 4 * GIB
    with pytest.raises(
        StartupError,
        match=r"KV cache of 4.00 GiB and a swap space of 5.00 GiB do not fit together .*--swap-space",
    ):
        cpu_budget(8 * GIB, 4 * GIB, swap=5 * GIB)
    with pytest.raises(
        StartupError, match=r"^a swap space of 9.00 GiB does not fit .*less with --swap-space$"
    ):
        cpu_budget(8 * GIB, None, swap=9 * GIB)


def test_swap_space_beside_the_cache_of_a_gpu_has_the_host_to_itself() -> None:
    check_host_memory(8 * GIB, cache_bytes=0, swap_bytes=8 * GIB)
    with pytest.raises(StartupError, match=r"a swap space of 9.00 GiB does not fit"):
        check_host_memory(8 * GIB, cache_bytes=0, swap_bytes=9 * GIB)


def test_swap_space_holds_whole_blocks_and_at_least_one() -> None:
    assert num_host_blocks(swap_bytes=0, block_bytes=1000) == 0
    assert num_host_blocks(swap_bytes=2999, block_bytes=1000) == 2
    with pytest.raises(StartupError, match=r"swap space of 999 bytes .*--swap-space 1000 or more"):
        num_host_blocks(swap_bytes=999, block_bytes=1000)


def test_the_gpu_gives_what_utilization_leaves_after_weights_and_activations() -> None:
    budget = cuda_budget_bytes(
        total_bytes=80 * GIB, free_bytes=60 * GIB, activation_bytes=4 * GIB, utilization=0.9
    )
    assert budget == 72 * GIB - 20 * GIB - 4 * GIB
    nothing = cuda_budget_bytes(total_bytes=80 * GIB, free_bytes=1 * GIB, activation_bytes=0, utilization=0.9)
    assert nothing == 0


def test_a_cache_that_holds_what_a_window_reads_serves_sequences_of_any_length() -> None:
    windowed = replace(REQUEST, num_blocks=9, groups=(CacheGroup(WINDOW),))
    assert size_cache(windowed).max_model_len == 4096
    assert size_cache(replace(windowed, max_model_len=3000)).max_model_len == 3000
    assert size_cache(replace(windowed, num_blocks=8)).max_model_len == 128


def test_groups_share_the_blocks() -> None:
    """A place of all tokens takes one block, one of the window three; of these there are nine at most."""
    groups = (CacheGroup(), CacheGroup(WINDOW, num_stripes=3))
    request = replace(REQUEST, num_blocks=27 + 100, groups=groups)
    assert size_cache(request).max_model_len == 1600
    assert size_cache(replace(request, num_blocks=4 * 5)).max_model_len == 5 * 16, "shorter than the window"
    with pytest.raises(StartupError, match=r"one sequence of max_model_len 1601 needs 0.12 MiB"):
        size_cache(replace(request, max_model_len=1601))


def test_a_cache_without_a_place_of_each_group_is_refused_with_the_bytes_that_it_needs() -> None:
    groups = (CacheGroup(), CacheGroup(WINDOW, num_stripes=3))
    with pytest.raises(StartupError, match=r"holds no 5 blocks, for a place of each group .* at least 5000"):
        size_cache(replace(REQUEST, budget_bytes=4999, groups=groups))
    assert size_cache(replace(REQUEST, budget_bytes=5000, groups=groups)).max_model_len == 16
    with pytest.raises(StartupError, match=r"3 blocks was asked for: 4 are needed, .*-override 4 or more"):
        size_cache(replace(REQUEST, num_blocks=3, groups=groups))

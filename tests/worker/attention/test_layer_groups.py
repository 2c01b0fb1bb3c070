"""Groups of layers and their stripes: what a sequence of a known model keeps, by arithmetic."""

import pytest
import torch

from scheduler.cache_groups import ALL_TOKENS, Lifetime, LifetimeKind, most_blocks
from scheduler.config import PrefixCaching, SchedulerConfig
from scheduler.messages import ModelRunnerOutput, SamplingParams, SequenceId
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from worker.attention.kv_cache import BlockLayout, KVCache, LayerShape
from worker.attention.layer_groups import grouped

GIB = 1 << 30


def window(num_tokens: int) -> Lifetime:
    return Lifetime(LifetimeKind.WINDOW, num_tokens)


def layout_of(lifetimes: list[Lifetime], num_heads: int, dim: int) -> BlockLayout:
    layers = {index: LayerShape(num_heads, dim, dim, each) for index, each in enumerate(lifetimes)}
    return BlockLayout(layers=layers, block_size=16, dtype=torch.bfloat16)


def full_every(num: int, num_layers: int, limited: Lifetime) -> list[Lifetime]:
    return [ALL_TOKENS if index % num == num - 1 else limited for index in range(num_layers)]


GEMMA3_27B = layout_of(full_every(6, 62, window(1024)), 16, 128)
GEMMA3_4B = layout_of(full_every(6, 34, window(1024)), 4, 256)
GPT_OSS_20B = layout_of(full_every(2, 24, window(128)), 8, 64)
OLMO3_32B = layout_of(full_every(4, 64, window(4096)), 8, 128)
LLAMA4_SCOUT = layout_of(full_every(4, 48, Lifetime(LifetimeKind.CHUNK, 8192)), 8, 128)
DEEPSEEK_V3_EXPANDED, DEEPSEEK_V3 = (
    BlockLayout(layers=dict.fromkeys(range(61), each), block_size=16, dtype=torch.bfloat16)
    for each in (LayerShape(128, 192, 128), LayerShape(1, 576, 512, value_is_key_part=True))
)
MISTRAL = layout_of([window(4096)] * 32, 8, 128)


def gib(layout: BlockLayout, num_tokens: int) -> float:
    """Memory of one sequence."""
    num_blocks = most_blocks(layout.groups, num_tokens, block_size=16, num_step_tokens=1)
    return num_blocks * layout.block_bytes / GIB


@pytest.mark.parametrize(
    ("layout", "today", "needed", "stripes"),
    [
        (GEMMA3_27B, 15.5, 2.94, {2, 11}),
        (GEMMA3_4B, 4.25, 0.75, {1, 6}),
        (GPT_OSS_20B, 1.5, 0.76, {1}),
        (OLMO3_32B, 8.0, 2.76, {1, 3}),
        (LLAMA4_SCOUT, 6.0, 2.63, {1, 3}),
    ],
    ids=["gemma3-27b", "gemma3-4b", "gpt-oss-20b", "olmo3-32b", "llama4-scout"],
)
def test_a_sequence_of_32k_tokens_keeps_what_its_layers_read(
    layout: BlockLayout, today: float, needed: float, stripes: set[int]
) -> None:
    assert gib(layout, 32768) == pytest.approx(today, rel=0.02)
    division = grouped(layout, 131072)
    assert gib(division, 32768) == pytest.approx(needed, rel=0.02)
    assert {group.num_stripes for group in division.groups} == stripes


def test_as_many_sequences_of_32k_tokens_fit_as_the_shapes_allow() -> None:
    """Gemma 3 27B in 20 GiB and gpt-oss-20b in 60 GiB: 1 and 40 with blocks of all layers."""
    found = [
        int(size // gib(grouped(layout, 131072), 32768))
        for layout, size in ((GEMMA3_27B, 20), (GPT_OSS_20B, 60))
    ]
    assert found == [6, 79]


def num_running(layout: BlockLayout, num_bytes: int) -> int:
    """Sequences of 32k tokens that a scheduler lets run at once, until the next one has to wait."""
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=128,
            max_num_batched_tokens=2048,
            prefix_caching=PrefixCaching.OFF,
            watermark=0.0,
            num_blocks=num_bytes // layout.block_bytes,
            block_size=layout.block_size,
            max_model_len=32768,
            groups=layout.groups,
        )
    )
    params = SamplingParams(max_tokens=1500, temperature=0.0)
    for number in range(128):
        scheduler.add_request(Sequence(SequenceId(number), (1,) * 31_200, params), now_s=0.0)
    most, is_full = 0, False
    while not is_full:
        plan = scheduler.schedule(now_s=0.0)
        tokens = {share.sequence_id: (1,) for share in plan.scheduled if share.samples}
        scheduler.update_from_output(plan, ModelRunnerOutput(token_ids=tokens, logprobs={}, failures={}))
        most = max(most, len(list(scheduler.running_sequences())))
        is_full = all(share.num_tokens == 1 for share in plan.scheduled)
    assert not sum(scheduler.stats().num_preemptions.values())
    return most


@pytest.mark.night
@pytest.mark.parametrize(
    ("before", "now", "num_before", "factor"),
    [
        (GEMMA3_27B, grouped(GEMMA3_27B, 131072), 4, 5.0),
        (GPT_OSS_20B, grouped(GPT_OSS_20B, 131072), 20, 1.95),
        (DEEPSEEK_V3_EXPANDED, DEEPSEEK_V3, 1, 60),
    ],
    ids=["gemma3-27b", "gpt-oss-20b", "deepseek-v3"],
)
def test_so_many_more_sequences_of_32k_tokens_run_in_the_same_memory(
    before: BlockLayout, now: BlockLayout, num_before: int, factor: float
) -> None:
    num_bytes = int(num_before * gib(before, 32768) * GIB)
    assert num_running(before, num_bytes) == num_before
    assert num_running(now, num_bytes) >= factor * num_before


class Serving:
    """A scheduler whose worker always samples one token. Requests are computed one after another."""

    def __init__(self, layout: BlockLayout, num_blocks: int) -> None:
        self._scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=16,
                max_num_batched_tokens=2048,
                num_blocks=num_blocks,
                block_size=layout.block_size,
                max_model_len=40_000,
                groups=layout.groups,
            )
        )
        self._num_requests = 0

    def found(self, tokens: list[int], max_tokens: int) -> int:
        """Serve one request; returns how many of its tokens were found."""
        self._num_requests += 1
        sequence_id, params = SequenceId(self._num_requests), SamplingParams(max_tokens=max_tokens)
        self._scheduler.add_request(Sequence(sequence_id, tuple(tokens), params), now_s=0.0)
        starts = []
        while self._scheduler.has_unfinished_requests:
            plan = self._scheduler.schedule(now_s=0.0)
            starts += [share.start for share in plan.scheduled]
            sampled = {share.sequence_id: (1,) for share in plan.scheduled if share.samples}
            result = ModelRunnerOutput(token_ids=sampled, logprobs={}, failures={})
            self._scheduler.update_from_output(plan, result)
        return starts[0]


def text(num_tokens: int, salt: int) -> list[int]:
    return [2 + (salt * 131 + place * 7 + place // 89) % 30_000 for place in range(num_tokens)]


WITH_WINDOWS = pytest.mark.parametrize(
    "layout",
    [grouped(each, 131072) for each in (GEMMA3_27B, GPT_OSS_20B, OLMO3_32B, LLAMA4_SCOUT)],
    ids=["gemma3-27b", "gpt-oss-20b", "olmo3-32b", "llama4-scout"],
)


@WITH_WINDOWS
def test_a_prompt_of_32k_tokens_takes_nothing_from_four_cached_conversations(layout: BlockLayout) -> None:
    """In a cache that has room for all five, as long as what a window passed is used again (vLLM #48435)."""
    most = most_blocks(layout.groups, 32_768, block_size=16, num_step_tokens=2048)
    serving = Serving(layout, most + 4 * layout.most_blocks(4_200))
    for number in range(4):
        serving.found(text(4_000, number), 20)
    serving.found(text(32_000, 9), 8)
    for number in range(4):
        history = [*text(4_000, number), *[1] * 20]
        assert serving.found([*history, *text(50, 20 + number)], 4) >= 0.95 * len(history)


@WITH_WINDOWS
def test_conversations_by_turns_find_their_histories(layout: BlockLayout) -> None:
    """Eight of 21,000 tokens, in a cache for a dozen (vLLM #48435: no hits at a quarter of it)."""
    serving = Serving(layout, 12 * layout.most_blocks(21_500))
    histories = {number: text(20_000, number) for number in range(8)}
    num_found = num_earlier = 0
    for round_number in range(4):
        for number, history in histories.items():
            found = serving.found([*history, *text(200, 100 * round_number + number)], 10)
            if round_number:
                num_found, num_earlier = num_found + found, num_earlier + len(history)
            history += [*text(200, 100 * round_number + number), *[1] * 10]
    assert num_found >= 0.95 * num_earlier


def test_an_odd_number_of_windows_beside_full_layers_pads_no_half() -> None:
    """Groups of equally many layers would pad 19 and 18 to 38 each (vLLM #29303)."""
    for num_full in (17, 18, 19, 20):
        lifetimes = [ALL_TOKENS] * num_full + [window(1024)] * 18
        layout = grouped(layout_of(lifetimes, 8, 128), 131072)
        exact = 2 * 2 * 8 * 128 * (num_full * 32_768 + 18 * (1024 + 16)) / GIB
        assert gib(layout, 32_768) < 1.06 * exact


@pytest.mark.parametrize("layout", [MISTRAL, layout_of([ALL_TOKENS] * 8, 8, 128)], ids=["windows", "full"])
def test_layers_of_one_lifetime_keep_the_blocks_that_they_have(layout: BlockLayout) -> None:
    assert grouped(layout, 131072) is layout
    assert len(layout.stripes) == 1


def test_windows_as_long_as_any_sequence_are_none() -> None:
    assert grouped(GEMMA3_27B, 1024) is GEMMA3_27B


def test_many_different_windows_share_blocks() -> None:
    layout = layout_of([ALL_TOKENS, *(window(100 * each) for each in range(1, 6))], 2, 16)
    assert {group.lifetime for group in grouped(layout, 100_000).groups} == {ALL_TOKENS, window(500)}


def test_layers_of_a_block_lie_apart_and_each_knows_its_stripe() -> None:
    layout = grouped(layout_of(full_every(6, 13, window(32)), 2, 16), 4096)
    cache = KVCache(layout, 3, torch.zeros(4 * layout.block_numel, dtype=layout.storage))
    for layer_idx, layer in cache.layers.items():
        assert layer_idx in layout.stripes[layer.stripe]
    for stripe in layout.stripes:
        cache.pool_NE.zero_()
        for layer_idx in stripe:
            for part in (cache.layers[layer_idx].keys, cache.layers[layer_idx].values):
                assert not part.blocks_NHSD[1].any(), "another layer of the stripe has written here"
                part.blocks_NHSD[1] = 1.0
        assert cache.pool_NE[1].any()
        assert not cache.pool_NE[[0, 2, 3]].any()


def test_a_stage_has_the_tables_of_all_and_its_own_layers_in_them() -> None:
    division = grouped(GEMMA3_27B, 131072)
    stages = [division.only(range(31)), division.only(range(31, 62))]
    assert all(stage.groups == division.groups for stage in stages)
    assert sorted(index for stage in stages for stripe in stage.stripes for index in stripe) == list(
        range(62)
    )

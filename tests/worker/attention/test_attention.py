"""The attention call's border, and the reference backend against the plainest possible attention."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from scheduler.cache_groups import ALL_TOKENS, Lifetime, LifetimeKind
from worker.attention import dense_attention as dense
from worker.attention import ref_attention as ref
from worker.attention.interface import (
    AttentionMetadata,
    AttentionOptions,
    BlockTables,
    active,
    attention_forward,
)
from worker.attention.kv_cache import BlockLayout, KVCache, LayerShape
from worker.attention.probe_attention import ProbeAttention, SharingProbe
from worker.attention.ref_attention import RefAttention
from worker.devices.device import CpuDevice
from worker.worker_config import WorkerConfig
from worker.worker_errors import UnsupportedAttention

HEADS, GROUPS, KEY_DIM, BLOCK_SIZE, NUM_BLOCKS = 2, 3, 8, 4, 128


class AttentionModule(nn.Module):
    layer_idx = 0
    is_causal = True


def call(module: nn.Module | None = None, **kwargs: object) -> torch.Tensor:
    query, key = torch.randn(1, 6, 5, 8), torch.randn(1, 2, 5, 8)
    arguments = {"attention_mask": None, "scaling": 0.3, **kwargs}
    return attention_forward(module or AttentionModule(), query, key, key, **arguments)[0]


@pytest.mark.parametrize(
    "arguments",
    [
        {"position_bias": torch.zeros(1)},
        {"block_indices": torch.zeros(1)},
        {"sinks": torch.zeros(6)},
        {"something_new": 1},
        {"dropout": 0.1},
        {"is_causal": False},
        {"attention_mask": torch.zeros(5, 5)},
    ],
)
def test_an_argument_that_would_change_the_result_is_an_error(arguments: dict[str, object]) -> None:
    with active(ProbeAttention()), pytest.raises(UnsupportedAttention):
        call(**arguments)


def test_arguments_that_change_nothing_are_let_through() -> None:
    with active(ProbeAttention()):
        shape = call(dropout=0.0, something_new=None, use_cache=False, output_router_logits=True).shape
    assert shape == (1, 5, 6, 8)


def test_a_module_that_looks_ahead_or_has_no_index_is_an_error() -> None:
    encoder, nameless = AttentionModule(), nn.Identity()
    encoder.is_causal = False
    for module in (encoder, nameless):
        with active(ProbeAttention()), pytest.raises(UnsupportedAttention):
            call(module)


def test_one_index_called_twice_is_an_error() -> None:
    with active(SharingProbe()):
        call()
        with pytest.raises(UnsupportedAttention, match="called twice"):
            call()


def lifetime_of(config: dict[str, object], **kwargs: object) -> tuple[str, int]:
    """Lifetime of a module's tokens with this configuration, called this way."""
    module, noting = AttentionModule(), NotingAttention()
    module.config = SimpleNamespace(**config)
    with active(noting):
        call(module, **kwargs)
    return noting.lifetime.kind.value, noting.lifetime.num_tokens


class NotingAttention(ProbeAttention):
    def attend(self, layer_idx, query, key, value, options):
        self.lifetime = options.lifetime
        return super().attend(layer_idx, query, key, value, options)


@pytest.mark.parametrize(
    ("layer_type", "expected"),
    [
        ("chunked_attention", ("chunk", 8)),
        ("sliding_attention", ("window", 5)),
        ("full_attention", ("all", 0)),
    ],
)
def test_what_a_layer_does_not_tell_is_read_from_its_configuration(layer_type, expected) -> None:
    config = {"layer_types": [layer_type], "attention_chunk_size": 8, "sliding_window": 5}
    assert lifetime_of(config) == expected


def test_what_a_layer_tells_comes_first() -> None:
    config = {"layer_types": ["sliding_attention"], "sliding_window": 5}
    assert lifetime_of(config, sliding_window=3) == ("window", 3)
    assert lifetime_of(config, sliding_window=None) == ("all", 0)


def test_a_window_of_which_nobody_says_where_it_holds_is_an_error_unless_it_holds_nothing_back() -> None:
    with pytest.raises(UnsupportedAttention, match="do not tell of"):
        lifetime_of({"sliding_window": 5, "max_position_embeddings": 64})
    assert lifetime_of({"sliding_window": 64, "max_position_embeddings": 64}) == ("all", 0)


def test_a_call_outside_of_a_step_is_an_error() -> None:
    with pytest.raises(UnsupportedAttention, match="outside"):
        call()


@dataclass
class Case:
    """Sequences of (length before the step, tokens in the step), decodes first."""

    shares: list[tuple[int, int]]
    lifetime: Lifetime = ALL_TOKENS
    softcap: float | None = None
    has_sinks: bool = False
    value_dim: int = KEY_DIM
    dtype: torch.dtype = torch.float32


def window(num_tokens: int) -> Lifetime:
    return Lifetime(LifetimeKind.WINDOW, num_tokens)


DECODES = [(0, 1), (3, 1), (30, 1), (7, 1), (12, 1)]
CHUNKS = [(0, 9), (5, 7), (16, 8), (40, 3)]
CASES = {
    "decodes of many lengths": Case(DECODES),
    "prefill chunks": Case(CHUNKS),
    "both": Case(DECODES + CHUNKS),
    "window": Case(DECODES + CHUNKS, lifetime=window(5)),
    "window of one block": Case(DECODES + CHUNKS, lifetime=window(4)),
    "window of one token": Case(DECODES + CHUNKS, lifetime=window(1)),
    "chunks of five tokens": Case(DECODES + CHUNKS, lifetime=Lifetime(LifetimeKind.CHUNK, 5)),
    "chunks of two blocks": Case(DECODES + CHUNKS, lifetime=Lifetime(LifetimeKind.CHUNK, 8)),
    "chunks of one token": Case(DECODES + CHUNKS, lifetime=Lifetime(LifetimeKind.CHUNK, 1)),
    "softcap": Case(DECODES + CHUNKS, softcap=2.0),
    "sinks and window": Case(DECODES + CHUNKS, has_sinks=True, lifetime=window(6)),
    "small values": Case(DECODES + CHUNKS, value_dim=4),
    "bfloat16": Case(DECODES + CHUNKS, dtype=torch.bfloat16),
    "float16": Case(DECODES + CHUNKS, dtype=torch.float16),
    "one decode": Case([(0, 1)]),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tiles", ["whole", "small"])
def test_paged_attention_is_plain_attention(name: str, tiles: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles and groups cut everywhere; results must not depend on it."""
    if tiles == "small":
        monkeypatch.setattr(dense, "_MOST_IN_TILE", 8)
        monkeypatch.setattr(dense, "_SMALLEST_TILE", 2)
        monkeypatch.setattr(ref, "_MOST_IN_GROUP", 150)
    case = CASES[name]
    generator = torch.Generator().manual_seed(3)
    options = AttentionOptions(
        scaling=0.4,
        lifetime=case.lifetime,
        softcap=case.softcap,
        sinks=torch.randn(HEADS * GROUPS, generator=generator) if case.has_sinks else None,
    )
    sequences = [
        tuple(
            torch.randn(heads, before + now, dim, generator=generator).to(case.dtype)
            for heads, dim in ((HEADS * GROUPS, KEY_DIM), (HEADS, KEY_DIM), (HEADS, case.value_dim))
        )
        for before, now in case.shares
    ]
    ours = run_paged(case, sequences, options)
    tolerance = 1e-5 if case.dtype == torch.float32 else 3e-2
    for (before, _), (query, key, value), out in zip(case.shares, sequences, ours, strict=True):
        expected = attend_plainly(query.double(), key.double(), value.double(), options)[before:]
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def run_paged(
    case: Case, sequences: list[tuple[torch.Tensor, ...]], options: AttentionOptions
) -> list[torch.Tensor]:
    """Write what lies before the step in one step, then run the step itself; [tokens, heads, V] each."""
    layer = LayerShape(HEADS, KEY_DIM, case.value_dim)
    layout = BlockLayout(layers={0: LayerShape(1, 12, 12), 7: layer}, block_size=BLOCK_SIZE, dtype=case.dtype)
    # Earlier owners may have left anything in a block; only the padding block is always clean.
    memory = torch.full(((NUM_BLOCKS + 1) * layout.block_numel,), torch.nan, dtype=case.dtype)
    memory[: layout.block_numel] = 0
    backend = RefAttention(
        KVCache(layout, NUM_BLOCKS, memory), CpuDevice(WorkerConfig(model_path="", num_threads=1))
    )
    tables = np.random.default_rng(5).permutation(NUM_BLOCKS)[: len(sequences) * 12].reshape(-1, 12) + 1
    befores = [(0, before) for before, _ in case.shares]
    out = torch.empty(0)
    for spans in (befores, [(before, before + now) for before, now in case.shares]):
        chosen = [index for index, (start, end) in enumerate(spans) if end > start]
        if not chosen:
            continue
        spans = [spans[index] for index in chosen]
        if options.lifetime.is_limited:
            forget_passed(tables, chosen, spans, options.lifetime.num_tokens)
        backend.begin_step(make_metadata(spans, tables[chosen].astype(np.int32)))
        query, key, value = (
            torch.cat(
                [sequences[index][part][:, slice(*span)] for index, span in zip(chosen, spans, strict=True)],
                1,
            )
            for part in range(3)
        )
        out = backend.attend(7, query, key, value, options)
    return list(out.split([now for _, now in case.shares]))


def forget_passed(tables: np.ndarray, chosen: list[int], spans: list[tuple[int, int]], window: int) -> None:
    """Put a block of somebody else, full of NaN, wherever the window has passed."""
    strangers = np.setdiff1d(np.arange(1, NUM_BLOCKS + 1), tables)
    for index, (start, _) in zip(chosen, spans, strict=True):
        tables[index, : max(start - window + 1, 0) // BLOCK_SIZE] = strangers[0]


def make_metadata(spans: list[tuple[int, int]], tables: np.ndarray) -> AttentionMetadata:
    # Only leading shares of one token count as decodes; one among the chunks is a chunk.
    num_decodes = next((index for index, (start, end) in enumerate(spans) if end - start > 1), len(spans))
    positions = [np.arange(*span) for span in spans]
    blocks = [table[position // BLOCK_SIZE] for table, position in zip(tables, positions, strict=True)]
    return AttentionMetadata(
        num_decodes=num_decodes,
        query_starts=np.cumsum([0, *(end - start for start, end in spans)]),
        seq_lens=np.array([end for _, end in spans]),
        tables=BlockTables.of(tables),
        token_blocks_ST=np.concatenate(blocks).astype(np.int64)[None],
        token_offsets=np.concatenate(positions) % BLOCK_SIZE,
    )


def attend_plainly(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """Whole sequence, one query and head at a time; [tokens, heads, V]."""
    num_heads, num_tokens, _ = query.shape
    out = torch.zeros(num_tokens, num_heads, value.shape[-1], dtype=torch.float64)
    for head in range(num_heads):
        kv_head = head // GROUPS
        for position in range(num_tokens):
            window, chunk = options.lifetime.window, options.lifetime.chunk
            first = max(0, position - window + 1) if window else 0
            if chunk:
                first = position - position % chunk
            scores = key[kv_head, first : position + 1] @ query[head, position] * options.scaling
            if options.softcap is not None:
                scores = options.softcap * torch.tanh(scores / options.softcap)
            if options.sinks is not None:
                scores = torch.cat([scores, options.sinks[head, None].double()])
            weights = torch.softmax(scores, 0)[: position + 1 - first]
            out[position, head] = weights @ value[kv_head, first : position + 1]
    return out

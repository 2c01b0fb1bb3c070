"""The launches that are looked at: the kernels as steps of well-known models ask for them.

Owns: the shapes, and for each launch what it has to move and how often a program goes through its main loop.
Never: computes: tensors have no memory, and no kernel runs.

Decodes have 1,024 tokens of context, in a graph for up to 8,192; a prefill is one sequence of 2,048 tokens.
The mixture is like Qwen3-30B-A3B: 128 experts of 768 gates, 8 a token, a hidden state of 2,048.

Shapes: T tokens, R sequences, N rows drawn, V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from campaigns.gpu.paper.compiling import Launch, noted_launches
from campaigns.gpu.paper.roofline import NUM_PROCESSORS
from campaigns.gpu.shapes import SHAPES, Shape
from worker.attention.interface import AttentionOptions
from worker.attention.kv_cache import BlockLayout, KVCache, LayerCache, LayerShape
from worker.gpu.device_batch import AttentionBatch
from worker.gpu.kernels import attention_decode, attention_prefill, norm
from worker.gpu.kernels import expert_products as experts
from worker.gpu.kernels.activation import multiply_by_gates
from worker.gpu.kernels.attention_tiles import head_groups
from worker.gpu.kernels.attention_work import AttentionWork
from worker.gpu.kernels.copies import copy_blocks
from worker.gpu.kernels.input_fill import fill_unknown_tokens, remember_tokens
from worker.gpu.kernels.rotary import rotate_and_write
from worker.gpu.kernels.skinny_products import MOST_ROWS, Folds, choose_skinny_tiles, multiply_skinny
from worker.gpu.sampling_kernels import bitmask, penalties
from worker.gpu.sampling_kernels import token_draw as sampling
from worker.gpu.triton_experts import choose_tiles
from worker.model.layer_call import HeadShape
from worker.model.layer_parts import GateActivation, RmsNorm
from worker.model.mixture import Experts, Gate

CONTEXT = 1024
PROMPT = 2048
DECODES = (1, 8, 64, 256)
_LONGEST = 8192
_BLOCK_SIZE = 16
_NUM_BLOCKS = 1000
_HALF = 2
_PLAIN = AttentionOptions(scaling=0.1, sliding_window=None, softcap=None, sinks=None)
_NUM_EXPERTS, _NUM_CHOSEN, _EXPERT_GATES, _EXPERT_HIDDEN = 128, 8, 768, 2048
_NUM_LISTED = 1024
"""Different tokens of a sequence with penalties."""
_SECTOR = 32
"""Bytes, the least that memory gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One launch, and what is known of it that its machine code does not say."""

    name: str
    launch: Launch
    moved_bytes: float
    """Bytes that it cannot help reading and writing."""
    num_working: int
    """Programs that do not return at once."""
    trips: float = 0.0
    """Instructions of such a program once through its main loop."""


def _new(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def _integers(*size: int) -> Tensor:
    return _new(*size, dtype=torch.int32)


def _noted(launcher: Callable[..., object], *given: Any, **named: Any) -> list[Launch]:
    with noted_launches() as noted:
        launcher(*given, **named)
    return noted


def _models() -> Iterator[tuple[str, Shape]]:
    for name in ("qwen3-0.6b", "llama-3.1-8b"):
        yield name.split("-")[0], SHAPES[name]


def _cache(shape: Shape) -> LayerCache:
    each = LayerShape(shape.num_key_value_heads, shape.head_dim, shape.head_dim)
    layers = dict.fromkeys(range(shape.num_hidden_layers), each)
    layout = BlockLayout(layers=layers, block_size=_BLOCK_SIZE, dtype=torch.bfloat16)
    return KVCache(layout, _NUM_BLOCKS, _new((_NUM_BLOCKS + 1) * layout.block_numel)).layers[0]


def _batch(num_sequences: int, num_tokens: int, *, num_decodes: int, longest: int) -> AttentionBatch:
    return AttentionBatch(
        num_decodes=num_decodes,
        max_query_len=num_tokens // num_sequences,
        max_seq_len=longest,
        query_starts_R=_integers(num_sequences + 1),
        seq_lens_R=_integers(num_sequences),
        block_tables_CB=_integers(num_sequences, _LONGEST // _BLOCK_SIZE),
        slots_T=_new(num_tokens, dtype=torch.int64),
    )


def _decodes() -> Iterator[Case]:
    for model, shape in _models():
        for count in DECODES:
            yield from _decode(f"decode {model} x {count}", shape, count)


def _decode(name: str, shape: Shape, count: int) -> Iterator[Case]:
    queries, cache = _new(count, shape.num_attention_heads, shape.head_dim), _cache(shape)
    batch = _batch(count, count, num_decodes=count, longest=_LONGEST)
    out = torch.empty_like(queries)
    work = _work(batch)
    tiles = attention_decode.decode_tiles(head_groups(queries, cache), torch.bfloat16)
    listing, decode = _noted(attention_decode.attend_decodes, queries, cache, work, _PLAIN, out)
    yield _plain(f"list of {name}", listing, count * 28)
    num_tiles = count * shape.num_key_value_heads * (CONTEXT // tiles.num_keys)
    share = -(-num_tiles // decode.num_programs)
    yield Case(
        name=name,
        launch=decode,
        moved_bytes=count * shape.num_key_value_heads * CONTEXT * 2 * shape.head_dim * _HALF,
        num_working=-(-num_tiles // share),
        trips=share,
    )


def _work(batch: AttentionBatch) -> AttentionWork:
    counters = _integers(AttentionWork.num_counters(attention_decode.most_programs(NUM_PROCESSORS)))
    return AttentionWork(batch, counters, NUM_PROCESSORS)


def _prefills() -> Iterator[Case]:
    for model, shape in _models():
        queries, cache = _new(PROMPT, shape.num_attention_heads, shape.head_dim), _cache(shape)
        batch = _batch(1, PROMPT, num_decodes=0, longest=PROMPT)
        out = torch.empty_like(queries)
        listing, launch = _noted(attention_prefill.attend_prefills, queries, cache, _work(batch), _PLAIN, out)
        yield _plain(f"list of prefill {model}", listing, 8)
        tiles = attention_prefill.prefill_tiles(head_groups(queries, cache), torch.bfloat16)
        num_rows = PROMPT * shape.num_attention_heads
        items = -(-num_rows // tiles.num_rows)
        yield Case(
            name=f"prefill {model}",
            launch=launch,
            moved_bytes=2 * queries.numel() * _HALF,
            num_working=min(launch.num_programs, NUM_PROCESSORS),
            trips=PROMPT / 2 / tiles.num_keys * items / NUM_PROCESSORS,
        )


def _between_products() -> Iterator[Case]:
    for model, shape in _models():
        for count in (1, 256, PROMPT):
            for what, launch, numbers in _of_a_layer(shape, count):
                yield _plain(f"{what} {model} x {count}", launch, count * numbers * _HALF)


def _few_rows() -> Iterator[Case]:
    """Four products of a layer for up to 16 rows, with all that is folded into them."""
    for model, shape in _models():
        hidden, gates = shape.hidden_size, shape.intermediate_size
        queries = shape.num_attention_heads * shape.head_dim
        merged = queries + 2 * shape.num_key_value_heads * shape.head_dim
        by = RmsNorm(_new(hidden), 1e-5)
        for what, outputs, inputs, folds in (
            ("norm, query-key-value", merged, hidden, Folds(by)),
            ("attention's output, added", hidden, queries, Folds(is_added=True)),
            ("norm, gates", 2 * gates, hidden, Folds(by, GateActivation.SILU)),
            ("down, added", hidden, gates, Folds(is_added=True)),
        ):
            weight, arrivals = _new(outputs, inputs), _integers(outputs)
            tiles = choose_skinny_tiles(weight, folds, NUM_PROCESSORS)
            x, out = _new(MOST_ROWS, inputs), _new(MOST_ROWS, outputs) if folds.is_added else None
            [launch] = _noted(multiply_skinny, x, weight, None, folds, tiles, out_TN=out, arrivals=arrivals)
            yield Case(
                name=f"{what} {model}",
                launch=launch,
                moved_bytes=weight.numel() * _HALF,
                num_working=launch.num_programs,
                trips=-(-inputs // tiles.inputs // tiles.splits),
            )


def _of_a_layer(shape: Shape, count: int) -> Iterator[tuple[str, Launch, int]]:
    """Names, launches, and how many numbers of a token are read and written."""
    x = _new(count, shape.hidden_size)
    by = RmsNorm(_new(shape.hidden_size, dtype=torch.float32), 1e-5)
    [launch] = _noted(norm.norm, x, by)
    yield "norm", launch, 2 * shape.hidden_size
    [launch] = _noted(norm.add_and_norm, x, x, None, by)
    yield "add, norm", launch, 4 * shape.hidden_size

    queries, pairs, dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    merged = (queries + 2 * pairs) * dim
    head_norm = RmsNorm(_new(dim, dtype=torch.float32), 1e-5) if shape.has_head_norms else None
    angles, slots = _new(1, count, dim), _new(count, dtype=torch.int64)
    heads, norms, rotation = HeadShape(queries, pairs, dim, dim), (head_norm, head_norm), (angles, angles)
    [launch] = _noted(rotate_and_write, _new(count, merged), heads, norms, rotation, _cache(shape), slots)
    yield "turn, write", launch, 2 * merged

    gates = shape.intermediate_size
    [launch] = _noted(multiply_by_gates, _new(count, 2 * gates), GateActivation.SILU)
    yield "gates", launch, 3 * gates


def _draws() -> Iterator[Case]:
    for model, shape in _models():
        for count in (1, 256):
            work = sampling.Workspace.allocate(count, shape.vocab_size, torch.device("meta"))
            lines = sampling.LogitRows(_new(count, shape.vocab_size), _new(count, 8, dtype=torch.float64))
            outcome = _new(2, count, dtype=torch.int64)
            for choose in (sampling.pick_best, sampling.draw):
                for launch in _noted(choose, lines, outcome, work):
                    is_pass = launch.num_programs > count
                    row_bytes = shape.vocab_size * _HALF if is_pass else work.maxima_MB.shape[1] * 4
                    yield Case(
                        name=f"{choose.__name__} {model} x {count}",
                        launch=launch,
                        moved_bytes=count * row_bytes,
                        num_working=launch.num_programs,
                        trips=1,
                    )


def _edits() -> Iterator[Case]:
    vocab_size, count = SHAPES["qwen3-0.6b"].vocab_size, 32
    logits, edited = _new(count, vocab_size), _new(count, vocab_size, dtype=torch.float32)
    faults = _new(count, -(-vocab_size // sampling.SPAN), dtype=torch.float32)
    masks = _integers(count, -(-vocab_size // 32))
    [launch] = _noted(bitmask.copy_masked, logits, _integers(count, 2), masks, edited, faults)
    yield _plain(f"bitmask x {count}", launch, edited.numel() * (_HALF + 4) + masks.numel() * 4)

    counts = _integers(count, vocab_size)
    asked = penalties.Penalties(_integers(count), _new(count, 3, dtype=torch.float64), counts)
    [launch] = _noted(penalties.penalize, edited, asked)
    yield _plain(f"penalties x {count}", launch, counts.numel() * 4 + count * _NUM_LISTED * 2 * _SECTOR)

    shape = SHAPES["llama-3.1-8b"]
    numbers = _BLOCK_SIZE * shape.num_hidden_layers * 2 * shape.num_key_value_heads * shape.head_dim
    pairs = _new(count, dtype=torch.int64)
    [launch] = _noted(copy_blocks, _new(_NUM_BLOCKS, numbers), pairs, pairs)
    yield _plain(f"copies x {count} blocks", launch, 2 * count * numbers * _HALF)

    ids, rows, last = _new(1, 256, dtype=torch.int64), _integers(256), _new(257, dtype=torch.int64)
    [launch] = _noted(fill_unknown_tokens, ids, rows, last)
    yield _plain("unknown tokens x 256", launch, 256 * 20)
    [launch] = _noted(remember_tokens, last, rows, ids[0])
    yield _plain("remember x 256", launch, 256 * 20)


def _plain(name: str, launch: Launch, moved_bytes: float) -> Case:
    return Case(name=name, launch=launch, moved_bytes=moved_bytes, num_working=launch.num_programs)


def _mixtures() -> Iterator[Case]:
    merged = _new(_NUM_EXPERTS, 2 * _EXPERT_GATES, _EXPERT_HIDDEN)
    gates, ups = merged.chunk(2, dim=1)
    down = _new(_NUM_EXPERTS, _EXPERT_HIDDEN, _EXPERT_GATES)
    weights = Experts(gates, ups, None, None, down, None, Gate(GateActivation.SILU))
    for count in (1, 64, 256, PROMPT):
        yield from _mixture(f"experts x {count}", weights, count)


def _mixture(name: str, weights: Experts, count: int) -> Iterator[Case]:
    """Tokens of each expert, as if the router chose evenly; of one token, as many as it may choose."""
    num_pairs = count * _NUM_CHOSEN
    share = 1 - (1 - 1 / _NUM_EXPERTS) ** num_pairs if count > 1 else _NUM_CHOSEN / _NUM_EXPERTS
    num_chosen = round(share * _NUM_EXPERTS)
    up_tiles, down_tiles = choose_tiles(num_pairs, _NUM_EXPERTS, torch.bfloat16)
    hidden, scores = _new(count, _EXPERT_HIDDEN), _new(count, _NUM_CHOSEN)
    ids = _new(count, _NUM_CHOSEN, dtype=torch.int64)

    def launch_all() -> None:
        routing = experts.route(ids, _NUM_EXPERTS, up_tiles.pairs)
        gated = experts.multiply_gate_up(hidden, weights, routing, _NUM_CHOSEN, up_tiles)
        experts.multiply_down(gated, weights, routing, scores, down_tiles)

    route, gate_up, way_down = _noted(launch_all)
    yield Case(
        name=name,
        launch=route,
        moved_bytes=num_pairs * 12,
        num_working=_NUM_EXPERTS,
        trips=-(-num_pairs // 1024),
    )
    num_tiles = max(num_chosen, -(-num_pairs // up_tiles.pairs))
    of_pairs = num_pairs * (_EXPERT_HIDDEN + _EXPERT_GATES)
    of_expert = _EXPERT_GATES * _EXPERT_HIDDEN
    for launch, trips, of_weights in (
        (gate_up, _EXPERT_HIDDEN / up_tiles.inputs, 2 * of_expert * num_chosen),
        (way_down, _EXPERT_GATES / down_tiles.inputs, of_expert * num_chosen),
    ):
        yield Case(
            name=name,
            launch=launch,
            moved_bytes=(of_weights + of_pairs) * _HALF,
            num_working=launch.grid[0] * num_tiles,
            trips=trips,
        )


GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    "decode": _decodes,
    "prefill": _prefills,
    "between": _between_products,
    "few-rows": _few_rows,
    "draw": _draws,
    "edit": _edits,
    "experts": _mixtures,
}
"""Counters of launches by what these belong to; "between" is between a layer's products."""

"""A decode step by its launches, as a captured graph has them: ours by their machine code, cuBLAS's by guess.

Owns: what a layer launches, in its order, and what is taken for granted of cuBLAS and of graphs.
Never: measures: each figure here is an estimate.

Shapes: R sequences, each with one token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from campaigns.gpu.paper.launches import CONTEXT, DECODES, Case
from campaigns.gpu.paper.roofline import BYTES_PER_S, estimate
from campaigns.gpu.shapes import SHAPES, Shape

LAUNCH_US = 1.7
"""From the end of one small kernel to the end of the next that waits for it, in a graph."""
_WEIGHTS_SHARE = 0.85
"""Share of the bandwidth with which cuBLAS reads weights."""
_PRODUCT_FLOPS = 550e12
"""Share of the tensor cores that cuBLAS reaches where tokens are a few hundred."""
_TILE = 64
_ENOUGH_TILES = 132
_HALF = 2
GOALS = {
    ("qwen3", 1): 700,
    ("qwen3", 64): 14_000,
    ("qwen3", 256): 17_000,
    ("llama", 1): 165,
    ("llama", 64): 6_400,
    ("llama", 256): 10_500,
}
"""Tokens per second, of docs/benchmarks/gpu.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Microseconds."""

    model: str
    num_sequences: int
    num_launches: int
    floor_us: float
    """All weights, keys and values once, at the whole bandwidth."""
    launching_us: float
    products_us: float
    attention_us: float
    others_us: float

    @property
    def us(self) -> float:
        return self.launching_us + self.products_us + self.attention_us + self.others_us

    @property
    def tokens_per_s(self) -> float:
        return self.num_sequences / self.us * 1e6


def all_steps(cases: Sequence[Case]) -> Iterator[Step]:
    for name in ("qwen3-0.6b", "llama-3.1-8b"):
        for count in DECODES:
            yield _step(name.split("-")[0], SHAPES[name], count, cases)


def _step(model: str, shape: Shape, count: int, cases: Sequence[Case]) -> Step:
    products, num_weights = [], 0
    for outputs, inputs in _layer_products(shape):
        products.append(_product_us(outputs, inputs, count))
        num_weights += outputs * inputs
    head = shape.vocab_size * shape.hidden_size
    attention = [_us(case) for case in cases if case.name == f"decode {model} x {count}"]
    # The nearest size that was looked at, by its bytes.
    near = 1 if count == 1 else 256
    others = [
        _us(case) * (count / near)
        for what, times in (("norm", 2), ("turn, write", 1), ("gates", 1))
        for case in cases
        if case.name == f"{what} {model} x {near}"
        for _ in range(times)
    ]
    layers = shape.num_hidden_layers
    splits = sum(_is_split(outputs, count) for outputs, _ in _layer_products(shape))
    # Beside the layers: unknown tokens, the list of decodes, the embedding, angles, the last norm, logits,
    # and the draw.
    num_launches = layers * (len(products) + splits + len(attention) + len(others)) + 11
    keys_and_values = count * CONTEXT * 2 * shape.num_key_value_heads * shape.head_dim * _HALF
    return Step(
        model=model,
        num_sequences=count,
        num_launches=num_launches,
        floor_us=((num_weights + keys_and_values / _HALF) * layers + head) * _HALF / BYTES_PER_S * 1e6,
        launching_us=num_launches * LAUNCH_US,
        products_us=layers * sum(products) + _product_us(shape.vocab_size, shape.hidden_size, count),
        attention_us=layers * sum(attention),
        others_us=layers * sum(others) + 2 * count * shape.vocab_size * _HALF / BYTES_PER_S * 1e6,
    )


def _layer_products(shape: Shape) -> list[tuple[int, int]]:
    queries, keys = (
        heads * shape.head_dim for heads in (shape.num_attention_heads, shape.num_key_value_heads)
    )
    return [
        (queries + 2 * keys, shape.hidden_size),
        (shape.hidden_size, queries),
        (2 * shape.intermediate_size, shape.hidden_size),
        (shape.hidden_size, shape.intermediate_size),
    ]


def _product_us(outputs: int, inputs: int, count: int) -> float:
    read_s = outputs * inputs * _HALF / (BYTES_PER_S * _WEIGHTS_SHARE)
    return max(read_s, 2 * outputs * inputs * count / _PRODUCT_FLOPS) * 1e6


def _is_split(outputs: int, count: int) -> bool:
    """Whether so few tiles are computed in parts along the inputs, which a second kernel adds."""
    return -(-outputs // _TILE) * -(-count // 2 // _TILE) < _ENOUGH_TILES


def _us(case: Case) -> float:
    found = estimate(
        case.launch, num_working=case.num_working, trips=case.trips, moved_bytes=case.moved_bytes
    )
    return found.seconds * 1e6

"""The one attention function that every model calls, and the interface of its backends.

Owns: the name under which transformers' models find us, the check of their arguments, and the backend of the
step that is under way. Some families drop keyword arguments on the way to attention, so it travels outside of
the call, in one module-level place that only `active` sets.

Fused layers call more of a backend than this: cpu/attention.py and gpu/attention.py declare it.
Source: transformers' AttentionInterface. A name without a mask function makes its models build no
mask at all; causality and windows are the backend's.

Shapes: T tokens of the step, R sequences (decodes first), G query heads per KV head,
Hq and Hk query and KV heads, D key size, V value size.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import c_int64
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from scheduler.cache_groups import ALL_TOKENS, Lifetime, LifetimeKind
from worker.states.interface import DraftingStates, StateExecutor, StateStep, Tap
from worker.worker_errors import UnsupportedAttention

ATTENTION_NAME = "tokenyard_paged"
SHARED_LAYER = "shared_layer_idx"
"""Number, at attention modules that take keys and values of an earlier layer, of that layer."""
KEEPS_LATENTS = "keeps_latents"
"""Mark of attention modules whose keys and values are latents (latents.py)."""
FULL_LAYER, SLIDING_LAYER, CHUNKED_LAYER = "full_attention", "sliding_attention", "chunked_attention"
"""Names of layers in transformers' `layer_types`."""

_UNDERSTOOD = frozenset({"scaling", "sliding_window", "softcap", "s_aux", "is_causal", "dropout"})
# Arguments without meaning here: their content comes with the step's metadata, or belongs to training and to
# outputs that are not asked for.
_MEANINGLESS = frozenset(
    {
        *("position_ids", "cache_position", "use_cache", "cache", "past_key_values", "past_key_value"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
        *("num_items_in_batch", "labels", "head_mask", "position_embeddings", "input_shape"),
    }
)


class KeyChoice(NamedTuple):
    """The keys that tokens of a step attend to, as an indexer chose them (indexers.py)."""

    seen: tuple[Tensor | None, ...]
    """Marks of each sequence [C, N, S]: what its N tokens attend to of its S keys, later ones aside, each of
    C for as many query heads. None: all. Empty where all see all."""


class Unmasked:
    """Stands for a mask that hides nothing, of which a layer may take a part: causality is the backend's."""

    def __getitem__(self, _: Any) -> "Unmasked":
        return self


class AttentionOptions(NamedTuple):
    """The attention of one layer."""

    scaling: float
    lifetime: Lifetime = ALL_TOKENS
    """Time for which later tokens see one: a token sees itself and those before it that are still kept."""
    softcap: float | None = None
    """Scores are squeezed into (-softcap, softcap) by tanh."""
    sinks: Tensor | None = None
    """[Hq]: one more score per head that takes its part of the softmax and has no value."""
    value_is_key_part: bool = False
    """Whether each value is the first numbers of its key (latents.py)."""
    choice: KeyChoice | None = None
    """The keys that are attended to; None: all."""


@dataclass(slots=True, eq=False)
class BlockTables:
    """The block tables of a step's R sequences, in tables of C rows that are kept between steps.

    There is one for each of S stripes of layers (kv_cache.py).

    Good until the rows change. A row's blocks are appended to, as long as its generation is the same: a copy
    of them needs the new part only.
    """

    block_ids_SCB: NDArray[np.int32]
    rows_R: NDArray[np.int64]
    num_blocks_SR: NDArray[np.int64]
    generations_R: NDArray[np.int64]
    longest: int
    """Most blocks that a sequence of this step reads."""
    _gathered: dict[int, NDArray[np.int32]] = field(default_factory=dict)

    @classmethod
    def of(cls, block_tables: NDArray[np.int32]) -> "BlockTables":
        """Make tables of a single step, [S, R, longest], or [R, longest] of one stripe; all are new."""
        block_tables_SRB = np.ascontiguousarray(
            block_tables if block_tables.ndim == 3 else block_tables[None]
        )
        num_stripes, num_sequences, longest = block_tables_SRB.shape
        return cls(
            block_tables_SRB,
            np.arange(num_sequences),
            np.full((num_stripes, num_sequences), longest),
            np.full(num_sequences, next(_single_steps)),
            longest,
        )

    @property
    def num_stripes(self) -> int:
        return len(self.block_ids_SCB)

    def gathered(self, stripe: int) -> NDArray[np.int32]:
        """Copy a stripe's tables side by side, [R, longest], once. Too slow for a long one among many."""
        if stripe not in self._gathered:
            self._gathered[stripe] = self.block_ids_SCB[stripe][self.rows_R, : self.longest]
        return self._gathered[stripe]


_single_steps = count(-2, -1)
"""Generations that no row of a worker has, and of which none comes twice."""


class SeenPictures(NamedTuple):
    """Pictures of whose tokens each sees all others of its own, later ones too."""

    ends_T: NDArray[np.int64]
    """End of the picture of each token of the step; 0 for those of none."""
    in_windows_only: bool
    """Whether layers without a window see earlier tokens alone."""

    def are_seen(self, lifetime: Lifetime) -> bool:
        """Whether layers of this lifetime see them."""
        return lifetime.window > 0 or not self.in_windows_only


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """One step for attention, on the host. Sequences are in the order of the flattened batch."""

    num_decodes: int
    """The number of sequences, from the first on, that have one query token each."""
    query_starts: NDArray[np.int64]
    """[R + 1]: tokens query_starts[r] to query_starts[r + 1] are those of sequence r."""
    seq_lens: NDArray[np.int64]
    """[R], after this step."""
    tables: BlockTables
    """Entries behind a sequence's last block, and before the window of a stripe's layers, are 0 or blocks of
    others and must not be read."""
    token_blocks_ST: NDArray[np.int64]
    """[S, T]: the blocks of each token's keys and values, of each stripe."""
    token_offsets: NDArray[np.int64]
    """[T]: the place within these blocks."""
    state_blocks: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 0), np.int64))
    """[R, S]: the blocks of each sequence's state, where layers are recurrent."""
    taps: tuple[Tap, ...] = ()
    """States that are written to other blocks as well."""
    num_drafts_R: tuple[int, ...] = ()
    """Tokens at the end of each share that may turn out wrong; empty where no share has any."""
    pictures: SeenPictures | None = None
    """Pictures that are seen whole; None: no token sees a later one."""

    @property
    def states(self) -> StateStep:
        """Return the step as recurrent layers see it."""
        is_first_R = self.seq_lens == np.diff(self.query_starts)
        return StateStep(
            self.num_decodes,
            self.query_starts,
            is_first_R,
            self.state_blocks,
            self.taps,
            self.num_drafts_R,
        )

    @property
    def cut_states(self) -> StateStep | None:
        """Return that form of a step whose shares recurrent layers compute in parts; None for all others."""
        is_cut = self.state_blocks.size > 0 and (self.taps or self.num_drafts_R)
        return self.states if is_cut else None


class StepSpan(NamedTuple):
    """Tokens of one sequence in a step."""

    start: int
    end: int
    seq_len: int
    """Length of the sequence after the step."""


class IndexKeys(Protocol):
    """Keys by which indexers choose (indexers.py), as layers of the cache behind all others."""

    def spans(self) -> Sequence[StepSpan]:
        """List the sequences of the step under way."""

    def write_index(self, layer_idx: int, keys_TD: Tensor) -> None:
        """Keep the keys of all tokens of the step."""

    def read_index(self, layer_idx: int, index: int) -> Tensor:
        """Return the keys [S, D] of a sequence of the step."""


class LayerExecutor(Protocol):
    """Computes attention for the layers of a model, one call per layer and step."""

    @property
    def index_keys(self) -> IndexKeys | None:
        """Return what keeps the keys of indexers; None where nothing does."""

    @property
    def states(self) -> StateExecutor | None:
        """Return what computes recurrent layers; None where the model's own functions do."""

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Write keys and values of all tokens to the cache, then attend.

        query [Hq, T, D], key [Hk, T, D], value [Hk, T, V], rotated and normed; returns [T, Hq, V].
        """


class AttentionBackend(LayerExecutor, Protocol):
    """A LayerExecutor over the paged cache. Serves any model whose layers are transformers' own."""

    @property
    def states(self) -> DraftingStates | None:
        """See LayerExecutor."""

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Prepare what all layers of the step share."""


_active: LayerExecutor | None = None
_num_layers_begun = c_int64(0)


@contextmanager
def active(executor: LayerExecutor) -> Iterator[None]:
    """Let attention calls of the models go to `executor`. One at a time: the worker has one thread."""
    global _active
    previous, _active = _active, executor
    try:
        yield
    finally:
        _active = previous


def executor_of_step() -> LayerExecutor:
    """Return the executor of the step that is under way, and count a layer. Each layer asks once in a step.

    Raises UnsupportedAttention outside of a step.
    """
    note_layer_begun()
    return present_executor()


def present_executor() -> LayerExecutor:
    """Return the executor of the step for layers that count themselves. Raises UnsupportedAttention."""
    if _active is None:
        raise UnsupportedAttention(f"{ATTENTION_NAME} attention was called outside of a step")
    return _active


def is_executing() -> bool:
    """Tell whether a step is under way."""
    return _active is not None


def states_of_step() -> StateExecutor | None:
    """Return what computes recurrent layers; None outside of a step, and where nothing does."""
    return None if _active is None else _active.states


def note_layer_begun() -> None:
    """Count a layer that does not ask for its executor."""
    note_layers_begun(1)


def note_layers_begun(num_layers: int) -> None:
    """Count the layers of a step that was recorded before, and is replayed."""
    # Kernels add to it as well. A lost update is harmless: the watcher asks whether the number
    # has changed, and the next layer changes it again.
    _num_layers_begun.value += num_layers


def num_layers_begun() -> int:
    """Return the layers begun since the start of the process: it grows within a step. For any thread."""
    return _num_layers_begun.value


def counter_of_layers() -> c_int64:
    """Return the counter itself, for kernels that compute several layers in one call."""
    return _num_layers_begun


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Unmasked | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend, called by transformers' attention modules with a batch of 1.

    query [1, Hq, T, D], key [1, Hk, T, D], value [1, Hk, T, V]; returns [1, T, Hq, V] and no weights.
    Raises UnsupportedAttention for an argument that would change the result and is not known here.
    """
    executor = executor_of_step()
    if not (attention_mask is None or isinstance(attention_mask, Unmasked)):
        raise UnsupportedAttention("attention over a mask of the model's own making")
    layer_idx = getattr(module, "layer_idx", None)
    if not isinstance(layer_idx, int):
        raise UnsupportedAttention(f"attention module {type(module).__name__} without a layer_idx")
    options = _read_options(module, query, kwargs)
    layer_idx = int(getattr(module, SHARED_LAYER, layer_idx))
    if not getattr(module, KEEPS_LATENTS, False):
        return executor.attend(layer_idx, query[0], key[0], value[0], options).unsqueeze(0), None
    options = options._replace(value_is_key_part=True)
    expansion: Any = module.kv_b_proj
    sums_THL = executor.attend(layer_idx, expansion.absorb(query[0]), key[0], value[0], options)
    return expansion.expand(sums_THL).unsqueeze(0), None


def _read_options(module: nn.Module, query: Tensor, kwargs: Mapping[str, Any]) -> AttentionOptions:
    for name, value in kwargs.items():
        is_known = name in _UNDERSTOOD or name in _MEANINGLESS or isinstance(value, KeyChoice)
        if not is_known and value is not None:
            raise UnsupportedAttention(f"attention with {name}")
    if kwargs.get("dropout"):
        raise UnsupportedAttention("attention with dropout")
    is_causal = kwargs.get("is_causal")
    if (getattr(module, "is_causal", True) if is_causal is None else is_causal) is False:
        raise UnsupportedAttention("attention to later tokens, as an encoder does")
    scaling = kwargs.get("scaling")
    return AttentionOptions(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        lifetime=_read_lifetime(module, kwargs),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
        choice=next((each for each in kwargs.values() if isinstance(each, KeyChoice) and each.seen), None),
    )


def _read_lifetime(module: Any, kwargs: Mapping[str, Any]) -> Lifetime:
    """Read the layer's arguments and, where they leave it open, its configuration.

    A model by itself makes masks from its configuration: chunks are never an argument, and some families
    (qwen2_moe) do not pass on their window. Raises UnsupportedAttention where it stays open.
    """
    config = getattr(module, "config", None)
    layer_types = getattr(config, "layer_types", None)
    layer_type = layer_types[module.layer_idx] if layer_types else None
    if layer_type == CHUNKED_LAYER:
        return _limited(LifetimeKind.CHUNK, getattr(config, "attention_chunk_size", None))
    if "sliding_window" in kwargs:
        return _limited(LifetimeKind.WINDOW, kwargs["sliding_window"])
    window = getattr(config, "sliding_window", None)
    if layer_type == SLIDING_LAYER:
        return _limited(LifetimeKind.WINDOW, window)
    if layer_type is None and window and window < getattr(config, "max_position_embeddings", window):
        raise UnsupportedAttention("a sliding window that its layers do not tell of")
    return ALL_TOKENS


def _limited(kind: LifetimeKind, num_tokens: int | None) -> Lifetime:
    return ALL_TOKENS if num_tokens is None else Lifetime(kind, num_tokens)


def is_plain(options: AttentionOptions) -> bool:
    """Tell whether these are plain scaled dot products, to which torch's fused kernels apply."""
    return options.softcap is None and options.sinks is None


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Apply softmax over the last dimension in float32, and return the scores' dtype.

    scores [..., K]; sinks broadcasts to [..., 1] and takes its part of the sum, or None.
    """
    if sinks is None:
        return torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)
    extended = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], dim=-1)
    return torch.softmax(extended, dim=-1, dtype=torch.float32)[..., :-1].to(scores.dtype)

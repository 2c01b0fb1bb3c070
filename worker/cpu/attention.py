"""Paged attention by the CPU's kernels, for single calls of attention and for whole fused layers.

Owns: the interface that fused layers of a CPU call, and a step and its caches in the kernels' own form.
Never: computes. Layers that the kernels cannot take (head sizes that are no multiple of a vector, chunks)
are left to ref_attention.py.

Shapes: T tokens, Hq and Hk query and KV heads, D key size, V value size, R rotated numbers of a head.
"""

from ctypes import Array, addressof
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from worker.attention.interface import (
    AttentionBackend,
    AttentionMetadata,
    AttentionOptions,
    note_layer_begun,
)
from worker.attention.kv_cache import KVCache, PagedTensor
from worker.attention.ref_attention import RefAttention
from worker.cpu.native import (
    DTYPES,
    WIDEST_VECTOR,
    CAngles,
    CAttention,
    CAttentionOptions,
    CCache,
    CHalves,
    CHeadShape,
    CLayer,
    CPages,
    CStack,
    CStateStep,
    CStep,
    Kernels,
    LayerPlace,
    pointer,
)
from worker.cpu.states import SILU, CpuStates
from worker.devices.device import Device
from worker.model.layer_call import AngleOrder, Rotation
from worker.states.interface import Convolution, Recurrence, StateShape
from worker.states.states_in_waves import StatesInWaves


class GivenAngles(NamedTuple):
    """The rotation that a model passes to a layer, and the order of its angles."""

    rotation: Rotation
    order: AngleOrder


class RecurrentInputs(NamedTuple):
    """Weights of a recurrent layer between its products, as single calls take them."""

    weight_CW: Tensor
    bias_C: Tensor | None
    shape: StateShape
    num_groups: int


class FusedLayer(NamedTuple):
    """A layer in the kernels' form, and its number."""

    c: CLayer
    layer_idx: int
    recurrent: RecurrentInputs | None
    """Weights of a recurrence; None for a layer that attends."""


class LayerStack(NamedTuple):
    """All layers of a model in the kernels' form."""

    c: CStack | None
    """Layers and the norm behind them; None of layers that others follow: they are computed one by one."""
    layers: tuple[FusedLayer, ...]
    end: CStack
    """A stack without layers, of the last norm alone."""


class LayerAttention(AttentionBackend, Protocol):
    """An attention backend that fused layers call (layer.py)."""

    def run_layer(self, layer: FusedLayer, hidden_TH: Tensor, given: GivenAngles | None) -> None:
        """Compute a whole fused layer, in place."""

    def run_mixer_part(self, layer: FusedLayer, hidden_TH: Tensor, given: GivenAngles | None) -> Tensor:
        """Compute a fused layer without its MLP, in place; return the MLP's input [T, H]."""

    def run_layers(self, stack: LayerStack, hidden_TH: Tensor, angles: CAngles) -> None:
        """Compute whole fused layers, one after another, and the norm behind them if it has one, in place."""


class CpuAttention:
    """LayerAttention by the CPU's kernels, for one step at a time."""

    def __init__(self, cache: KVCache, device: Device, kernels: Kernels) -> None:
        self._ref = RefAttention(cache, device)
        layout = cache.layout.states
        pool_NE = cache.pool_NE
        self._cpu_states = None if layout is None else CpuStates(pool_NE, layout, kernels)
        self.states = (
            None
            if layout is None or self._cpu_states is None
            else StatesInWaves(self._cpu_states, pool_NE, layout)
        )
        self.index_keys = self._ref
        self._kernels = kernels
        self._dtype = cache.layout.dtype
        self._block_size = cache.layout.block_size
        self._caches = {
            layer_idx: CCache(_pages(layer.keys), _pages(layer.values), layer.stripe)
            for layer_idx, layer in cache.layers.items()
        }
        for layer_idx, (channels, rows) in {} if self._cpu_states is None else self._cpu_states.runs.items():
            found = self._caches.setdefault(layer_idx, CCache())
            found.channels, found.rows = addressof(channels), addressof(rows)
        self._caches_of: dict[tuple[int, ...], Array[CCache]] = {}
        self._has_kernel = {
            layer_idx: self._dtype in DTYPES
            and shape.key_dim % WIDEST_VECTOR == 0
            and shape.value_dim % WIDEST_VECTOR == 0
            for layer_idx, shape in cache.layout.layers.items()
        }
        self._step: CStep
        self._pointed_to: object = None  # lives as long as the step that points to it
        self._angles: dict[int, tuple[CAngles, Rotation, Rotation]] = {}

    def begin_step(self, metadata: AttentionMetadata) -> None:
        self._ref.begin_step(metadata)
        states = CStateStep()
        if self.states is not None and self._cpu_states is not None:
            self.states.begin_step(metadata.states)
            states = self._cpu_states.step
        self._angles.clear()
        tables, pictures = metadata.tables, metadata.pictures
        self._pointed_to = metadata
        self._step = CStep(
            metadata.query_starts.ctypes.data,
            metadata.seq_lens.ctypes.data,
            tables.block_ids_SCB.ctypes.data,
            tables.rows_R.ctypes.data,
            tables.block_ids_SCB.shape[1],
            tables.block_ids_SCB.shape[2],
            metadata.token_blocks_ST.ctypes.data,
            metadata.token_offsets.ctypes.data,
            len(metadata.seq_lens),
            len(metadata.token_offsets),
            self._block_size,
            None if pictures is None else pictures.ends_T.ctypes.data,
            pictures is not None and pictures.in_windows_only,
            states,
        )

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """See LayerExecutor.attend."""
        if not self._has_kernel[layer_idx] or options.lifetime.chunk or options.choice is not None:
            return self._ref.attend(layer_idx, query, key, value, options)
        self._ref.write(layer_idx, key, value)
        num_query_heads, num_tokens, key_dim = query.shape
        queries_THD = query.transpose(0, 1).to(torch.float32).contiguous()
        out_THV = query.new_empty((num_tokens, num_query_heads, value.shape[-1]))
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        attention = CAttention(
            CHeadShape(num_query_heads, key.shape[0], key_dim, value.shape[-1]),
            attention_options(options, sinks),
            self._step,
            self._caches[layer_idx],
            pointer(queries_THD),
            num_query_heads * key_dim,
            pointer(out_THV),
        )
        self._kernels.attend(attention, self._dtype)
        return out_THV

    def run_layer(self, layer: FusedLayer, hidden_TH: Tensor, given: GivenAngles | None) -> None:
        self._run(layer, self._read_angles(given), hidden_TH, None)

    def run_mixer_part(self, layer: FusedLayer, hidden_TH: Tensor, given: GivenAngles | None) -> Tensor:
        angles = self._read_angles(given)
        if layer.c.mlp_norm.weight is None and not layer.c.mlp_is_parallel:
            self._run(layer, angles, hidden_TH, None)
            return hidden_TH
        mlp_input_TH = torch.empty_like(hidden_TH)
        self._run(layer, angles, hidden_TH, mlp_input_TH)
        return mlp_input_TH

    def run_layers(self, stack: LayerStack, hidden_TH: Tensor, angles: CAngles) -> None:
        c, layers, end = stack
        if c is None or (self.states is not None and self.states.is_cut and layers):
            for layer in layers:
                note_layer_begun()  # as the kernel for all of them counts
                self._run(layer, angles, hidden_TH, None)
            if c is None:
                return
            c, layers = end, ()
        layer_idxs = tuple([layer.layer_idx for layer in layers])
        caches = self._caches_of.get(layer_idxs)
        if caches is None:
            own = [self._caches[layer_idx] for layer_idx in layer_idxs]
            caches = self._caches_of[layer_idxs] = (CCache * len(own))(*own)
        self._kernels.run_layers(c, self._step, angles, caches, hidden_TH)

    def _run(
        self, layer: FusedLayer, angles: CAngles, hidden_TH: Tensor, mlp_input_TH: Tensor | None
    ) -> None:
        place = LayerPlace(self._step, angles, self._caches[layer.layer_idx])
        states, recurrent = self.states, layer.recurrent
        if states is None or recurrent is None or not states.is_cut:
            self._kernels.run_layer(layer.c, place, hidden_TH, mlp_input_TH)
            return
        shape, num_tokens = recurrent.shape, len(hidden_TH)
        projected_TN = hidden_TH.new_empty((num_tokens, int(layer.c.query_key_value.num_outputs)))
        log_decay_TH, beta_TH = torch.empty((2, num_tokens, shape.num_heads))
        half = CHalves(
            is_first=True,
            projected=pointer(projected_TN),
            log_decay=pointer(log_decay_TH),
            beta=pointer(beta_TH),
        )
        self._kernels.run_layer(layer.c, place, hidden_TH, mlp_input_TH, half)
        states.begin_layer(layer.layer_idx)
        activation = SILU if layer.c.recurrent.is_activated else None
        inputs_TC = projected_TN[:, : shape.num_channels]
        convolved_TC = states.convolve(
            Convolution(inputs_TC, recurrent.weight_CW, recurrent.bias_C, activation)
        )
        num_keys = recurrent.num_groups * shape.key_dim
        query, key, value = convolved_TC.tensor_split([num_keys, 2 * num_keys], dim=1)
        recurred_THV = states.recur(
            Recurrence(
                query_TGK=query.view(num_tokens, -1, shape.key_dim),
                key_TGK=key.view(num_tokens, -1, shape.key_dim),
                value_THV=value.view(num_tokens, -1, shape.value_dim),
                log_decay=log_decay_TH,
                beta_TH=beta_TH,
                has_unit_keys=True,
                scaling=layer.c.recurrent.scaling,
            )
        )
        half.is_first, half.recurred = False, pointer(recurred_THV)
        self._kernels.run_layer(layer.c, place, hidden_TH, mlp_input_TH, half)

    def _read_angles(self, given: GivenAngles | None) -> CAngles:
        """Convert a rotation once for all layers of the step that share it."""
        if given is None:
            return CAngles()
        rotation = given.rotation
        found = self._angles.get(id(rotation[0]))
        if found is None:
            cosines, sines = (all_and_all_again(angles[0].float(), given.order) for angles in rotation)
            # The tensors are kept too: an id is only unique among those that live.
            found = (CAngles(pointer(cosines), pointer(sines)), rotation, (cosines, sines))
            self._angles[id(rotation[0])] = found
        return found[0]


def attention_options(options: AttentionOptions, sinks: Tensor | None) -> CAttentionOptions:
    """Put a layer's options in the kernels' form; `sinks` are [Hq] float32 and must outlive it."""
    return CAttentionOptions(options.scaling, options.lifetime.window, options.softcap or 0.0, pointer(sinks))


def all_and_all_again(angles_TR: Tensor, order: AngleOrder) -> Tensor:
    """Reorder angles as the kernels read them, contiguous."""
    if order is AngleOrder.IN_PAIRS:
        angles_TR = torch.cat((angles_TR[:, ::2], angles_TR[:, 1::2]), dim=1)
    return angles_TR.contiguous()


def _pages(tensor: PagedTensor) -> CPages:
    blocks_NHSD = tensor.blocks_NHSD
    return CPages(blocks_NHSD.data_ptr(), blocks_NHSD.stride(0), blocks_NHSD.stride(2))

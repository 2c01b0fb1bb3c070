"""Recurrent layers on a GPU by our kernels.

Owns: the choice of the kernel for a call, and the trial of chunks at their first use, which is at start.
Never: computes (recurrence.py, chunks.py, convolution.py), or waits for the device but in a trial.

Nothing but a trial depends on the content of a batch's tensors, so that a graph can capture it.
"""

import logging
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from transformers.activations import ACT2FN
from triton import TritonError

from worker.devices.device import Device
from worker.devices.trial import ROUNDING, TimedTrial, first_line, relative_error
from worker.gpu.device_batch import AttentionBatch
from worker.gpu.state_kernels.chunks import recur_by_chunks
from worker.gpu.state_kernels.convolution import convolve
from worker.gpu.state_kernels.places import StateBatch, StatePlaces, batch_of
from worker.gpu.state_kernels.recurrence import recur_by_tokens
from worker.states.interface import Convolution, Recurrence, StateStep
from worker.states.state_layout import StateLayout
from worker.states.states_in_waves import StatesInWaves

log = logging.getLogger(__name__)

_SILU = "silu"
_MOST_BY_TOKENS = 16
"""Tokens of a share that take no longer one by one than the products of a chunk."""
_DTYPES = {torch.float16, torch.bfloat16}
"""Dtypes of inputs that chunks are for: their products round to ten bits."""
_TRIED_LENS = (70, 18)
_MOST_KEPT_STEPS = 16


class GpuStates:
    """SteppedStates (states_in_waves.py) on a GPU, for one step at a time."""

    def __init__(self, pool_NE: Tensor, layout: StateLayout, device: Device) -> None:
        self._device = device
        self._places = StatePlaces(pool_NE, layout, device)
        self._takes_chunks: dict[object, bool] = {}
        self._made: dict[int, tuple[StateStep, StateBatch]] = {}
        self._batch: StateBatch
        self._layer_idx = -1

    def begin_batch(self, batch: StateBatch) -> None:
        """Take the sequences of the next calls, which are on the device."""
        self._batch = batch

    def begin_step(self, step: StateStep) -> None:
        """Take them from the host; a step that was begun lately is not copied again."""
        if id(step) not in self._made:
            if len(self._made) == _MOST_KEPT_STEPS:
                self._made.clear()
            self._made[id(step)] = step, batch_of(step, self._device)
        self._batch = self._made[id(step)][1]

    def begin_layer(self, layer_idx: int) -> None:
        self._layer_idx = layer_idx

    def convolve(self, given: Convolution) -> Tensor:
        places = self._places.channels[self._layer_idx]
        make = given.input_TC.new_empty if self._batch.are_decodes else given.input_TC.new_zeros
        out_TC = make(given.input_TC.shape)
        is_activated = given.activation == _SILU
        convolve(given, places, self._batch, out_TC, is_activated=is_activated)
        return out_TC if is_activated or given.activation is None else ACT2FN[given.activation](out_TC)

    def recur(self, given: Recurrence) -> Tensor:
        given, batch, places = _side_by_side(given), self._batch, self._places.rows[self._layer_idx]
        if batch.are_decodes:
            out_THV = given.value_THV.new_empty(given.value_THV.shape, dtype=torch.float32)
            recur_by_tokens(given, places, batch, out_THV, 1)
            return out_THV
        out_THV = given.value_THV.new_zeros(given.value_THV.shape, dtype=torch.float32)
        takes_chunks = self._can_take_chunks(given)
        most_by_tokens = _MOST_BY_TOKENS if takes_chunks else len(out_THV)
        recur_by_tokens(given, places, batch, out_THV, most_by_tokens)
        if takes_chunks and len(out_THV) > most_by_tokens:
            recur_by_chunks(given, places, batch, out_THV, most_by_tokens + 1)
        return out_THV

    def _can_take_chunks(self, given: Recurrence) -> bool:
        """Tell whether a trial has found chunks right for layers of this kind; the first call makes it."""
        if given.log_decay.dim() > 2 or given.key_TGK.dtype not in _DTYPES:
            return False
        kind = given.key_TGK.shape[1:], given.value_THV.shape[1:], given.beta_TH is None
        if kind not in self._takes_chunks:
            self._takes_chunks[kind] = self._try_chunks(given)
        return self._takes_chunks[kind]

    def _try_chunks(self, given: Recurrence) -> bool:
        """Compare chunks of a call's tokens, again and again, with the same one by one; no state changes."""
        num_tokens, num_tried = len(given.key_TGK), sum(_TRIED_LENS)
        given = _side_by_side(given.of(torch.arange(num_tried, device=given.key_TGK.device) % num_tokens))
        integers = [[0, *accumulate(_TRIED_LENS)], [length + 1 for length in _TRIED_LENS]]
        device = self._device.torch_device
        starts_R, lens_R = (torch.tensor(each, dtype=torch.int32, device=device) for each in integers)
        blocks_RS = self._batch.blocks_RS[:1].expand(len(_TRIED_LENS), -1).contiguous()
        batch = StateBatch(False, starts_R, lens_R, blocks_RS, keeps_states=False)  # noqa: FBT003 -- no decodes
        places = self._places.rows[self._layer_idx]
        tokens_THV, chunks_THV = given.value_THV.new_zeros((2, *given.value_THV.shape), dtype=torch.float32)
        by_tokens = partial(recur_by_tokens, given, places, batch, tokens_THV, num_tried)
        by_chunks = partial(recur_by_chunks, given, places, batch, chunks_THV, 1)
        try:
            by_tokens(), by_chunks()
            error = relative_error(chunks_THV, tokens_THV)
            outcome = TimedTrial([by_tokens], [by_chunks], least_gain=1.0).run(self._device)
        except (TritonError, RuntimeError) as failure:
            log.warning("recurrences go token by token, since chunks fail: %s", first_line(failure))
            return False
        if error <= ROUNDING[given.key_TGK.dtype] and (outcome is None or outcome.is_faster):
            return True
        times = "as long" if outcome is None else outcome.times
        log.warning("recurrences go token by token: chunks have an error of %.2g, and take %s", error, times)
        return False


class GpuStatesInWaves(StatesInWaves):
    """DraftingStates on a GPU. A step that is not cut is taken from the device."""

    def __init__(self, pool_NE: Tensor, layout: StateLayout, device: Device) -> None:
        self._gpu_states = GpuStates(pool_NE, layout, device)
        super().__init__(self._gpu_states, pool_NE, layout)

    def begin_batch(self, batch: AttentionBatch) -> None:
        """Take a step. The batch's tensors are read when layers are computed, and not before."""
        if batch.cut_states is not None:
            self.begin_step(batch.cut_states)
            return
        assert batch.state_blocks_RF is not None
        self._waves.clear()
        self._drafted.clear()
        are_decodes = batch.num_decodes == batch.num_tokens
        starts_R, lens_R = batch.query_starts_R, batch.seq_lens_R
        self._gpu_states.begin_batch(StateBatch(are_decodes, starts_R, lens_R, batch.state_blocks_RF))


def _side_by_side(given: Recurrence) -> Recurrence:
    """Let the numbers of each token lie side by side."""

    def whole(x: Tensor) -> Tensor:
        return x if x[0].is_contiguous() else x.contiguous()

    return given._replace(
        query_TGK=whole(given.query_TGK),
        key_TGK=whole(given.key_TGK),
        value_THV=whole(given.value_THV),
        log_decay=given.log_decay.contiguous(),
        beta_TH=None if given.beta_TH is None else given.beta_TH.contiguous(),
    )

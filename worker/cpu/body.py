"""The body of a model whose layers all have kernels: one call computes them, and the last norm.

A step reads more than caches hold, so that what the interpreter does between layers, and around them, comes
from memory: with a small model in codes that is a tenth of a step of one sequence.

Owns: the body (embedding, layers, last norm), the rotations of the first positions, and the trial.

Shapes: T tokens, P positions, R rotated numbers, H numbers of a hidden state, V tokens of the vocabulary.
"""

import ctypes
import logging
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from worker.attention.interface import active, counter_of_layers, present_executor
from worker.attention.kv_cache import KVCache
from worker.attention.trial_step import TRIAL_TOKENS, trial_cache, trial_metadata
from worker.cpu.attention import LayerAttention, LayerStack, all_and_all_again
from worker.cpu.layer import CpuLayer, norm_struct
from worker.cpu.native import CAngles, CNorm, CStack, pointer
from worker.devices.device import Device
from worker.model.body import WholeOutputs, body_gives, body_name, put_whole_body
from worker.model.layer_call import Rotary
from worker.model.layer_parts import RmsNorm, TakenWeights, Unrecognised, read_norm

log = logging.getLogger(__name__)

_MOST_KEPT_POSITIONS = 8192
"""A few megabytes at most; steps with later positions are long enough to compute theirs."""
_EARLY_START = 11
_NORM_TOLERANCE = 0.01
"""transformers' norms round twice, ours once."""
_PARTS = ("layers", "norm", "config", "get_input_embeddings")


class CpuBody(nn.Module):
    """A body that runs only while a LayerAttention executes a step; see WholeBody. Raises Unrecognised.

    Its parts have the names that they have in transformers' body.
    """

    def __init__(self, body: Any, norm: RmsNorm, max_model_len: int) -> None:
        super().__init__()
        layers = list(body.layers)
        if not layers or not all(isinstance(layer, CpuLayer) and layer.is_whole for layer in layers):
            raise Unrecognised("not all of its layers are whole")
        rotaries = {layer.rotary for layer in layers if layer.state is None}
        rotary = rotaries.pop() if rotaries else None
        if rotaries or (rotary is not None and not hasattr(body, "rotary_emb")):
            raise Unrecognised("its layers do not rotate alike")
        self.embed_tokens, self.layers, self.norm = body.get_input_embeddings(), body.layers, body.norm
        self.shapes = {layer.layer_idx: layer.shape for layer in layers if layer.state is None}
        self.states = {layer.layer_idx: layer.state for layer in layers if layer.state is not None}
        example_11H = self.embed_tokens(torch.zeros((1, 1), dtype=torch.int64))
        self.dtype = example_11H.dtype
        self._angles: _KeptAngles | None = None
        if rotary is not None:
            self.rotary_emb = body.rotary_emb
            self._angles = _KeptAngles(self.rotary_emb, rotary, example_11H, max_model_len)
        self.plain_head: tuple[nn.Module, ...] = ()
        """See WholeBody. In a tuple: it is no part of the body."""
        self._norm = norm
        self._end = _stack([], len(norm.weight_H), norm_struct(norm))
        self._fused = tuple(layer.fused for layer in layers)
        self.tap(())

    def tap(self, places: Sequence[int]) -> None:
        ends = [0, *places, len(self._fused)]
        *before, last = [self._fused[start:end] for start, end in pairwise(ends)]
        self._before = tuple(LayerStack(None, each, self._end) for each in before)
        """Layers up to each tap; the stack has those behind the last."""
        stack = _stack([layer.c for layer in last], len(self._norm.weight_H), norm_struct(self._norm))
        self._stack = LayerStack(stack, last, self._end)

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        position_ids: Tensor,
        **_: Any,
    ) -> WholeOutputs:
        """Compute the hidden states [1, T, H] behind the last norm, of ids or of rows of embeddings."""
        # Layers change the rows in place.
        embeds_1TH = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds.clone()
        hidden_1TH = embeds_1TH.contiguous()
        hidden_TH = hidden_1TH[0]
        angles = CAngles() if self._angles is None else self._angles.of(hidden_1TH, position_ids)
        # The toolkit that made the layers made the backend.
        executor = cast("LayerAttention", present_executor())
        tapped = []
        for part in self._before:
            executor.run_layers(part, hidden_TH, angles)
            tapped.append(hidden_TH.clone())
        executor.run_layers(self._stack, hidden_TH, angles)
        return WholeOutputs(hidden_1TH, hidden_TH, tuple(tapped))

    def normed(self, hidden_1TH: Tensor) -> Tensor:
        """Apply the last norm alone."""
        out_1TH = hidden_1TH.clone()
        end = LayerStack(self._end, (), self._end)
        cast("LayerAttention", present_executor()).run_layers(end, out_1TH[0], CAngles())
        return out_1TH


class _KeptAngles:
    """Rotations by the model's own module, computed at load for the positions that most steps have."""

    def __init__(self, module: nn.Module, rotary: Rotary, example_11H: Tensor, max_model_len: int) -> None:
        self._module, self._rotary = module, rotary
        self._num_kept = min(max_model_len, _MOST_KEPT_POSITIONS)
        self._kept_PR = self._compute(example_11H, torch.arange(self._num_kept).unsqueeze(0))
        self._pointed_to: object = None

    def of(self, hidden_1TH: Tensor, position_ids: Tensor) -> CAngles:
        """Give the rotations of some positions, [1, T] or [3, 1, T]; good until the next call."""
        if position_ids.dim() == 3 or int(position_ids.numpy().max()) >= self._num_kept:
            cosines_TR, sines_TR = self._pointed_to = self._compute(hidden_1TH, position_ids)
            return CAngles(pointer(cosines_TR), pointer(sines_TR))
        cosines_PR, sines_PR = self._kept_PR
        self._pointed_to = positions_1T = position_ids.contiguous()
        return CAngles(pointer(cosines_PR), pointer(sines_PR), pointer(positions_1T))

    def _compute(self, hidden_1TH: Tensor, position_ids: Tensor) -> list[Tensor]:
        rotation = self._module(hidden_1TH, position_ids)
        return [all_and_all_again(each[0].float(), self._rotary.order) for each in rotation]


def _stack(layers: list[Any], hidden_size: int, norm: CNorm) -> CStack:
    """Make the struct. The layers must outlive it."""
    pointers = (ctypes.c_void_p * len(layers))(*map(ctypes.addressof, layers))
    begun = counter_of_layers()
    stack = CStack(
        ctypes.cast(pointers, ctypes.c_void_p), len(layers), hidden_size, norm, ctypes.addressof(begun)
    )
    stack.kept = pointers, begun  # a struct keeps nothing alive that it points to
    return stack


def join_body(
    model: Any,
    taken: TakenWeights,
    open_backend: Callable[[KVCache], LayerAttention],
    device: Device,
    max_model_len: int,
) -> None:
    """Put a CpuBody in the place of the model's own body, or around the layers of a model that is a body.

    Raises Unrecognised, and changes nothing, where the results differ, or memory runs out.
    """
    try:
        body: Any = model.get_submodule(body_name(model))
    except AttributeError:
        body = model
    if not all(hasattr(body, part) for part in _PARTS):
        raise Unrecognised("its body is made otherwise than most")
    try:
        with torch.inference_mode():
            joined = CpuBody(body, read_norm(body.norm, taken), max_model_len)
            cache = trial_cache(joined.shapes, joined.dtype, device, joined.states)
            backend = open_backend(cache)
            for start in sorted({_EARLY_START, max(0, max_model_len - TRIAL_TOKENS)}):
                arguments = trial_arguments(body.config.vocab_size, start)
                backend.begin_step(trial_metadata(num_state_blocks=cache.layout.num_state_blocks))
                with active(backend):
                    outputs = _try_body(body, joined, arguments)
            joined.plain_head = _plain_head_of(model, outputs, arguments)
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError, MemoryError) as error:
        raise Unrecognised(f"its body cannot be joined ({type(error).__name__})") from error
    put_whole_body(model, joined)


def _try_body(body: Any, joined: CpuBody, arguments: dict[str, Tensor]) -> WholeOutputs:
    """Compare the last norm's input bit for bit, and its output within a tolerance. Raises Unrecognised."""
    seen: list[Tensor] = []
    hook = body.norm.register_forward_pre_hook(lambda _, given: seen.append(given[0].clone()))
    try:
        expected = body(**arguments, use_cache=False).last_hidden_state
    finally:
        hook.remove()
    outputs: WholeOutputs = joined(**arguments)
    found = outputs.last_hidden_state
    if not _are_same(found, joined.normed(seen[0])):
        raise Unrecognised("its body computes more than its parts")
    # A model of numbers that are none stays as it is.
    if not (found - expected).float().norm() <= _NORM_TOLERANCE * expected.float().norm():
        raise Unrecognised("its last norm computes something else")
    return outputs


def _plain_head_of(model: Any, outputs: WholeOutputs, arguments: dict[str, Tensor]) -> tuple[nn.Module, ...]:
    """Return the output layer if the model's logits are its outputs to the bit; see WholeBody."""
    head = model.get_output_embeddings()
    if head is None:  # embedders and scorers
        return ()
    with body_gives(model, outputs):
        logits_1TV = model(**arguments, use_cache=False, return_dict=True).logits
    if _are_same(head(outputs.hidden_TH), logits_1TV[0]):
        return (head,)
    log.info("the model's own forward makes its logits: they are not the outputs of its output layer")
    return ()


def _are_same(a: Tensor, b: Tensor) -> bool:
    """Compare bits, so that a NaN equals itself."""
    return a.dtype is b.dtype and torch.equal(a.view(torch.int16), b.view(torch.int16))


def trial_arguments(vocab_size: int, start: int, num_tokens: int = TRIAL_TOKENS) -> dict[str, Tensor]:
    """Make the arguments of a body for some tokens at the positions from `start` on."""
    generator = np.random.default_rng(num_tokens)
    return {
        "input_ids": torch.from_numpy(generator.integers(0, vocab_size, (1, num_tokens))),
        "position_ids": torch.arange(start, start + num_tokens).unsqueeze(0),
    }

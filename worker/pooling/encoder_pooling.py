"""Pooling of whole prompts through an encoder, by the model's own attention.

Owns: the cut of a step into batches of similar length, their padding and masks, and the check at load that
neither changes a vector.
Never: keeps anything between two steps; there is no KV cache.

Shapes: B prompts of a batch, L tokens of the longest of them, N prompts of a step, H hidden size, E size of
the vectors.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from scheduler.messages import BlockId, SchedulerOutput, SequenceId
from worker.devices.device import Device
from worker.pooling.pooler import Pooler, Scores, TokenSpan
from worker.pooling.step import NOTHING_POOLED, PooledPrompts, PromptTable
from worker.worker_errors import FamilyRefused

# A batch is padded to its longest prompt: none in it is shorter than this share of that.
_SHORTEST_SHARE = 0.75
_SEED = 7
# Error over magnitude of a vector. A model that reads the padding is off by about 1.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}

Read = Callable[[Any, list[int]], Tensor]
"""From the model's outputs and the lengths of the batch's prompts to vectors [B, E]."""


class Prompt(NamedTuple):
    """One prompt to be computed."""

    token_ids: NDArray[np.int32]
    second_text_start: int | None = None
    """Index of the first token of a pair's second text."""


class EncoderModel:
    """Caller of the model."""

    def __init__(self, model: nn.Module, device: Device, read: Read) -> None:
        config: Any = model.config
        self._model = model
        self._device = device
        self._read = read
        self._padding = getattr(config, "pad_token_id", None) or 0
        accepted = inspect.signature(model.forward).parameters
        # Where one type is known, tokenizers may still number the second text 1.
        self._has_text_types = (
            "token_type_ids" in accepted and (getattr(config, "type_vocab_size", 0) or 0) > 1
        )

    def run(self, prompts: list[Prompt]) -> Tensor:
        """Compute vectors [N, E], in the order of the prompts."""
        vectors: list[Tensor | None] = [None] * len(prompts)
        for batch in cut_by_length([len(prompt.token_ids) for prompt in prompts]):
            vectors_BE = self._run_batch([prompts[index] for index in batch])
            for index, vector_E in zip(batch, vectors_BE, strict=True):
                vectors[index] = vector_E
        return torch.stack([vector for vector in vectors if vector is not None])

    @torch.inference_mode()
    def _run_batch(self, prompts: list[Prompt]) -> Tensor:
        lengths = [len(prompt.token_ids) for prompt in prompts]
        shape = (len(prompts), max(lengths))
        token_ids_BL = np.full(shape, self._padding, dtype=np.int64)
        mask_BL = np.zeros(shape, dtype=np.int64)
        types_BL = np.zeros(shape, dtype=np.int64)
        for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            token_ids_BL[row, :length] = prompt.token_ids
            mask_BL[row, :length] = 1
            if prompt.second_text_start is not None:
                types_BL[row, prompt.second_text_start : length] = 1
        arguments: dict[str, Any] = {"attention_mask": self._device.tensor(mask_BL), "return_dict": True}
        if self._has_text_types:
            arguments["token_type_ids"] = self._device.tensor(types_BL)
        outputs = self._model(input_ids=self._device.tensor(token_ids_BL), **arguments)
        return self._read(outputs, lengths)


class EncoderPrompts:
    """PromptRunner of whole prompts."""

    def __init__(self, encoder: EncoderModel, cut: Callable[[Tensor, int | None], Tensor]) -> None:
        self._encoder = encoder
        self.cut = cut

    def copy_blocks(self, plan: SchedulerOutput) -> dict[BlockId, str]:  # noqa: ARG002 - PromptRunner's
        """Copy nothing: blocks are empty, and a sequence that is swapped in has lost nothing."""
        return {}

    def run(
        self, plan: SchedulerOutput, table: PromptTable, failures: dict[SequenceId, str]
    ) -> PooledPrompts:
        sequence_ids, prompts = [], []
        for share in plan.scheduled:
            row = table.rows.row_of(share.sequence_id)
            if row is None:
                failures.setdefault(share.sequence_id, "scheduled, but the worker does not know it")
            elif (share.start, share.num_tokens) != (0, table.rows.num_tokens_C[row]):
                failures.setdefault(share.sequence_id, "an encoder computes whole prompts only")
            else:
                token_ids = table.rows.token_ids_CL[row, : share.num_tokens]
                sequence_ids.append(share.sequence_id)
                prompts.append(Prompt(token_ids, table.params[share.sequence_id].second_text_start))
        if not prompts:
            return NOTHING_POOLED
        return PooledPrompts(sequence_ids, self._encoder.run(prompts))


def read_hidden_states(pooler: Pooler) -> Read:
    """Pool the outputs of a model without a head."""

    def read(outputs: Any, lengths: list[int]) -> Tensor:
        hidden_BLH = outputs.last_hidden_state
        longest = hidden_BLH.shape[1]
        spans = [TokenSpan(row * longest, row * longest + length) for row, length in enumerate(lengths)]
        return pooler.pool(hidden_BLH.flatten(0, 1), spans)

    return read


def read_logits(scores: Scores) -> Read:
    """Take the scores of a model with a classification head."""
    return lambda outputs, _: scores.score(outputs.logits)


def cut_by_length(lengths: list[int]) -> list[list[int]]:
    """Cut indices into batches, longest first, so that little of each is padding."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    batches: list[list[int]] = []
    for index in order:
        if batches and lengths[index] >= _SHORTEST_SHARE * lengths[batches[-1][0]]:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def check_padding(encoder: EncoderModel, dtype: torch.dtype, *, vocab_size: int, max_len: int) -> None:
    """Try two short prompts alone and together. Raises FamilyRefused if the vectors differ."""
    longer = min(8, max_len)
    shorter = max(1, longer - 2)
    random = np.random.default_rng(_SEED)
    prompts = [Prompt(random.integers(0, vocab_size, length, dtype=np.int32)) for length in (longer, shorter)]
    together_NE = encoder.run(prompts)
    alone_NE = torch.cat([encoder.run([prompt]) for prompt in prompts])
    if not bool(torch.isfinite(alone_NE).all()):
        return  # random or damaged weights: requests will fail one by one, and say so
    error = float((together_NE - alone_NE).norm() / alone_NE.norm().clamp_min(1e-9))
    if not error <= _TOLERANCE[dtype]:
        raise FamilyRefused(
            f"the model's vectors change with what it is batched with (error {error:.2g} of their size)"
        )

"""One step as the device sees it: tensors at fixed addresses, so that a captured graph finds them again.

A step may be padded to the sizes of a captured graph. Tokens behind the last have slot -1 and write nothing;
sequences behind the last have no tokens and a length of 0, and get no attention.

Shapes: T tokens, R sequences (decodes first), S stripes, C lines of a table, B blocks of the longest
line, X = S * R, N logits wanted, F blocks of a sequence's state, with padding.
"""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from scheduler.cache_groups import Lifetime
from worker.attention.interface import SeenPictures
from worker.devices.device import Device
from worker.states.interface import StateStep
from worker.steps.tokens import StepTokens


class AttentionBatch(NamedTuple):
    """The inputs of attention. Counts on the host are fixed for a captured graph; bounds may be too high."""

    num_decodes: int
    """The count of sequences, from the first on, that have one query token each or are padding. 0 if the host
    does not know: any may have several then."""
    max_query_len: int
    """No sequence has more tokens in this step."""
    max_seq_len: int
    """No sequence is longer after this step."""
    query_starts_R: Tensor
    """[R + 1] int32: the tokens of sequence r are query_starts[r] to query_starts[r + 1]."""
    seq_lens_R: Tensor
    """[R] int32, after this step."""
    block_tables_SCB: Tensor
    """[S, C, B] int32, a table for each stripe of layers (kv_cache.py); lines have a fixed stride, the last
    dimension has none. Entries behind a sequence's last block, or before its window, must not be read."""
    slots_ST: Tensor
    """[S, T] int64: block * block_size + offset, where each token's key and value go; -1 writes nothing."""
    table_rows_R: Tensor | None = None
    """[R] int32: the line of each sequence in the tables; None where sequence r has line r."""
    state_blocks_RF: Tensor | None = None
    """int32: the blocks of each sequence's state; None where no layer is recurrent."""
    pictures: SeenPictures | None = None
    """Pictures that are seen whole, on the host; None: no token sees a later one."""
    picture_ends_T: Tensor | None = None
    """int32: their ends, where there are any."""
    cut_states: StateStep | None = None
    """Form on the host of a step whose shares recurrent layers compute in parts (states_in_waves.py)."""

    def with_pictures(self, pictures: SeenPictures | None, device: Device) -> "AttentionBatch":
        """Bring the ends of pictures that are seen whole to the device."""
        if pictures is None:
            return self
        ends_T = device.tensor(pictures.ends_T.astype(np.int32))
        return self._replace(pictures=pictures, picture_ends_T=ends_T)

    def ends_seen(self, lifetime: Lifetime) -> Tensor | None:
        """Return where each token [T] ends to see later ones in such layers; None where none sees any."""
        return self.picture_ends_T if self.pictures is not None and self.pictures.are_seen(lifetime) else None

    @property
    def num_sequences(self) -> int:
        return self.seq_lens_R.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.slots_ST.shape[1]


class TableChanges(NamedTuple):
    """Blocks that were appended to the tables of the step's sequences since they were in a step before."""

    lines_X: Tensor
    """[X] int32: the lines of each sequence, one in each stripe's table, counted over all tables."""
    firsts_X: Tensor
    """[X] int32: the first place that changed."""
    starts_X: Tensor
    """[X + 1] int32: the blocks of line x are starts[x] to starts[x + 1] of `blocks`."""
    blocks: Tensor
    """int32, flat."""


class DeviceBatch(NamedTuple):
    """All inputs of one step."""

    attention: AttentionBatch
    tokens: StepTokens
    """An id of -1 stands for a token that the host does not know yet: the last one sampled for its row.
    Padding has position 0, and wants logits of token 0."""
    rows_T: Tensor
    """int32: the row of each token, for adapters, and where its id is -1; padding has the row of no
    sequence."""
    rows_N: Tensor
    """int32: the rows that sample a token; padding has the row of no sequence, max_num_seqs."""
    draws_NF: Tensor
    """float64: the parameters of sampling (draw_fields.py); padding has line -1."""
    changes: TableChanges
    """To be brought into the tables of `attention` before it reads them."""

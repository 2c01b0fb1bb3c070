"""Examples grouped by length into padded batches of a fixed token budget.

Owns: the order in which documents are seen. The same seed gives the same batches.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random

import torch
from documents import Document
from tokenizer import IGNORED_LABEL, Encoder, Example
from torch import Tensor

_POOL = 1536
"""Documents sorted together; more means less padding and longer gaps between kinds."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded ids and labels, int64 [rows, longest]."""

    token_ids_BT: Tensor
    labels_BT: Tensor
    num_tokens: int
    """Without padding."""


def sorted_batches(
    encoder: Encoder, source: Iterator[Document], *, seed: int, budget: int
) -> Iterator[Batch]:
    """Batches of at most `budget` places, padding included; documents of like length side by side."""
    rng = Random(seed)
    while True:
        pool = sorted(_encoded(encoder, source, _POOL), key=lambda example: len(example.token_ids))
        grouped = list(_grouped(pool, budget))
        rng.shuffle(grouped)
        for group in grouped:
            yield _padded(group, encoder.pad_id)


def cut_batches(
    encoder: Encoder, source: Iterator[Document], *, budget: int, max_length: int
) -> Iterator[Batch]:
    """Batches of long documents, cut at `max_length` tokens, for the far end of the context."""
    while True:
        pool = [
            _cut(example, max_length) for example in _encoded(encoder, source, max(1, budget // max_length))
        ]
        yield _padded(pool, encoder.pad_id)


def _encoded(encoder: Encoder, source: Iterator[Document], count: int) -> list[Example]:
    return [encoder.encode(document) for document in islice(source, count)]


def _cut(example: Example, length: int) -> Example:
    return Example(example.token_ids[:length], example.labels[:length])


def _grouped(pool: list[Example], budget: int) -> Iterator[list[Example]]:
    group: list[Example] = []
    for example in pool:
        if group and len(example.token_ids) * (len(group) + 1) > budget:
            yield group
            group = []
        group.append(example)
    yield group


def _padded(group: list[Example], pad_id: int) -> Batch:
    longest = max(len(example.token_ids) for example in group)
    ids = [example.token_ids + [pad_id] * (longest - len(example.token_ids)) for example in group]
    labels = [example.labels + [IGNORED_LABEL] * (longest - len(example.labels)) for example in group]
    return Batch(torch.tensor(ids), torch.tensor(labels), sum(len(example.token_ids) for example in group))

"""Candidates of the tuner: for each kernel the choice that serves, and some around it.

Owns: the grids. They are small: each line of them is compiled, once for each shape.
Never: choices that change what a kernel computes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeVar

import torch

from campaigns.gpu.shapes import SHAPES, Shape
from campaigns.gpu.tune.workloads import AttentionInputs, Load, rows
from worker.gpu.kernels.activation import BLOCK, multiply_by_gates
from worker.gpu.kernels.attention_decode import DecodeChoices, attend_decodes, decode_choices
from worker.gpu.kernels.attention_prefill import attend_prefills, prefill_tiles
from worker.gpu.kernels.attention_tiles import AttentionTiles, head_groups
from worker.gpu.kernels.norm import norm, warps_for_row
from worker.model.layer_parts import GateActivation, RmsNorm

Work = Callable[[], object]
Choice = TypeVar("Choice")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One choice."""

    name: str
    serves: bool
    calls: list[Work]
    """One for each layer."""


@dataclass(kw_only=True)
class Question:
    """One kernel with one load, and what there is to choose from."""

    kernel: str
    load: str
    make: Callable[[], list[Candidate]]

    @cached_property
    def candidates(self) -> list[Candidate]:
        """Made when they are asked for: together their inputs would not fit."""
        return self.make()


def questions(device: torch.device, *, shape_names: Sequence[str], is_smoke: bool) -> Iterator[Question]:
    dtype = torch.float32 if is_smoke else torch.bfloat16
    decodes = (
        [Load(2, 9, 1)]
        if is_smoke
        else [Load(1, 1024, 1), Load(64, 1024, 1), Load(256, 1024, 1), Load(8, 8192, 1)]
    )
    prefills = [Load(1, 9, 9)] if is_smoke else [Load(1, 2048, 2048), Load(4, 4096, 512)]
    counts = (2,) if is_smoke else (1, 64, 2048)
    for name in shape_names:
        shape = SHAPES[name]
        for load in decodes:
            make = partial(_decodes, shape, load, device, dtype)
            yield Question(kernel="decode attention", load=f"{name}, {load}", make=make)
        for load in prefills:
            make = partial(_prefills, shape, load, device, dtype)
            yield Question(kernel="prefill attention", load=f"{name}, {load}", make=make)
        for count in counts:
            make = partial(_norms, shape, count, device, dtype)
            yield Question(kernel="norm", load=f"{name}, {count} tokens", make=make)
            make = partial(_gates, shape, count, device, dtype)
            yield Question(kernel="gate", load=f"{name}, {count} tokens", make=make)


def _decodes(shape: Shape, load: Load, device: torch.device, dtype: torch.dtype) -> list[Candidate]:
    inputs = AttentionInputs(shape, load, device, dtype)
    serving = decode_choices(head_groups(inputs.queries_THD, inputs.layers[0]), dtype)
    tiles, per_processor = serving
    choices = [serving]
    for num_keys, num_warps, num_stages in (
        *((32, 4, 5), (64, 4, 3), (64, 4, 4), (64, 4, 5), (64, 8, 4)),
        *((128, 4, 2), (128, 4, 3), (128, 8, 3)),
    ):
        other = tiles._replace(num_keys=num_keys, num_warps=num_warps, num_stages=num_stages)
        choices.append(DecodeChoices(other, per_processor))
    for num_programs in (1, 3, 4):
        choices.append(DecodeChoices(tiles, num_programs))

    def attend(choice: DecodeChoices) -> list[Work]:
        return [
            partial(
                attend_decodes,
                inputs.queries_THD,
                layer,
                inputs.work,
                inputs.options,
                inputs.out_THD,
                choice,
            )
            for layer in inputs.layers
        ]

    return [
        Candidate(name=_name_of(*choice), serves=choice == serving, calls=attend(choice))
        for choice in _distinct(choices)
    ]


def _prefills(shape: Shape, load: Load, device: torch.device, dtype: torch.dtype) -> list[Candidate]:
    inputs = AttentionInputs(shape, load, device, dtype)
    serving = prefill_tiles(head_groups(inputs.queries_THD, inputs.layers[0]), dtype)
    choices = [serving]
    for num_rows, num_keys, num_warps, num_stages in (
        *((64, 64, 4, 3), (64, 64, 4, 5), (64, 128, 4, 3), (128, 32, 4, 4), (128, 64, 4, 3)),
        *((128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 5), (128, 128, 8, 2), (128, 128, 8, 3)),
    ):
        choices.append(AttentionTiles(num_rows, num_keys, num_warps, num_stages))

    def attend(tiles: AttentionTiles) -> list[Work]:
        return [
            partial(
                attend_prefills,
                inputs.queries_THD,
                layer,
                inputs.work,
                inputs.options,
                inputs.out_THD,
                tiles,
            )
            for layer in inputs.layers
        ]

    return [
        Candidate(name=_name_of(tiles), serves=tiles == serving, calls=attend(tiles))
        for tiles in _distinct(choices)
    ]


def _norms(shape: Shape, count: int, device: torch.device, dtype: torch.dtype) -> list[Candidate]:
    width = shape.hidden_size
    hidden = rows(count, width, device, dtype)
    by = RmsNorm(torch.ones(width, device=device), shape.rms_norm_eps)
    serving = warps_for_row(1 << (width - 1).bit_length())
    return [
        Candidate(
            name=f"{num_warps} warps",
            serves=num_warps == serving,
            calls=[partial(norm, each, by, num_warps) for each in hidden],
        )
        for num_warps in _distinct([serving, 1, 2, 4, 8, 16])
    ]


def _gates(shape: Shape, count: int, device: torch.device, dtype: torch.dtype) -> list[Candidate]:
    merged = rows(count, 2 * shape.intermediate_size, device, dtype)
    return [
        Candidate(
            name=f"blocks of {block}",
            serves=block == BLOCK,
            calls=[partial(multiply_by_gates, each, GateActivation.SILU, block) for each in merged],
        )
        for block in _distinct([BLOCK, 256, 512, 1024, 2048, 4096])
    ]


def _distinct(choices: Sequence[Choice]) -> list[Choice]:
    return list(dict.fromkeys(choices))


def _name_of(tiles: AttentionTiles, per_processor: int | None = None) -> str:
    told = f"{tiles.num_rows}x{tiles.num_keys}, {tiles.num_warps} warps, {tiles.num_stages} stages"
    return told if per_processor is None else f"{told}, {per_processor} programs a processor"

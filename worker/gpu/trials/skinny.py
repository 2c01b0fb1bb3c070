"""Products of a layer with what stands before and behind them: a norm, gates, the addition to the residual.

Owns: the choice, for each kind of product and each small number of rows, between cuBLAS with kernels around
it and one kernel of ours that does all of it. At load each kind is computed both ways, and timed on the
device over the weights of all layers; ours is taken where it computes the same and is faster.

Shapes: T tokens, N outputs, K inputs.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor
from triton import TritonError

from worker.devices.device import Device
from worker.devices.trial import ROUNDING, TimedTrial, first_line, relative_error
from worker.gpu.kernels.activation import multiply_by_gates
from worker.gpu.kernels.norm import norm
from worker.gpu.kernels.skinny_products import (
    MOST_ROWS,
    Folds,
    SkinnyTiles,
    choose_skinny_tiles,
    multiply_skinny,
)
from worker.gpu.products import Product, product_of
from worker.gpu.quantized.products import without_codes
from worker.model.layer_parts import GateActivation
from worker.model.linear import Linear, PlainWeight

log = logging.getLogger(__name__)

_SIZES = (1, 4, MOST_ROWS)
"""Rows of a trial; numbers in between are as the next one."""
_LEAST_GAIN = 1.02
_MOST_TIMED_LAYERS = 64
_SEED = 5


class _Skinny(NamedTuple):
    """The form in which our kernel takes a product."""

    tiles: SkinnyTiles
    arrivals: Tensor
    sizes: frozenset[int]
    """The sizes of a trial at which ours is taken."""


class FoldedProduct:
    """One product of a layer; by cuBLAS until a trial has chosen our kernel for some numbers of rows."""

    def __init__(self, linear: Linear, folds: Folds) -> None:
        self.linear, self._folds = without_codes(linear), folds
        self._product = product_of(linear)
        self._skinny: _Skinny | None = None
        self._is_wrapped = False

    @property
    def product(self) -> Product:
        """The product of the weight, or that around it."""
        return self._product

    @property
    def memory(self) -> Tensor | None:
        """The memory that the product reads whatever its rows are; None where it is not known."""
        if isinstance(self.linear.weight, PlainWeight) and self._product is self.linear:
            return self.linear.weight.numbers_NK
        return getattr(self._product, "memory", None)

    @property
    def is_added(self) -> bool:
        """Whether the product goes to the residual, and not to a tensor of its own."""
        return self._folds.is_added

    def multiply(self, x_TK: Tensor) -> Tensor:
        """Return [T, N], or [T, N / 2] behind gates, of rows that are not normed yet."""
        skinny = self._skinny
        if skinny is not None and _size_of(len(x_TK)) in skinny.sizes:
            return self._by_us(skinny, x_TK, None)
        return self._by_cublas(x_TK)

    def add_to(self, residual_TN: Tensor, x_TK: Tensor) -> None:
        """Add the product, times the multiplier, in place."""
        skinny = self._skinny
        if skinny is not None and _size_of(len(x_TK)) in skinny.sizes:
            self._by_us(skinny, x_TK, residual_TN)
        else:
            self._product.multiply_and_add(residual_TN, x_TK, self._folds.multiplier)

    @cached_property
    def kernel_folds(self) -> Folds:
        """Give the norm's weight in the rows' dtype, where that is exact: it takes half the instructions.

        The first time this waits for the device.
        """
        norm = self._folds.norm
        if norm is None:
            return self._folds
        weight_H = norm.weight_H.to(self._numbers_NK.dtype)
        is_exact = torch.equal(weight_H.float(), norm.weight_H)
        return self._folds._replace(norm=replace(norm, weight_H=weight_H)) if is_exact else self._folds

    def wrap(self, wrapper: Callable[[Product], Product]) -> None:
        """Compute by a product around the plain one, which is given normed rows: nothing is folded."""
        self._product, self._skinny, self._is_wrapped = wrapper(self._product), None, True

    def _by_us(self, skinny: _Skinny, x_TK: Tensor, out_TN: Tensor | None) -> Tensor:
        linear = self.linear
        assert isinstance(linear.weight, PlainWeight)
        return multiply_skinny(
            x_TK.contiguous(),
            linear.weight.numbers_NK,
            linear.bias_N,
            self.kernel_folds,
            skinny.tiles,
            out_TN=out_TN,
            arrivals=skinny.arrivals,
        )

    def _by_cublas(self, x_TK: Tensor) -> Tensor:
        if self._folds.norm is not None:
            x_TK = norm(x_TK, self._folds.norm)
        out_TN = self._product.multiply(x_TK)
        if self._folds.activation is GateActivation.NONE:
            return out_TN
        return multiply_by_gates(out_TN, self._folds.activation)

    def kind(self) -> Hashable | None:
        """Return a key of products that one trial speaks for; None where our kernel cannot take it."""
        linear, folds = self.linear, self._folds
        if self._is_wrapped or not isinstance(linear.weight, PlainWeight):
            return None
        if not linear.weight.numbers_NK.is_contiguous():
            return None
        # A row before its norm, times the norm's weight, may be too large for float16.
        if folds.norm is not None and linear.weight.numbers_NK.dtype == torch.float16:
            return None
        return (
            linear.weight.format,
            linear.weight.shape,
            linear.has_bias,
            folds._replace(norm=None),
            (folds.norm is not None),
        )

    def find_tiles(self, num_processors: int) -> SkinnyTiles:
        """Find the tiles of a product that our kernel can take."""
        return choose_skinny_tiles(self._numbers_NK, self._folds, num_processors)

    def take(self, skinny: _Skinny | None) -> None:
        """Set the sizes at which our kernel computes from now on; None: cuBLAS computes all."""
        self._skinny = skinny

    def run(self, x_TK: Tensor, residual_TN: Tensor) -> Tensor:
        """Compute as a layer does; an added product is added to `residual_TN`, which is returned then."""
        if not self.is_added:
            return self.multiply(x_TK)
        self.add_to(residual_TN, x_TK)
        return residual_TN

    def examples(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Make rows to multiply, and a residual to add to."""
        weight_NK, generator = self._numbers_NK, torch.Generator().manual_seed(_SEED)
        num_outputs, num_inputs = weight_NK.shape
        rows_TK = torch.randn((num_rows, num_inputs), generator=generator)
        residual_TN = torch.randn((num_rows, num_outputs), generator=generator)
        return rows_TK.to(weight_NK), residual_TN.to(weight_NK)

    def describe(self) -> str:
        """Name the product for a person."""
        named = (
            ("norm", self._folds.norm is not None),
            ("gates", self._folds.activation is not GateActivation.NONE),
            ("addition", self._folds.is_added),
        )
        folded = "".join(f" with its {name}" for name, is_there in named if is_there)
        return f"{' x '.join(map(str, self.linear.weight.shape))}{folded}"

    @property
    def _numbers_NK(self) -> Tensor:
        assert isinstance(self.linear.weight, PlainWeight)
        return self.linear.weight.numbers_NK


def _size_of(num_rows: int) -> int:
    return next((size for size in _SIZES if num_rows <= size), 0)


def choose_products(products: Iterable[FoldedProduct], device: Device) -> None:
    """Try our kernel for each kind of product, and take it where it is right and faster."""
    kinds: dict[Hashable, list[FoldedProduct]] = defaultdict(list)
    for product in products:
        kind = product.kind()
        if kind is not None:
            kinds[kind].append(product)
    for alike in kinds.values():
        try:
            _choose(alike, device)
        except (TritonError, RuntimeError) as error:  # a smaller device may not have room for it
            named = alike[0].describe()
            log.warning("our product of %s cannot be tried: %s; cuBLAS stays", named, first_line(error))


@torch.inference_mode()
def _choose(alike: list[FoldedProduct], device: Device) -> None:
    tiles = alike[0].find_tiles(device.num_processors)
    num_counters = alike[0].examples(1)[1].shape[1]  # more than there are tiles of outputs
    arrivals = device.zeros(num_counters, torch.int32)
    taken, words = set[int](), []
    for product in alike:
        _ = product.kernel_folds  # a graph must not wait for it, nor keep it
    for size in _SIZES:
        ours = _Skinny(tiles, arrivals, frozenset({size}))
        given = alike[0].examples(size)
        by_cublas, by_us = (
            [partial(_run_by, product, skinny, *given) for product in alike[:_MOST_TIMED_LAYERS]]
            for skinny in (None, ours)
        )
        find_fault = partial(_find_fault, alike[0], ours, size)
        outcome = TimedTrial(by_cublas, by_us, _LEAST_GAIN, find_fault).run(device)
        if outcome is None:
            return
        if outcome.fault:
            log.warning("our product of %s is %s: cuBLAS stays", alike[0].describe(), outcome.fault)
            break
        if outcome.is_faster:
            taken.add(size)
        words.append(f"{size}: {outcome.times}")
    else:
        for product in alike:
            product.take(_Skinny(tiles, arrivals, frozenset(taken)) if taken else None)
        log.info("product of %s, ours for cuBLAS by rows: %s", alike[0].describe(), ", ".join(words))


def _find_fault(product: FoldedProduct, ours: _Skinny, size: int) -> str:
    """Compare our kernel with cuBLAS and the kernels around it, on a residual that no timing has added to."""
    x_TK, residual_TN = product.examples(size)
    expected_TN, found_TN = (
        _run_by(product, skinny, x_TK, residual_TN.clone()).float() for skinny in (None, ours)
    )
    if product.is_added:
        expected_TN, found_TN = expected_TN - residual_TN.float(), found_TN - residual_TN.float()
    error = relative_error(found_TN, expected_TN)
    return "" if error <= ROUNDING[x_TK.dtype] else f"wrong by {error:.1e}"


def _run_by(product: FoldedProduct, skinny: _Skinny | None, x_TK: Tensor, residual_TN: Tensor) -> Tensor:
    product.take(skinny)
    try:
        return product.run(x_TK, residual_TN)
    finally:
        product.take(None)

"""Proof that the CPU's kernels multiply exactly, by a model's quantized weights as their formats define it.

Owns: one product of each kind of weight on random rows, and the refusal of one that differs; the trial of
instructions that are new to us.
Never: judges rounding that an option asks for: rows of int8 are tried with numbers that int8 has.

Shapes: T tokens, N outputs, K inputs.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from worker.cpu.native import DTYPES, WIDEST_VECTOR, Kernels, pack, pack_int8
from worker.cpu.packing.grouped_packing import WHOLE_RANGES, Inputs, find_hindrance, pack_grouped
from worker.cpu.products import inputs_of
from worker.devices.trial import relative_error
from worker.model.linear import Linear, PlainWeight
from worker.model.quantization import Int8Weight, Rounding
from worker.model.quantized_layers import find_kinds
from worker.quantized.grouped_weight import GroupedWeight
from worker.worker_errors import StartupError

_NUM_TOKENS, _NUM_OUTPUTS = 13, 64
"""More rows than are multiplied without being brought together: both ways are tried."""
_SEED, _EXAMPLE_INPUTS = 13, 256
_TOLERANCE = 1e-4
"""Error over size of the sums, which are float32 in another order."""
_HIGHEST_BYTE = 127
_TRIED_ROWS, _TRIED_OUTPUTS, _TRIED_INPUTS = 37, 160, 176
"""No multiples of what instructions take at once."""


def multiplies_exactly(kernels: Kernels, other: Kernels) -> bool:
    """Try bf16 and int8: true if rows alone give the same as among others, and int8 the sums of `other`."""
    generator = torch.Generator().manual_seed(_SEED)
    x_TK = torch.randn((_TRIED_ROWS, _TRIED_INPUTS), generator=generator).bfloat16()
    numbers_NK = torch.randn((_TRIED_OUTPUTS, _TRIED_INPUTS), generator=generator).bfloat16()
    codes_NK = (numbers_NK * 40).clamp(-_HIGHEST_BYTE, _HIGHEST_BYTE).to(torch.int8)
    plain, whole = pack(numbers_NK), pack_int8(codes_NK, torch.ones(_TRIED_OUTPUTS))
    found_TN = kernels.multiply_to_float(x_TK, plain)
    alone_TN = torch.cat([kernels.multiply_to_float(row_K[None], plain) for row_K in x_TK])
    expected_TN = x_TK.double() @ numbers_NK.double().T
    is_right = relative_error(found_TN, expected_TN) <= _TOLERANCE
    sums_TN, expected_sums_TN = (each.multiply_to_float(x_TK, whole) for each in (kernels, other))
    return is_right and torch.equal(found_TN, alone_TN) and torch.equal(sums_TN, expected_sums_TN)


def prove_products(
    model: nn.Module, kernels: Kernels, rounding: Rounding, *, must_round_inputs: bool
) -> None:
    """Try each kind of weight, and the one that an option makes. Raises StartupError.

    Its text names a module, or the option. Kinds that the kernels do not take are left out: torch multiplies
    by them (quantized_layers.py).
    """
    inputs, kinds = inputs_of(rounding), find_kinds(model)
    has_codes = bool(kinds)
    if rounding.layers is not None:
        plain = Linear.of(PlainWeight(torch.randn(WIDEST_VECTOR, _EXAMPLE_INPUTS)))
        example = rounding.layers.quantize(plain).weight
        if isinstance(example, GroupedWeight) and not isinstance(example, Int8Weight):
            option = f"--quantization {rounding.layers.word}"
            prove_product(option, example, kernels, inputs)
            has_codes = True
    for name, weight in kinds.values():
        if find_hindrance(weight) is None:
            prove_product(name, weight, kernels, inputs)
    if must_round_inputs and inputs is Inputs.INT8 and not has_codes:
        raise StartupError(
            "--activations int8 has no effect on weights that are not codes in groups",
            fix="leave it out, or add --quantization int4",
        )


def prove_product(name: str, weight: GroupedWeight, kernels: Kernels, inputs: Inputs) -> None:
    """Try one weight. Raises StartupError with the name."""
    hindrance = find_hindrance(weight, inputs=inputs)
    if hindrance is not None:
        raise StartupError(
            f"--activations {inputs.value} does not go with {name}: {hindrance}", fix="leave it out"
        )
    for some in _in_every_form(weight.outputs(slice(_NUM_OUTPUTS))):
        numbers_NK = some.dequantized().double()
        for dtype in DTYPES:
            x_TK = _random_rows(some.num_inputs, inputs).to(dtype)
            found_TN = kernels.multiply_to_float(x_TK, pack_grouped(some, inputs=inputs)).double()
            expected_TN = x_TK.double() @ numbers_NK.T
            error = relative_error(found_TN, expected_TN)
            if error > _TOLERANCE:
                raise StartupError(
                    f"the kernels do not multiply exactly by {name} ({weight.kind}, error {error:.1e})",
                    fix="start with --cpu-kernels off, and report it",
                )


def _in_every_form(weight: GroupedWeight) -> Iterator[GroupedWeight]:
    """Yield the weight; of int8 one in each form that weights of its kind are packed in, by their range."""
    if weight.codes.dtype is not torch.int8:
        yield weight
        return
    for lowest, highest in WHOLE_RANGES:
        codes = weight.codes.clamp(lowest, highest)
        codes[0, 0], codes[0, -1] = lowest, highest
        yield replace(weight, codes=codes)


def _random_rows(num_inputs: int, inputs: Inputs) -> Tensor:
    generator = torch.Generator().manual_seed(_SEED)
    if inputs is Inputs.AS_THEY_ARE:
        return torch.randn((_NUM_TOKENS, num_inputs), generator=generator)
    whole_TK = torch.randint(
        -_HIGHEST_BYTE, _HIGHEST_BYTE + 1, (_NUM_TOKENS, num_inputs), generator=generator
    )
    whole_TK[:, 0] = _HIGHEST_BYTE  # the scale of each row is 1
    return whole_TK.float()

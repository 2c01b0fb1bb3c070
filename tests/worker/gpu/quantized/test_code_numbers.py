"""Instructions by which a GPU decodes, followed one by one for every word of codes."""

import re

import numpy as np
import pytest
import torch

from worker.gpu.quantized.kernels import numbers as code_numbers
from worker.quantized.grouped_weight import E2M1_TABLE, SIGNED_TABLE, UNSIGNED_TABLE

WORDS = np.arange(1 << 16, dtype=np.uint64)
NIBBLES = np.stack([WORDS >> shift & 15 for shift in (0, 4, 8, 12)])
BYTES = torch.from_numpy(np.stack([WORDS & 255, WORDS >> 8]).astype(np.uint8))
MEANT = {
    "FROM_ZERO": UNSIGNED_TABLE.numpy()[NIBBLES],
    "LESS_EIGHT": SIGNED_TABLE.numpy()[NIBBLES],
    "E2M1": E2M1_TABLE.numpy()[NIBBLES],
    "INT8": BYTES.view(torch.int8).float().numpy(),
    "E4M3": BYTES.view(torch.float8_e4m3fn).float().numpy(),
}
DTYPES = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}


def halves(register: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """The two numbers of a register: [2, words], in float64."""
    both = np.stack([register & 0xFFFF, register >> 16]).astype(np.uint16)
    return torch.from_numpy(both.view(np.int16)).view(dtype).double()


def computed(lines: str, registers: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Do what PTX says, in registers of 32 bits."""
    for line in lines.strip("{} ").split(";")[1:]:
        operation, *operands = re.split(r"[ ,]+", line.strip())
        if not operation:
            continue
        target, *sources = operands
        values = [registers[each] if each in registers else np.uint64(int(each, 0)) for each in sources]
        match operation.split("."):
            case ["mov", _]:
                result = np.broadcast_to(values[0], WORDS.shape)
            case ["shl", _]:
                result = values[0] << values[1] & np.uint64(0xFFFFFFFF)
            case ["shr", _]:
                result = values[0] >> values[1]
            case ["and", _]:
                result = values[0] & values[1]
            case ["lop3", _]:
                result = looked_up(*values)
            case ["fma", "rn", kind]:
                result = multiplied_and_added(values, DTYPES[kind])
            case _:
                raise AssertionError(line)
        registers[target] = result
    return registers


def looked_up(one, other, third, table) -> np.ndarray:
    result = np.zeros_like(WORDS)
    for place in range(8):
        if int(table) >> place & 1:
            parts = [each if place & bit else ~each for each, bit in ((one, 4), (other, 2), (third, 1))]
            result |= parts[0] & parts[1] & parts[2]
    return result & np.uint64(0xFFFFFFFF)


def multiplied_and_added(values: list, dtype: torch.dtype) -> np.ndarray:
    factor, other, summand = (halves(np.broadcast_to(each, WORDS.shape), dtype) for each in values)
    exact = factor * other + summand
    rounded = exact.to(dtype)
    # Where nothing is rounded, it does not matter how a device would round.
    assert torch.equal(rounded.double(), exact)
    low, high = rounded.view(torch.int16).numpy().view(np.uint16).astype(np.uint64)
    return low | high << np.uint64(16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", MEANT)
def test_every_word_of_codes_becomes_what_its_codes_mean_beside_any_other(kind, dtype):
    name = f"_{kind}_{'BFLOAT16' if dtype is torch.bfloat16 else 'FLOAT16'}"
    lines = getattr(code_numbers, name).value
    meant = MEANT[kind]
    for neighbours in (WORDS, np.zeros_like(WORDS), np.full_like(WORDS, 0xFFFF) ^ WORDS * 7 & 0xFFFF):
        if kind == "E4M3":  # a neighbour's code must not be none of a number either
            neighbours = np.where(np.isfinite(meant).all(0)[neighbours], neighbours, np.uint64(0))
        words = np.where(np.isfinite(meant).all(0), WORDS, np.uint64(0))
        registers = computed(lines, {f"${len(meant)}": words | neighbours << np.uint64(16)})
        for place, numbers in enumerate(meant):
            low, high = halves(registers[f"${place}"], dtype).numpy()
            assert np.array_equal(low, numbers[words])
            assert np.array_equal(high, numbers[neighbours])

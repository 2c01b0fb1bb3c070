"""One of two ways to multiply bf16 is chosen at load, by a measurement or by name."""

import logging
import re

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.worker.conftest import load_worker
from worker.cpu import arithmetic as cpu_arithmetic
from worker.cpu import native
from worker.cpu.arithmetic import DOT, EXPANDED, WITHOUT_BYTES, choose_kernels
from worker.cpu.native import Kernels, pack
from worker.worker_errors import StartupError


@pytest.mark.parametrize(
    ("times_s", "chosen"), [((1.0, 2.0), DOT), ((1.05, 1.0), DOT), ((1.3, 1.0), EXPANDED)]
)
def test_the_second_way_must_be_clearly_faster(built, monkeypatch, caplog, times_s, chosen):
    monkeypatch.setattr(cpu_arithmetic, "_measure", lambda *_: times_s)
    with caplog.at_level(logging.INFO):
        assert choose_kernels(built, 1).instruction_set == chosen
    assert f"bf16 products by {chosen}" in caplog.text


def test_the_measurement_times_both_ways(built):
    times_s = cpu_arithmetic._measure(Kernels(built, 1, DOT), Kernels(built, 1, EXPANDED))
    assert all(0 < each < 60 for each in times_s)


def test_no_field_of_a_struct_stands_behind_its_functions():
    """It would not be read, and the kernels would look behind the memory that Python gives."""
    structs = re.findall(r"^struct (\w+) \{\n(.*?)^\};", "".join(native._HEADERS), re.MULTILINE | re.DOTALL)
    assert {name for name, _ in structs} == native._STRUCTS.keys()
    for name, whole in structs:
        rest = whole.removeprefix(native._STRUCTS[name])
        assert not [line for line in rest.splitlines() if native._FIELD.match(line)], name


def test_inputs_that_fill_no_whole_vector_reach_no_kernel(built):
    weight = pack(torch.zeros((32, 600)).bfloat16())
    with pytest.raises(AssertionError, match="other memory would be read"):
        Kernels(built, 1).multiply_to_float(torch.zeros((1, 600)).bfloat16(), weight)


def test_both_ways_sum_the_same_products(built):
    generator = torch.Generator().manual_seed(2)
    weight = pack(torch.randn((70, 608), generator=generator).bfloat16())
    x = torch.randn((29, 608), generator=generator).bfloat16()
    one, other = (Kernels(built, 1, name).multiply_to_float(x, weight) for name in (DOT, EXPANDED))
    assert not torch.equal(one, other)  # in another order
    assert (one - other).abs().max() < 1e-5 * one.abs().max()


@pytest.mark.night
@pytest.mark.parametrize("first", ["avx-vnni", "avx512-vnni"])
def test_a_set_that_was_written_without_its_processor_is_taken_if_it_is_exact(
    open_kernels, any_library, monkeypatch, caplog, first
):
    class Opened:
        """Kernels of a processor whose first set it is."""

        def __new__(cls, _library, num_threads, name=first):
            return open_kernels(name, num_threads)

    monkeypatch.setattr(cpu_arithmetic, "Kernels", Opened)
    assert choose_kernels(any_library, 1).instruction_set == first
    monkeypatch.setattr(cpu_arithmetic, "multiplies_exactly", lambda *_: False)
    assert choose_kernels(any_library, 1).instruction_set == WITHOUT_BYTES
    assert f"{first} is not taken: its products are not exact" in caplog.text


@pytest.mark.parametrize("name", [DOT, EXPANDED, "plain"])
def test_a_named_way_is_taken_and_said(built, tmp_path, caplog, name):
    folder = make_checkpoint("llama", tmp_path / "llama")
    with caplog.at_level(logging.INFO):
        load_worker(folder, cpu_kernels=name, dtype="bfloat16")
    assert f"{name} kernels: 3 of 3 layers fused" in caplog.text
    assert "bf16 products by" not in caplog.text


def test_a_way_that_this_processor_lacks_is_refused(built, tmp_path):
    folder = make_checkpoint("llama", tmp_path / "llama")
    with pytest.raises(StartupError, match="--cpu-kernels neon: this processor, or its system, has no neon"):
        load_worker(folder, cpu_kernels="neon", dtype="bfloat16")

"""Kernels that are launched before the one before them has ended: they wait first, and a trial decides."""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.worker.gpu.cross_compile import Compiled, Kernel, compile_kernels
from tests.worker.gpu.interpreted_gpu import InterpretedGpu
from tests.worker.gpu.quantized.test_code_compiled import launch_of
from tests.worker.gpu.state_kernels.test_states_compiled import launches_of as launches_of_states
from tests.worker.gpu.test_attention_compiled import LAYERS, launches_of
from tests.worker.gpu.test_layers_kernels import FOR_HOPPER as OF_LAYERS
from tests.worker.gpu.test_skinny_products import FOR_HOPPER as OF_PRODUCTS
from worker import gpu
from worker.devices.dependent_launch import (
    dependent_launches,
    launch_way,
    reading_next,
    warm_launches,
    warm_way,
)
from worker.gpu.kernels.norm import norm
from worker.gpu.trials.launch_trial import EARLY as EARLY_WAY
from worker.gpu.trials.launch_trial import WHOLE, StepOnTrial, count_gains
from worker.model.layer_parts import RmsNorm
from worker.worker_config import WorkerConfig

OF_STATES = launches_of_states("qwen3_5")
EARLY = {
    "_norm_kernel": OF_LAYERS["addition and norms"],
    "_gate_kernel": OF_LAYERS["gates"],
    "_rotate_and_write_kernel": OF_LAYERS["norms and rotation"],
    "skinny_kernel": OF_PRODUCTS["addition of parts"],
    "decode_kernel": launches_of(LAYERS["128"])["decode_kernel"],
    "multiply_codes_kernel": launch_of("signed", 32, 1),
    "recur_kernel": OF_STATES["recur_kernel of [1, 1]"],
    "convolve_kernel": OF_STATES["convolve_kernel of [1, 1]"],
}


def launched_early(kernel: Kernel) -> Kernel:
    return replace(kernel, constants=kernel.constants | {"WAITS": True}, launch_pdl=True)


WARMING = ("_norm_kernel", "_rotate_and_write_kernel", "decode_kernel")


def warming(kernel: Kernel) -> Kernel:
    given = {"warmed_ptr": "*bf16", "warmed_bytes": "i32"}
    constants = {name: value for name, value in kernel.constants.items() if name not in given}
    warm = replace(kernel, signature=kernel.signature | given, constants=constants | {"WARMERS": 64})
    return launched_early(warm)


@pytest.fixture(scope="module")
def compiled() -> dict[str, Compiled]:
    wanted = {name: launched_early(kernel) for name, kernel in EARLY.items()}
    wanted |= {f"warming {name}": warming(EARLY[name]) for name in WARMING}
    wanted["whole"] = OF_LAYERS["addition and norms"]
    return dict(zip(wanted, compile_kernels(list(wanted.values())), strict=True))


@pytest.mark.night
@pytest.mark.parametrize("name", EARLY)
def test_the_first_that_all_threads_do_is_to_wait_for_the_kernel_before(compiled, name):
    assert compiled[name].waits_first
    assert compiled[name].local_bytes == 0


@pytest.mark.night
@pytest.mark.parametrize("name", WARMING)
def test_kernels_that_bring_weights_into_the_cache_read_nothing_before_they_wait(compiled, name):
    """A prefetch may stand before the wait, of which the compiler may put one on each of several paths."""
    code, prefetch = compiled[f"warming {name}"], "cp.async.bulk.prefetch.L2.global"
    before = "\n".join(code.lines_before_waits())
    assert (prefetch in before) == (name != "decode_kernel")
    assert prefetch in code.ptx
    memory = r"\b(ld|st|atom|red|cp|ldmatrix|stmatrix|wgmma)\.(?!param)|\b(ret|exit|call)\b"
    assert not re.search(memory, before.replace(prefetch, ""))
    assert code.local_bytes == 0


@pytest.mark.night
def test_a_kernel_that_is_launched_whole_does_not_wait(compiled):
    assert not compiled["whole"].waits


def test_every_kernel_that_may_be_launched_early_was_compiled_here():
    """A wait in a branch, or behind a first read, would be the fault that no test of results shows."""
    launched, waiting = 0, set()
    for path in Path(str(gpu.__file__)).parent.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        launched += sum(ast.unparse(node) == "launch_way()" for node in ast.walk(tree))
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and "WAITS" in map(str, _parameters(function)):
                waiting.add(function.name)
    assert waiting == {*EARLY}
    assert launched == len(EARLY)


def _parameters(function: ast.FunctionDef) -> Iterator[str]:
    yield from (each.arg for each in function.args.args)


def test_programs_that_bring_weights_change_no_number():
    rows_TH, weight_NK = torch.randn(3, 8), torch.randn(16, 8)
    expected = norm(rows_TH, RmsNorm(torch.ones(8), 1e-5))
    with warm_launches(), reading_next(weight_NK):
        assert warm_way()["WARMERS"] > 0
        found = norm(rows_TH, RmsNorm(torch.ones(8), 1e-5))
    assert torch.equal(found, expected)
    assert warm_way()["WARMERS"] == 0


def test_only_weights_that_begin_at_a_line_are_brought_and_only_where_a_trial_took_it():
    memory = torch.empty(64, dtype=torch.bfloat16)
    with reading_next(memory):
        assert warm_way()["WARMERS"] == 0, "a launch as a whole"
        with dependent_launches():
            assert warm_way()["WARMERS"] == 0, "an early launch"
        with warm_launches():
            assert warm_way()["warmed_bytes"] == 128
            with reading_next(memory[1:]):
                assert warm_way()["WARMERS"] == 0
            with reading_next(None):
                assert warm_way()["WARMERS"] == 0


class Stopwatch(InterpretedGpu):
    """Runs what is timed, and tells first the time of whole launches, then that of early ones."""

    def __init__(self, *seconds: float | None) -> None:
        super().__init__(WorkerConfig(model_path=""))
        self._told = list(seconds)

    def seconds_of(self, work: Callable[[], None]) -> float | None:
        work()
        return self._told.pop(0)


class Step:
    """A norm, of which the result is a step's."""

    def __init__(self, change: Callable[[Tensor], None] = lambda result: None) -> None:
        self.rows_TH, self.result_TH = torch.empty(2, 8), torch.empty(2, 8)
        self.ways: list[bool] = []
        self._change = change

    def fill(self, content: int) -> None:
        self.rows_TH.copy_(torch.arange(16.0).view(2, 8) + content)

    def launch(self) -> None:
        self.ways.append(launch_way()["WAITS"])
        self.result_TH.copy_(norm(self.rows_TH, RmsNorm(torch.ones(8), 1e-5)))
        if self.ways[-1]:
            self._change(self.result_TH)

    def gains(self, device: InterpretedGpu, num_steps: int = 1) -> int:
        steps = [StepOnTrial(self.fill, self.launch, self.result_TH)] * num_steps
        return count_gains(steps, device, WHOLE, EARLY_WAY)


def test_early_launches_are_taken_where_they_are_right_and_faster(caplog):
    caplog.set_level("INFO")
    step = Step()
    assert step.gains(Stopwatch(2.0, 1.0))
    assert "a step of 2 rows with kernels launched early: 1000000.0 us for 2000000.0 us: taken" in caplog.text
    assert set(step.ways) == {False, True}
    assert launch_way() == {"WAITS": False}, "as before"


def test_early_launches_are_left_where_they_are_no_faster(caplog):
    caplog.set_level("INFO")
    assert not Step().gains(Stopwatch(1.0, 1.0))
    assert ": left" in caplog.text


def test_small_steps_are_launched_early_where_large_ones_are_no_faster():
    faster, equal = (2.0, 1.0), (1.0, 1.0)
    assert Step().gains(Stopwatch(*faster, *faster, *equal), num_steps=3) == 2
    # The trials end at the first that gains nothing.
    assert Step().gains(Stopwatch(*equal, *faster), num_steps=2) == 0


def test_nothing_is_launched_early_where_one_of_the_steps_is_wrong(caplog):
    def change(result: Tensor) -> None:
        result += 1

    right, wrong = Step(), Step(change)
    steps = [StepOnTrial(each.fill, each.launch, each.result_TH) for each in (right, wrong)]
    assert count_gains(steps[:1], Stopwatch(2.0, 1.0), WHOLE, EARLY_WAY) == 1
    assert count_gains(steps, Stopwatch(2.0, 1.0, 2.0), WHOLE, EARLY_WAY) == 0
    assert "compute otherwise for 2 rows" in caplog.text


def test_early_launches_that_compute_otherwise_by_one_bit_are_left(caplog):
    def change_one_bit(result: Tensor) -> None:
        result.view(torch.int32)[1, 3] ^= 1

    assert not Step(change_one_bit).gains(Stopwatch(2.0, 1.0))
    assert "compute otherwise for 2 rows" in caplog.text


def test_what_is_left_of_another_step_is_noticed(caplog):
    """A kernel that reads too early finds the numbers of the step before, which may be right elsewhere."""
    step = Step()
    before = torch.zeros(2, 8)

    def read_too_early(result: Tensor) -> None:
        now = result.clone()
        result.copy_(before)
        before.copy_(now)

    step._change = read_too_early
    assert not step.gains(Stopwatch(2.0, 1.0))
    assert "compute otherwise" in caplog.text


def test_nothing_is_tried_where_time_tells_nothing():
    step = Step()
    assert not step.gains(Stopwatch(None))
    assert step.ways == [False]


def test_a_device_without_early_launches_goes_on_without_them(caplog):
    caplog.set_level("INFO")

    def refuse(result: Tensor) -> None:
        raise RuntimeError("griddepcontrol requires sm_90")

    assert not Step(refuse).gains(Stopwatch(2.0, 1.0))
    assert "kernels are not launched early: griddepcontrol requires sm_90" in caplog.text


def test_the_way_ends_with_the_block_even_by_an_error():
    def fail() -> None:
        assert launch_way() == {"WAITS": True, "launch_pdl": True}
        raise ValueError("within")

    with pytest.raises(ValueError, match="within"), dependent_launches():
        fail()
    assert launch_way() == {"WAITS": False}

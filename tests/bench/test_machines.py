"""Step times of measured machines: true for steps that were not fitted, and the same in leaps."""

from pathlib import Path

import orjson
import pytest

from bench.simulate.command import main
from bench.simulate.fitting.machines import MACHINES, Machine

FEW = ("--num-requests", "20", "--request-rate", "5", "--prompt-len", "300", "--output-len", "40")


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_steps_that_were_not_fitted_are_off_by_a_tenth_at_most(machine: Machine) -> None:
    model = machine.step_time
    for num, seconds in machine.decodes[:2]:
        assert model.seconds(num, num, num * 1024) == pytest.approx(seconds)
    errors = dict(machine.errors())
    assert len(errors) >= 3
    assert all(abs(error) <= 0.1 for error in errors.values()), errors


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("context", [1, 1024])
def test_no_larger_batch_is_faster(machine: Machine, context: int) -> None:
    steps = [machine.step_time.seconds(num, num, num * context) for num in range(1, 257)]
    assert steps == sorted(steps)


def test_a_machine_has_the_same_memory_in_blocks_of_each_size(tmp_path: Path) -> None:
    machine, file = ("--machine", "h100-llama-3.1-8b"), tmp_path / "report.json"
    uses = []
    for size in (16, 64):
        assert main([*machine, *FEW, "--block-size", str(size), "--json", str(file)]) == 0
        uses.append(orjson.loads(file.read_bytes())["runs"][0]["mean_kv_use"])
    assert uses[1] == pytest.approx(uses[0], rel=0.15)


@pytest.mark.parametrize("num_decodes", [1, 64, 256])
def test_a_leap_knows_that_weights_are_read_meanwhile(num_decodes: int) -> None:
    model = MACHINES["h100-llama-3.1-8b"].step_time
    leap = list(model.decode_steps(num_decodes, 5000, 3))
    assert leap == pytest.approx(
        [model.seconds(num_decodes, num_decodes, 5000 + each * num_decodes) for each in range(3)]
    )


def test_a_machine_brings_its_blocks_and_says_how_true_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--machine", "h200-llama-3.1-8b-fp8", *FEW]) == 0
    shown = capsys.readouterr().out
    assert "H200" in shown
    assert "16 decodes -8%" in shown


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--machine", "h100-llama-3.1-8b", "--step-base-ms", "3"], "no --step option"),
        (["--machine", "h100-llama-3.1-8b", "--fit", "steps.jsonl"], "give one of them"),
        (["--machine", "h300"], "h100-llama-3.1-8b"),
    ],
)
def test_a_machine_beside_other_step_times_is_refused_in_a_line(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, *FEW]) == 2
    assert line in capsys.readouterr().err

"""`python -m campaigns.gpu`, tried out where there is no GPU."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from campaigns.gpu import catalogue, cli, kernels, shapes, steps, tokens, tokens_quantized
from campaigns.gpu.cli import Settings, main
from campaigns.gpu.driving import Drive, StepFailed, scheduler_config
from campaigns.gpu.kernels import kernel_test_files
from campaigns.gpu.results import Record, read_record
from campaigns.gpu.shapes import SHAPES, write_checkpoint
from scheduler.messages import ModelRunnerOutput, SchedulerOutput
from tests.fakes import FakeWorker, continuation
from worker.worker_config import ModelFacts

pytestmark = pytest.mark.night

ROOT = Path(__file__).resolve().parents[2]


class ClosableWorker(FakeWorker):
    def close(self) -> None:
        """Hold no resource: closing does nothing."""


def facts(**changes: Any) -> ModelFacts:
    settings: dict[str, Any] = {
        "model_type": "fake",
        "num_parameters": 1,
        "weight_bytes": 1,
        "dtype": "float32",
        "device": "fake",
        "vocab_size": 97,
        "max_model_len": 32,
        "block_size": 8,
        "num_blocks": 32,
        "num_host_blocks": 32,
        "copy_s_per_block": 1e-6,
        "kv_cache_bytes": 1,
        "runs_ahead": True,
        "eos_token_ids": (),
    }
    return ModelFacts(**{**settings, **changes})


def fake_worker(*_: Any, **__: Any) -> tuple[FakeWorker, ModelFacts]:
    return ClosableWorker(8), facts()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(out=tmp_path, is_smoke=True)


@pytest.mark.parametrize("depth", [1, 2])
def test_what_is_driven_without_an_engine_has_the_tokens_that_it_has_with_one(depth: int) -> None:
    drive = Drive(
        ClosableWorker(8),  # type: ignore[arg-type]
        scheduler_config(facts(), max_num_seqs=2, max_num_batched_tokens=16, max_plans_in_flight=depth),
    )
    for number in (1, 2, 3):
        drive.add([number, 5, 7], 6)
    drive.run()
    assert list(drive.tokens.values()) == [continuation([number, 5, 7], 6) for number in (1, 2, 3)]
    assert sum(step.num_tokens for step in drive.steps) == 3 * (3 + 5)
    assert [step.is_decode for step in drive.steps[:2]] == [False, True]


def test_a_sequence_that_fails_ends_the_measurement_and_says_why() -> None:
    class Failing(ClosableWorker):
        def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
            failures = {share.sequence_id: "logits are not finite" for share in plan.scheduled}
            return ModelRunnerOutput(token_ids={}, logprobs={}, failures=failures)

    drive = Drive(
        Failing(8),  # type: ignore[arg-type]
        scheduler_config(facts(), max_num_seqs=2, max_num_batched_tokens=16),
    )
    drive.add([1, 2], 3)
    with pytest.raises(StepFailed, match="not finite"):
        drive.run()


def test_all_ways_are_compared_and_scarce_memory_does_preempt(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "open_worker", fake_worker)
    tokens.run(Record(settings.out, "tokens"), settings)
    document = read_record(settings.out, "tokens")
    rows = {row[1]: row for row in document["tables"][0]["rows"]}
    assert len(rows) == 10
    assert rows["graphs, preempted, computed again"][4:] == ["1", "0"]
    assert rows["graphs, preempted, swapped"][4:] == ["1", "1"]
    assert document["figures"] == {"is_alike": True}


def test_a_way_that_draws_other_tokens_is_told_and_is_a_failure(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    class WrongInBatches(ClosableWorker):
        def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
            output = super().execute(plan)
            if len(plan.scheduled) == 1:
                return output
            drawn = {key: ((value[0] + 1) % 97,) for key, value in output.token_ids.items()}
            return ModelRunnerOutput(token_ids=drawn, logprobs={}, failures={})

    monkeypatch.setattr(tokens, "open_worker", lambda *_, **__: (WrongInBatches(8), facts()))
    record = Record(settings.out, "tokens")
    with pytest.raises(tokens.TokensDiffer):
        tokens.run(record, settings)
    assert read_record(settings.out, "tokens")["tables"][0]["rows"][0][2] != "3 of 3"


def test_tokens_by_codes_that_differ_from_those_of_the_plain_checkpoint_are_a_failure(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens_quantized, "_written", lambda *_: (Path("codes"), Path("plain")))
    monkeypatch.setattr(tokens_quantized, "compare", lambda *_, **__: True)
    drawn = {"codes": [[1, 2], [3]], "plain": [[1, 2], [3]]}
    monkeypatch.setattr(tokens_quantized, "_drawn", lambda folder, _: drawn[folder.name])
    tokens_quantized.run(Record(settings.out, "alike"), settings)
    assert read_record(settings.out, "alike")["figures"] == {"num_wrong": 0}
    drawn["codes"][1] = [4]
    with pytest.raises(tokens.TokensDiffer, match="gpt_oss mxfp4"):
        tokens_quantized.run(Record(settings.out, "other"), settings)


def test_steps_are_set_against_the_floor_of_the_device_that_was_measured(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "open_worker", fake_worker)
    device = Record(settings.out, "device")
    for name, value in (("copy_bytes_per_s", 1e6), ("matmul_flops", 1e9), ("device", "cpu")):
        device.figure(name, value)
    steps.run(Record(settings.out, "steps"), settings)
    decode, prefill, alone, long, *profiles = read_record(settings.out, "steps")["tables"]
    assert [(row[0], row[1]) for row in decode["rows"]] == [("1", "2"), ("1", "1"), ("2", "2")]
    shape = SHAPES["tiny"]
    layer = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48 + 2 * 32 + 2 * 16
    num_bytes = 2 * (shape.vocab_size * 32 + 32 + layer) + 12 * 2 * 16 * 2
    assert decode["rows"][0][3] == f"{num_bytes / 1e6 * 1e3:.2f} ms"
    assert len(prefill["rows"]) == 2
    assert [row[:2] for row in alone["rows"]] == [["16", "8"], ["16", "16"]]
    assert [row[:2] for row in long["rows"]] == [["1", "16"]]
    assert len(profiles) == 2


@pytest.mark.parametrize("name", ["tiny", "tiny-recurrent"])
def test_a_shape_is_a_checkpoint_that_transformers_reads_whole(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(name, tmp_path / name)
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    weight = model.model.layers[0].mlp.down_proj.weight.float()
    assert weight.std().item() == pytest.approx(SHAPES[name].scale, rel=0.1)
    assert torch.equal(model.model.norm.weight, torch.ones_like(model.model.norm.weight))


def test_the_shapes_of_the_goals_have_the_sizes_that_they_are_named_for() -> None:
    for name, billions in (("qwen3-0.6b", 0.596), ("llama-3.1-8b", 8.03), ("qwen3.5-4b", 4.21)):
        sizes = [size for _, size in shapes._tensors(SHAPES[name])]
        num = sum(math.prod(size) for size in sizes)
        assert num / 1e9 == pytest.approx(billions, rel=0.01)


def test_the_device_is_described_and_the_page_is_written(tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path), "--smoke", "--parts", "device"]) == 0
    figures = json.loads((tmp_path / "device.json").read_text())["figures"]
    assert figures["copy_bytes_per_s"] > 0
    assert figures["matmul_flops"] > 0
    assert "| bf16 product | 128 cubed |" in (tmp_path / "results.md").read_text()


def test_a_part_that_is_cut_off_leaves_what_it_has_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow.json").write_text(json.dumps({"notes": ["found so far"], "tables": []}))
    monkeypatch.setattr(cli, "_run", lambda part, options, limit_s: ("Ended by its limit of 1 s", True))
    slow = catalogue.Part(name="slow", title="Slow", module="", limit_s=1, needs=())
    options = SimpleNamespace(out=tmp_path, within=5.0, smoke=True, patience=1.0)
    assert cli._run_all([slow], options) == 1  # type: ignore[arg-type]
    page = (tmp_path / "results.md").read_text()
    assert "Ended by its limit of 1 s." in page
    assert "found so far" in page


def test_limits_of_parts_are_stretched_where_patience_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []
    monkeypatch.setattr(
        cli, "_run", lambda part, options, limit_s: (limits.append(limit_s), ("Done", False))[1]
    )
    part = catalogue.Part(name="slow", title="Slow", module="", limit_s=10, needs=())
    options = SimpleNamespace(out=tmp_path, within=100.0, smoke=False, patience=2.5)
    cli._run_all([part], options)  # type: ignore[arg-type]
    assert limits == [25.0]


def test_the_commands_of_the_page_ask_for_parts_that_exist_and_end_within_ten_minutes() -> None:
    page = (ROOT / "docs" / "benchmarks" / "gpu.md").read_text()
    commands = re.findall(r"--parts (\S+) --within (\d+)", page)
    assert len(commands) == 2
    for names, within in commands:
        assert set(names.split(",")) <= catalogue.BY_NAME.keys()
        assert sum(catalogue.BY_NAME[name].limit_s for name in names.split(",")) <= int(within) <= 570


def test_a_part_without_its_packages_is_skipped_by_their_names(tmp_path: Path) -> None:
    poor = catalogue.Part(name="poor", title="Poor", module="", limit_s=1, needs=("torch", "no_such_thing"))
    options = SimpleNamespace(out=tmp_path, within=5.0, smoke=True, patience=1.0)
    assert cli._run_all([poor], options) == 0  # type: ignore[arg-type]
    assert "Skipped: no_such_thing not installed." in (tmp_path / "results.md").read_text()


def test_a_part_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    part = catalogue.Part(name="unknown", title="Device", module="", limit_s=60, needs=())
    end, is_failed = cli._run(part, SimpleNamespace(out=tmp_path, smoke=True, scratch=tmp_path), 60)  # type: ignore[arg-type]
    assert is_failed
    assert "invalid choice: 'unknown'" in end


def test_a_part_that_does_not_exist_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path), "--parts", "nonsense"])
    assert "no part is called 'nonsense'" in capsys.readouterr().err


def test_the_kernels_tests_are_found_without_those_that_need_an_interpreter() -> None:
    names = {path.name for path in kernel_test_files(Settings(out=Path(), is_smoke=False))}
    assert "test_device_mirror.py" in names
    assert "test_graphs.py" not in names
    assert all((ROOT / "tests" / "worker" / "gpu" / name).exists() for name in names)
    assert any("kernels" in name for name in names)


def test_tests_that_still_run_are_told_as_far_as_they_are(settings: Settings) -> None:
    log = settings.out / "test_experts.log"
    log.write_text("a.py::b PASSED [ 10%]\na.py::c FAILED [ 20%]\na.py::d PASSED [ 30%]\na.py::e ")
    assert kernels._so_far(Path("test_experts.py"), settings) == ("test_experts.py", 2, 1, 0, "not done")

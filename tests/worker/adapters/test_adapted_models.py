"""Models with adapters against models into which the adapter was merged, and against themselves alone."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from scheduler.messages import SamplingParams, SequenceId
from tests.adapters import merge_adapter, write_adapter
from tests.checkpoints import make_checkpoint
from tests.families import Family
from tests.quantized_checkpoints import write_quantized
from tests.worker.conftest import BLOCK_SIZE, MakeCheckpoint, load_worker
from tests.worker.family_trial import tiny_config
from tests.worker.plan_driver import PlanDriver
from worker.checkpoint.gguf.folder import folder_of
from worker.worker import Worker
from worker.worker_config import AdapterFolder, AdapterLimits

pytestmark = pytest.mark.night

LIMITS = AdapterLimits(max_in_step=4, max_in_memory=4, max_rank=64)
SCORED = SamplingParams(temperature=0.0, num_logprobs=8)
PROMPT = [5, 9, 33, 17, 80, 41, 7, 66, 12, 101]
LAYERS_OF = {"phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
RECURRENCE = ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "in_proj_qkvz", "in_proj_ba", "out_proj"]


def scores(driver: PlanDriver, adapter: str, num_tokens: int = 4) -> list[dict[int, float]]:
    """Log-probabilities of the best tokens, step by step, of one prompt alone."""
    found = []
    sequence = driver.add(PROMPT, SCORED, adapter=adapter)
    for _ in range(num_tokens):
        output = driver.step({sequence: None})
        assert not output.failures
        (logprobs,) = output.logprobs.values()
        found.append(dict(logprobs[0].top))
    return found


def load_with(folder: Path, *adapters: Path, **options: object) -> tuple[Worker, list[str]]:
    """Load a worker with adapters named by their folders; returns their identities too."""
    named = tuple(AdapterFolder(each.name, str(each)) for each in adapters)
    worker, facts = load_worker(folder, adapter_limits=LIMITS, adapters=named, **options)
    return worker, [each.identity for each in facts.adapters]


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        *(("llama", "off"), ("llama", "auto"), ("qwen3", "auto"), ("gemma3_text", "off"), ("phi3", "auto")),
        *(("qwen3_moe", "off"), ("qwen3_moe", "auto"), ("deepseek_v3", "off"), ("deepseek_v3", "auto")),
        *(("qwen3_5_text", "auto"), ("qwen3_next", "off")),
    ],
)
def test_an_adapter_computes_what_its_merged_checkpoint_does(
    family: str, kernels: str, checkpoints: MakeCheckpoint, tmp_path: Path
) -> None:
    base = checkpoints(family)
    targets = LAYERS_OF.get(family, ATTENTION if family == "qwen3_moe" else None)
    if family in ("qwen3_5_text", "qwen3_next"):
        targets = [*ATTENTION, *RECURRENCE]
    if family == "deepseek_v3":
        targets = ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "down_proj"]
    adapter = write_adapter(tmp_path / "tuned", base, targets=targets)
    merged = merge_adapter(tmp_path / "merged", base, adapter)
    expected = scores(PlanDriver(load_worker(merged, cpu_kernels=kernels)[0], BLOCK_SIZE), "")
    worker, (identity,) = load_with(base, adapter, cpu_kernels=kernels)
    driver = PlanDriver(worker, BLOCK_SIZE)
    for found, wanted in zip(scores(driver, identity), expected, strict=True):
        assert found.keys() == wanted.keys()
        assert all(abs(found[token] - wanted[token]) < 2e-4 for token in wanted)
    assert scores(driver, "")[0] != scores(driver, identity)[0]


@pytest.fixture(scope="module")
def four(checkpoints: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Four adapters of llama, of several ranks and targets."""
    root, base = tmp_path_factory.mktemp("four"), checkpoints("llama")
    return [
        write_adapter(root / "a", base, rank=16, seed=1),
        write_adapter(root / "b", base, rank=1, seed=2, targets=["q_proj", "v_proj"]),
        write_adapter(root / "c", base, rank=5, seed=3, targets=["gate_proj", "down_proj", "k_proj"]),
        write_adapter(root / "d", base, rank=64, seed=4, targets=["up_proj", "o_proj"]),
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "quantization": "int8", "num_threads": 2},
        {"dtype": "bfloat16", "quantization": "int4"},
    ],
    ids=["float32", "bfloat16", "int8", "int4"],
)
def test_rows_of_four_adapters_and_the_base_equal_themselves_alone_bit_for_bit(
    options: dict[str, object], checkpoints: MakeCheckpoint, four: list[Path]
) -> None:
    base = checkpoints("llama")
    if "quantization" in options:  # the weights of the other one are too large to be rounded
        base = make_checkpoint("llama", four[0].parent / "calm", initializer_range=0.1)
    worker, identities = load_with(base, *four, **options)
    driver = PlanDriver(worker, BLOCK_SIZE)
    chosen = [*identities, "", *identities[::-1][:2], ""]
    alone = {}
    for each in set(chosen):
        alone[each] = scores(driver, each)
        driver.release_all()
    assert len({str(each) for each in alone.values()}) == 5, "each adapter answers otherwise"
    rows = [driver.add(PROMPT, SCORED, adapter=each) for each in chosen]
    for step in range(4):
        output = driver.step(dict.fromkeys(rows))
        assert not output.failures
        for row, adapter in zip(rows, chosen, strict=True):
            assert dict(output.logprobs[SequenceId(row)][0].top) == alone[adapter][step]


def test_rows_without_an_adapter_equal_those_of_a_worker_without_adapters_bit_for_bit(
    checkpoints: MakeCheckpoint, four: list[Path], llama: PlanDriver
) -> None:
    worker, identities = load_with(checkpoints("llama"), *four)
    driver = PlanDriver(worker, BLOCK_SIZE)
    driver.step(dict.fromkeys(driver.add(PROMPT, adapter=each) for each in identities))
    assert scores(driver, "") == scores(llama, "")


@pytest.mark.parametrize(
    ("format_name", "kernels"), [("int4", "auto"), ("awq", "off"), ("gptq", "auto"), ("gguf", "off")]
)
def test_an_adapter_beside_a_base_in_four_bits_computes_what_the_plain_merged_checkpoint_does(
    format_name: str, kernels: str, tmp_path: Path
) -> None:
    if format_name == "gguf":
        path, plain = pytest.importorskip("tests.gguf_checkpoints").write_gguf(
            "llama", {"": "Q4_0"}, tmp_path, is_tied=False
        )
        with pytest.MonkeyPatch.context() as environment:  # not for the kernels, which are kept there too
            environment.setenv("XDG_CACHE_HOME", str(tmp_path))
            quantized = folder_of(path)
    else:
        quantized, plain = write_quantized("llama", format_name, tmp_path)
    adapter = write_adapter(tmp_path / "tuned", plain)
    merged = merge_adapter(tmp_path / "merged", plain, adapter)
    expected = scores(PlanDriver(load_worker(merged)[0], BLOCK_SIZE), "")
    worker, (identity,) = load_with(quantized, adapter, cpu_kernels=kernels)
    for found, wanted in zip(scores(PlanDriver(worker, BLOCK_SIZE), identity), expected, strict=True):
        assert all(abs(found[token] - wanted[token]) < 1e-3 for token in wanted)


def test_where_neighbours_are_rotated_updates_follow_the_new_order_of_the_outputs(tmp_path: Path) -> None:
    config = tiny_config(Family(model_type="glm"))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "base")
    adapter = write_adapter(tmp_path / "tuned", tmp_path / "base", targets=["q_proj", "k_proj"])
    found = []
    for kernels in ("off", "auto"):
        worker, (identity,) = load_with(tmp_path / "base", adapter, cpu_kernels=kernels)
        found.append(scores(PlanDriver(worker, BLOCK_SIZE), identity))
    for off, auto in zip(*found, strict=True):
        assert all(abs(off[token] - auto[token]) < 1e-3 for token in off)


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next"])
def test_a_family_whose_sequences_are_computed_alone_takes_adapters(
    family: str, checkpoints: MakeCheckpoint, tmp_path: Path
) -> None:
    base = checkpoints(family)
    targets = ["q_proj", "v_proj", "in_proj"] if family == "lfm2" else ["q_proj", "v_proj", "in_proj_qkvz"]
    adapter = write_adapter(tmp_path / "tuned", base, targets=targets)
    merged = merge_adapter(tmp_path / "merged", base, adapter)
    expected = scores(PlanDriver(load_worker(merged)[0], BLOCK_SIZE), "")
    worker, (identity,) = load_with(base, adapter)
    driver = PlanDriver(worker, BLOCK_SIZE)
    for found, wanted in zip(scores(driver, identity), expected, strict=True):
        assert all(abs(found[token] - wanted[token]) < 1e-3 for token in wanted)
    assert scores(driver, "")[0] != scores(driver, identity)[0]

"""Adapters that peft itself made, against peft's own model, in float32."""

import json
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from scheduler.messages import SequenceId
from tests.checkpoints import make_checkpoint
from tests.quantized_checkpoints import write_quantized
from tests.tiers import by_day
from tests.worker.adapters.test_adapted_models import LAYERS_OF, PROMPT, SCORED, load_with, scores
from tests.worker.conftest import BLOCK_SIZE, MakeCheckpoint
from tests.worker.plan_driver import PlanDriver
from worker.worker_errors import StartupError

pytestmark = [
    pytest.mark.skipif(find_spec("peft") is None, reason="peft, the oracle of adapters, is not installed"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]

CASES = {
    "rank 1": {"r": 1, "target_modules": ["q_proj", "v_proj"]},
    "rank 64, rank-stabilized": {"r": 64, "use_rslora": True, "target_modules": "all-linear"},
    "patterns": {
        "r": 8,
        "target_modules": r".*\.layers\.\d+\.(self_attn|mlp)\.(q_proj|down_proj)",
        "rank_pattern": {"down_proj": 4, r"layers\.1\.self_attn\.q_proj": 2},
        "alpha_pattern": {r".*\.0\..*": 3},
    },
    "some layers": {"r": 16, "target_modules": ["o_proj", "up_proj"], "layers_to_transform": [0, 2]},
    "weights by name": {
        "r": 4,
        "target_modules": ["v_proj"],
        "target_parameters": ["q_proj.weight"],
        "alpha_pattern": {r".*q_proj\.weight": 3},
    },
    "all but some": {
        "r": 4,
        "target_modules": ["q_proj", "k_proj"],
        "exclude_modules": ["model.layers.1.self_attn.q_proj"],
    },
}


def make(base: Path, folder: Path, **config: Any) -> Any:
    """Make an adapter with peft, whose halves are both random, and return peft's model."""
    import peft  # takes seconds, and not all that read this file run its tests

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(3)
    tuned = peft.get_peft_model(
        model, peft.LoraConfig(**{"task_type": "CAUSAL_LM", "lora_alpha": 16, **config})
    )
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    tuned.save_pretrained(folder)
    return tuned.eval()


def check(base: Path, folder: Path, tuned: Any, *, tolerance: float = 2e-4, **options: object) -> None:
    worker, (identity,) = load_with(base, folder, **options)
    token_ids = list(PROMPT)
    for found in scores(PlanDriver(worker, BLOCK_SIZE), identity):
        with torch.no_grad():
            expected = tuned(input_ids=torch.tensor([token_ids])).logits[0, -1].log_softmax(-1)
        for token, logprob in found.items():
            assert abs(float(expected[token]) - logprob) < tolerance
        token_ids.append(max(found, key=found.__getitem__))


@pytest.mark.filterwarnings("ignore:.*_pattern keys did not match any targeted module")  # they did
@pytest.mark.parametrize("kernels", by_day(["auto", "off"], ["auto"]))
@pytest.mark.parametrize("case", CASES)
def test_settings_mean_what_peft_means_by_them(
    case: str, kernels: str, checkpoints: MakeCheckpoint, tmp_path: Path
) -> None:
    base = checkpoints("llama")
    tuned = make(base, tmp_path / "tuned", **CASES[case])
    check(base, tmp_path / "tuned", tuned, cpu_kernels=kernels)


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
OF_EXPERTS = {
    "all": {"target_modules": ["q_proj"], "target_parameters": EXPERTS},
    "the way down, rank-stabilized": {
        "target_modules": [],
        "target_parameters": EXPERTS[1:],
        "use_rslora": True,
    },
    "gates and ups, of another rank": {
        "target_modules": ["o_proj"],
        "target_parameters": EXPERTS[:1],
        "rank_pattern": {r".*\.gate_up_proj": 3},
    },
}


@pytest.mark.pairs
@pytest.mark.filterwarnings("ignore:.*_pattern keys did not match any targeted module")  # they did
@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize("case", OF_EXPERTS)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_updates_of_experts_compute_what_pefts_model_does(
    family: str, case: str, kernels: str, checkpoints: MakeCheckpoint, tmp_path: Path
) -> None:
    base = checkpoints(family)
    tuned = make(base, tmp_path / "tuned", r=4, **OF_EXPERTS[case])
    check(base, tmp_path / "tuned", tuned, cpu_kernels=kernels)


def transpose_halves(folder: Path, num_experts: int, version: str | None) -> None:
    """Store updates of experts as peft before 0.19 did, which took the outputs of a matrix for its inputs."""
    tensors = load_file(folder / "adapter_model.safetensors")
    for name in [each for each in tensors if ".experts." in each and "lora_A" in each]:
        other = name.replace("lora_A", "lora_B")
        down, up = tensors[name], tensors[other]
        down_ERK = down.reshape(num_experts, -1, down.shape[1])
        up_NRE = up.reshape(len(up), -1, num_experts)
        tensors[name] = up_NRE.permute(2, 1, 0).reshape(down.shape[0], -1).contiguous()
        tensors[other] = down_ERK.permute(2, 1, 0).reshape(-1, up.shape[1]).contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "peft_version": version}))


def test_updates_of_experts_from_before_their_halves_changed_places(
    checkpoints: MakeCheckpoint, tmp_path: Path
) -> None:
    base, folder = checkpoints("qwen3_moe"), tmp_path / "tuned"
    tuned = make(base, folder, r=4, **OF_EXPERTS["all"])
    transpose_halves(folder, tuned.config.num_experts, None)
    check(base, folder, tuned)


@pytest.mark.night
def test_updates_of_square_experts_are_read_by_the_version_of_peft(tmp_path: Path) -> None:
    base = make_checkpoint("qwen3_moe", tmp_path / "base", moe_intermediate_size=64)
    folder = tmp_path / "tuned"
    tuned = make(base, folder, r=4, **OF_EXPERTS["the way down, rank-stabilized"])
    check(base, folder, tuned)
    transpose_halves(folder, tuned.config.num_experts, "0.18.1")
    check(base, folder, tuned)
    transpose_halves(folder, tuned.config.num_experts, None)
    with pytest.raises(StartupError, match=r"as many inputs as outputs, .* has no peft_version"):
        load_with(base, folder)


def test_experts_of_sequences_that_are_computed_alone_take_updates(
    checkpoints: MakeCheckpoint, tmp_path: Path
) -> None:
    base = checkpoints("qwen3_next")
    check(base, tmp_path / "tuned", make(base, tmp_path / "tuned", r=4, **OF_EXPERTS["all"]))


def test_experts_in_four_bits_take_updates(tmp_path: Path) -> None:
    quantized, plain = write_quantized("mixtral", "int4", tmp_path)
    tuned = make(plain, tmp_path / "tuned", r=4, **OF_EXPERTS["all"])
    check(quantized, tmp_path / "tuned", tuned, tolerance=1e-3)


def write_modules_of_experts(folder: Path, targets: list[str]) -> None:
    """Write an adapter of each expert's modules, in the sizes of qwen3_moe here."""
    torch.manual_seed(4)
    sizes = {"gate_proj": (48, 64), "up_proj": (48, 64), "down_proj": (64, 48)}
    tensors = {}
    for layer, expert, target in product(range(3), range(4), targets):
        module = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{target}"
        num_outputs, num_inputs = sizes[target]
        tensors[f"{module}.lora_A.weight"] = torch.randn(4, num_inputs) / num_inputs**0.5
        tensors[f"{module}.lora_B.weight"] = torch.randn(num_outputs, 4) * 0.1
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 16,
        "target_modules": targets,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.mark.filterwarnings("ignore:.*_pattern keys did not match any targeted module")  # they did
def test_updates_of_each_experts_modules_compute_what_peft_makes_of_them(
    checkpoints: MakeCheckpoint, tmp_path: Path
) -> None:
    import peft

    base = checkpoints("qwen3_moe")
    write_modules_of_experts(tmp_path / "tuned", ["gate_proj", "up_proj", "down_proj"])
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tuned = peft.PeftModel.from_pretrained(model, tmp_path / "tuned").eval()
    check(base, tmp_path / "tuned", tuned)
    file = tmp_path / "tuned" / "adapter_model.safetensors"
    tensors = load_file(file)
    short = "base_model.model.model.layers.2.mlp.experts.0.gate_proj.lora_A.weight"
    save_file(tensors | {short: tensors[short][:, :32].clone()}, file)
    with pytest.raises(StartupError, match="are for 32 inputs and 48 gates or ups, and it has 64 and 48"):
        load_with(base, tmp_path / "tuned")
    lacking = "base_model.model.model.layers.1.mlp.experts.2.up_proj.lora_"
    save_file({name: each for name, each in tensors.items() if lacking not in name}, file)
    with pytest.raises(StartupError, match=r"layers\.1\.mlp\.experts\.2\.up_proj is a target"):
        load_with(base, tmp_path / "tuned")


def test_rows_with_updates_of_experts_equal_themselves_alone_bit_for_bit(
    checkpoints: MakeCheckpoint, tmp_path: Path
) -> None:
    base = checkpoints("qwen3_moe")
    make(base, tmp_path / "all", r=4, **OF_EXPERTS["all"])
    write_modules_of_experts(tmp_path / "ups", ["up_proj"])
    worker, identities = load_with(base, tmp_path / "all", tmp_path / "ups", dtype="bfloat16")
    driver, chosen = PlanDriver(worker, BLOCK_SIZE), [*identities, "", *identities, ""]
    alone = {}
    for each in (*identities, ""):
        alone[each] = scores(driver, each)
        driver.release_all()
    assert len({str(each) for each in alone.values()}) == 3
    rows = [driver.add(PROMPT, SCORED, adapter=each) for each in chosen]
    for step in range(4):
        output = driver.step(dict.fromkeys(rows))
        for row, adapter in zip(rows, chosen, strict=True):
            assert dict(output.logprobs[SequenceId(row)][0].top) == alone[adapter][step]


@pytest.mark.parametrize("family", by_day(["qwen3", "gemma3_text", "qwen3_moe", "phi3"], ["gemma3_text"]))
def test_families_compute_what_pefts_model_does(
    family: str, checkpoints: MakeCheckpoint, tmp_path: Path
) -> None:
    base = checkpoints(family)
    targets = LAYERS_OF.get(family, ["q_proj", "k_proj", "v_proj", "o_proj"])
    if family == "gemma3_text":
        targets = "all-linear"
    tuned = make(base, tmp_path / "tuned", r=8, target_modules=targets)
    check(base, tmp_path / "tuned", tuned)

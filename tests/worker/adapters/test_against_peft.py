"""Adapters that peft itself made, against peft's own model, in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.worker.adapters.test_adapted_models import LAYERS_OF, PROMPT, load_with, scores
from tests.worker.conftest import BLOCK_SIZE, MakeCheckpoint
from tests.worker.plan_driver import PlanDriver

peft = pytest.importorskip("peft", reason="peft, the oracle of adapters, is not installed")

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

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
    "all but some": {
        "r": 4,
        "target_modules": ["q_proj", "k_proj"],
        "exclude_modules": ["model.layers.1.self_attn.q_proj"],
    },
}


def make(base: Path, folder: Path, **config: Any) -> Any:
    """Make an adapter with peft, whose halves are both random, and return peft's model."""
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


def check(base: Path, folder: Path, tuned: Any, **options: object) -> None:
    worker, (identity,) = load_with(base, folder, **options)
    token_ids = list(PROMPT)
    for found in scores(PlanDriver(worker, BLOCK_SIZE), identity):
        with torch.no_grad():
            expected = tuned(input_ids=torch.tensor([token_ids])).logits[0, -1].log_softmax(-1)
        for token, logprob in found.items():
            assert abs(float(expected[token]) - logprob) < 2e-4
        token_ids.append(max(found, key=found.__getitem__))


@pytest.mark.parametrize("kernels", ["auto", "off"])
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


@pytest.mark.filterwarnings("ignore:.*rank_pattern keys did not match any targeted module")  # it did
@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize("case", OF_EXPERTS)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_updates_of_experts_compute_what_pefts_model_does(
    family: str, case: str, kernels: str, checkpoints: MakeCheckpoint, tmp_path: Path
) -> None:
    base = checkpoints(family)
    tuned = make(base, tmp_path / "tuned", r=4, **OF_EXPERTS[case])
    check(base, tmp_path / "tuned", tuned, cpu_kernels=kernels)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_moe", "phi3"])
def test_families_compute_what_pefts_model_does(
    family: str, checkpoints: MakeCheckpoint, tmp_path: Path
) -> None:
    base = checkpoints(family)
    targets = LAYERS_OF.get(family, ["q_proj", "k_proj", "v_proj", "o_proj"])
    if family == "gemma3_text":
        targets = "all-linear"
    tuned = make(base, tmp_path / "tuned", r=8, target_modules=targets)
    check(base, tmp_path / "tuned", tuned)

"""A layer is replaced where the kernels compute the same, and nowhere else."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.helium import modeling_helium
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm
from transformers.models.olmo2 import modeling_olmo2
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

from tests.checkpoints import make_checkpoint
from tests.families import Family
from tests.worker.conftest import MakeCheckpoint, load_worker
from tests.worker.cpu.conftest import INSTRUCTION_SETS
from tests.worker.family_trial import tiny_config
from tests.worker.plan_driver import PlanDriver
from worker.attention.interface import ATTENTION_NAME
from worker.cpu.kernel_build import CannotBuild, build_library, find_library
from worker.cpu.layer import CpuLayer
from worker.cpu.native import Kernels
from worker.cpu.toolkit import CpuToolkit
from worker.cpu.unfused import PackedEmbedding, PackedLinear
from worker.devices.device import open_device
from worker.load.recurrent_functions import replace_functions
from worker.model.layer_replacement import replace_layers
from worker.model.mixture import find_experts
from worker.worker_config import WorkerConfig
from worker.worker_errors import StartupError


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    try:
        return Kernels(find_library() or build_library(), 2)
    except CannotBuild as error:
        pytest.skip(str(error))


@pytest.fixture
def device():
    return open_device(WorkerConfig(model_path="", device="cpu"))


@pytest.fixture
def toolkit(kernels, device) -> CpuToolkit:
    return CpuToolkit(kernels, device)


def build(checkpoints: MakeCheckpoint, family: str):
    config = AutoConfig.from_pretrained(checkpoints(family))
    return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).eval()


def build_tiny(model_type: str, **settings: Any):
    """With numbers of all sizes, so that no norm is that of ones."""
    config = tiny_config(Family(model_type=model_type, settings=settings))
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    return model


FUSED = ["llama", "llama3_rope", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3"]


@pytest.mark.parametrize("family", FUSED)
def test_families_made_as_most_are_have_all_their_layers_fused(toolkit, device, checkpoints, family):
    model = build(checkpoints, family)
    done = replace_layers(model, toolkit, device, max_model_len=512)
    assert (done.num_fused, done.num_layers, dict(done.reasons)) == (3, 3, {})
    assert all(isinstance(layer, CpuLayer) for layer in model.model.layers)
    assert "3 of 3 layers fused" in done.describe()


OTHER_BLOCKS = {
    "norms behind attention and MLP alone": ("exaone4", {"sliding_window": 8}),
    "norms of all heads of a token as one": ("olmo2", {}),
    "what is added is multiplied": ("granite", {"residual_multiplier": 0.22, "attention_multiplier": 0.1}),
    "layer norms, and halves of the heads turned": ("stablelm", {"partial_rotary_factor": 0.5}),
    "an MLP beside attention, and angles in pairs": ("cohere", {}),
    "an MLP that stays": ("qwen3_moe", {}),
    "an MLP that stays, and a norm behind it": ("flex_olmo", {}),
    "an MLP that stays, with layer norms and biases": ("starcoder2", {}),
    "an MLP that stays, beside attention": ("phi", {}),
    "an MLP that stays and is multiplied": ("granitemoe", {"residual_multiplier": 0.22}),
}


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("name", OTHER_BLOCKS)
def test_a_block_of_another_make_is_fused_by_every_instruction_set(
    open_kernels, device, name, instruction_set
):
    toolkit = CpuToolkit(open_kernels(instruction_set, 2), device)
    model_type, settings = OTHER_BLOCKS[name]
    done = replace_layers(build_tiny(model_type, **settings), toolkit, device, max_model_len=512)
    assert (done.num_fused, done.num_layers, dict(done.reasons)) == (3, 3, {})
    assert done.num_kept_mlps == (3 if "stays" in name else 0)


GATED_DELTA_RULE = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "qwen3_next"])
def test_a_gated_delta_rule_and_gated_attention_are_fused(open_kernels, device, model_type, instruction_set):
    model = build_tiny(model_type, **GATED_DELTA_RULE)
    replace_functions(model)
    toolkit = CpuToolkit(open_kernels(instruction_set, 2), device)
    done = replace_layers(model, toolkit, device, max_model_len=512)
    assert (done.num_fused, dict(done.reasons)) == (3, {})


def test_a_delta_rule_whose_gates_are_others_stays_as_it_is(toolkit, device, monkeypatch):
    model = build_tiny("qwen3_5_text", **GATED_DELTA_RULE)
    replace_functions(model)
    forward = Qwen3_5RMSNormGated.forward
    monkeypatch.setattr(
        Qwen3_5RMSNormGated, "forward", lambda norm, x, gate: forward(norm, x, gate.sigmoid())
    )
    done = replace_layers(model, toolkit, device, max_model_len=512)
    assert done.num_fused == 1
    assert "computes something else" in done.describe()


def test_a_layer_that_clips_what_a_trial_never_has_so_large_stays_as_it_is(toolkit, device):
    done = replace_layers(build_tiny("olmoe", clip_qkv=50.0), toolkit, device, max_model_len=512)
    assert dict(done.reasons) == {"it clips queries, keys and values": 3}


def test_a_norm_of_all_heads_follows_the_numbers_that_were_reordered(toolkit, device, monkeypatch):
    monkeypatch.setattr(modeling_olmo2, "apply_rotary_pos_emb", modeling_helium.apply_rotary_pos_emb)
    done = replace_layers(build_tiny("olmo2"), toolkit, device, max_model_len=512)
    assert (done.num_fused, dict(done.reasons)) == (3, {})


def test_weights_that_were_packed_are_not_kept_twice(toolkit, device, checkpoints):
    model = build(checkpoints, "llama")
    old = [weakref.ref(parameter) for parameter in model.model.layers.parameters()]
    replace_layers(model, toolkit, device, max_model_len=512)
    gc.collect()
    assert not any(each() is not None for each in old)


def test_queries_weighed_by_position_are_noticed_where_they_are(toolkit, device):
    """Weighed as in Ministral 3, from the 65th token on: a trial of the first tokens would not see it."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "llama_4_scaling_beta": 0.1,
    }
    config = tiny_config(Family(model_type="ministral3", settings={"rope_parameters": rope}))
    for max_model_len, num_fused in ((64, 3), (512, 0)):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).eval()
        done = replace_layers(model, toolkit, device, max_model_len=max_model_len)
        assert done.num_fused == num_fused


def test_a_layer_that_attends_in_chunks_stays_as_it_is(toolkit, device):
    """Its chunks are longer than the trial, which would find nothing."""
    settings = {"layer_types": ["chunked_attention"] * 3, "attention_chunk_size": 8192}
    model = AutoModelForCausalLM.from_config(
        tiny_config(Family(model_type="llama", settings=settings)), attn_implementation=ATTENTION_NAME
    )
    done = replace_layers(model.eval(), toolkit, device, max_model_len=512)
    assert dict(done.reasons) == {"it attends in chunks": 3}


class ScaledLayer(LlamaDecoderLayer):
    """Has the parts of any other layer, and does something else with them."""

    def forward(self, hidden_states, **kwargs):
        return super().forward(hidden_states, **kwargs) * 1.01


def test_a_layer_that_computes_something_else_stays_as_it_is(toolkit, device, checkpoints):
    model = build(checkpoints, "llama")
    model.model.layers[1].__class__ = ScaledLayer
    done = replace_layers(model, toolkit, device, max_model_len=512)
    assert done.num_fused == 2
    assert isinstance(model.model.layers[1], ScaledLayer)
    assert "computes something else" in done.describe()


class MisleadingNorm(LlamaRMSNorm):
    """Its attribute is not what it computes with: seen on large numbers by nobody."""

    def forward(self, x):
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon * 3)


def test_a_wrong_epsilon_is_noticed(toolkit, device, checkpoints):
    model = build(checkpoints, "llama")
    norm = model.model.layers[1].input_layernorm
    norm.__class__ = MisleadingNorm
    done = replace_layers(model, toolkit, device, max_model_len=512)
    assert done.num_fused == 2
    assert "computes something else" in done.describe()


def test_an_embedding_tied_to_the_output_reads_the_same_memory(toolkit, device, checkpoints):
    model = build(checkpoints, "llama")
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    expected = model.model.embed_tokens(torch.tensor([[3, 300]])).clone()
    replace_layers(model, toolkit, device, max_model_len=512)
    assert isinstance(model.get_output_embeddings(), PackedLinear)
    assert isinstance(model.get_input_embeddings(), PackedEmbedding)
    assert torch.equal(model.get_input_embeddings()(torch.tensor([[3, 300]])), expected)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe"])
def test_experts_are_packed_in_layers_that_are_fused_around_them(toolkit, device, family):
    model = build_tiny(family)
    name, module = next(find_experts(model))
    hidden_TH, ids_TK = torch.randn(19, 64), torch.rand(19, 4).topk(2).indices
    scores_TK = torch.rand(19, 2)
    expected_TH = module(hidden_TH, ids_TK, scores_TK)
    done = replace_layers(model, toolkit, device, max_model_len=512)
    assert "3 of 3 layers fused (3 but for their MLPs), and the experts of 3 of 3" in done.describe()
    found_TH = model.get_submodule(name)(hidden_TH, ids_TK, scores_TK)
    assert (found_TH - expected_TH).abs().max() / expected_TH.abs().max() < 1e-5


def test_experts_that_are_no_whole_number_of_vectors_stay_as_they_are(toolkit, device):
    config = tiny_config(Family(model_type="qwen3_moe", settings={"moe_intermediate_size": 40}))
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).eval()
    done = replace_layers(model, toolkit, device, max_model_len=512)
    assert (done.experts.num_replaced, done.experts.num_found) == (0, 3)
    assert "its experts are (64, 40) float32 (3)" in done.describe()


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_with_and_without_kernels_the_tokens_agree(kernels, checkpoints, family):
    logits = []
    for choice in ("auto", "off"):
        worker, _ = load_worker(checkpoints(family), cpu_kernels=choice)
        driver = PlanDriver(worker, 4)
        prompt = [(7 * index + 3) % 300 for index in range(29)]
        sequence = driver.add(prompt)
        driver.generate([sequence], 20)
        logits.append(np.array(driver.generated(sequence)))
    assert np.array_equal(*logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"quantization": "int8"}),
        ("llama", {"quantization": "int4"}),
        ("llama", {"quantization": "int4", "quantize_head": "int8", "activations": "int8"}),
        ("qwen3_5_text", {"quantization": "int8"}),
    ],
    ids=str,
)
def test_quantized_layers_answer_nearly_the_same_in_steps_of_every_size(
    kernels, tmp_path, dtype, options, family
):
    """Nearly: that the load did not refuse it. Exactly: however its steps are cut."""
    calm = make_checkpoint(family, tmp_path / "calm", initializer_range=0.1)  # 0.3 makes much of rounding
    worker, _ = load_worker(calm, dtype=dtype, **options)
    prompt = [(7 * index + 3) % 300 for index in range(29)]
    generated = []
    for cut in ((29,), (20, 8, 1), (1, 28)):
        driver = PlanDriver(worker, 4)
        sequence = driver.add(prompt)
        for num_tokens in cut[:-1]:
            driver.step({sequence: num_tokens})
        driver.generate([sequence], 20)
        generated.append(driver.generated(sequence))
        driver.release_all()
    assert generated[0] == generated[1] == generated[2]


@pytest.mark.parametrize(
    ("family", "options", "said"),
    [
        ("llama", {"cpu_kernels": "off"}, "--cpu-kernels is off"),
        ("llama", {"dtype": "float16"}, "none for torch.float16"),
        ("gpt2", {}, "no effect on this model"),
        ("mixtral", {}, "no effect on the MLPs of this model"),
    ],
)
def test_quantization_that_would_do_nothing_is_refused(kernels, checkpoints, family, options, said):
    with pytest.raises(StartupError, match=said):
        load_worker(checkpoints(family), quantization="int8", **options)

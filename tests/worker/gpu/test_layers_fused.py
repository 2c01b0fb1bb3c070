"""On a GPU too a layer is replaced where the kernels compute the same, and nowhere else."""

import gc
import weakref
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.checkpoints import vary_constants
from tests.families import ALTERNATING, Family
from tests.worker.family_trial import tiny_config
from worker.attention.interface import (
    ATTENTION_NAME,
    AttentionMetadata,
    BlockTables,
    active,
    num_layers_begun,
)
from worker.attention.kv_cache import BlockLayout, KVCache, LayerShape
from worker.devices.device import open_device
from worker.gpu.toolkit import GpuToolkit
from worker.gpu.triton_attention import TritonAttention
from worker.gpu.triton_layer import TritonLayer
from worker.model.layer_replacement import replace_layers
from worker.worker_config import WorkerConfig

pytestmark = pytest.mark.night

BLOCK_SIZE = 4
# A later chunk beside the first of another sequence, then a decode beside a chunk. The interpreter is slow.
STEPS = (((0, 6),), ((0, 2), (1, 3)), ((0, 1), (1, 4)))

ALTERNATING_LAYERS = {"sliding_window": 5, "layer_types": ALTERNATING[:2]}
FUSED: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, biases": {"attention_bias": True},
    "qwen2": {"layer_types": None},
    "qwen3": {"layer_types": None},
    "mistral": {"sliding_window": 5},
    "gemma2": {**ALTERNATING_LAYERS, "query_pre_attn_scalar": 16},
    "gemma3_text": {**ALTERNATING_LAYERS, "query_pre_attn_scalar": 16},
    "phi3": {},
    "glm4": {"attention_bias": True},
    "qwen3_moe": {},
    "mixtral": {},
    "exaone4": ALTERNATING_LAYERS,
    "granite": {"residual_multiplier": 0.22},
    "granite, biases": {"residual_multiplier": 0.22, "attention_bias": True},
    "granitemoe": {"residual_multiplier": 0.22},
}


@pytest.fixture
def device():
    return open_device(WorkerConfig(model_path="", device="cpu"))


@pytest.fixture
def toolkit(device) -> GpuToolkit:
    return GpuToolkit(device)


def build(name: str):
    torch.manual_seed(5)
    settings = {"num_hidden_layers": 2, **FUSED.get(name, {})}
    config = tiny_config(Family(model_type=name.partition(",")[0], settings=settings))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=ATTENTION_NAME)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2)
    vary_constants(model, torch)
    return model.eval()


def serve(model, device, token_ids: list[np.ndarray]) -> list[torch.Tensor]:
    """Logits of all tokens of both sequences, computed in chunks through a paged cache."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = LayerShape(config.num_key_value_heads, head_dim, head_dim)
    layout = BlockLayout(layers=dict.fromkeys(range(2), shape), block_size=BLOCK_SIZE, dtype=torch.float32)
    backend = TritonAttention(KVCache(layout, 8, torch.zeros(9 * layout.block_numel)), device)
    tables, done = np.array([[7, 2, 5], [1, 8, 3]]), [0, 0]
    logits: list[list[torch.Tensor]] = [[], []]
    for step in STEPS:
        spans = [(who, done[who], done[who] + count) for who, count in step]
        rows = [who for who, _, _ in spans]
        positions = np.concatenate([np.arange(start, end) for _, start, end in spans])
        whose = np.repeat(rows, [end - start for _, start, end in spans])
        backend.begin_step(
            AttentionMetadata(
                num_decodes=sum(end - start == 1 for _, start, end in spans),
                query_starts=np.cumsum([0] + [end - start for _, start, end in spans]),
                seq_lens=np.array([end for _, _, end in spans]),
                tables=BlockTables.of(tables[rows].astype(np.int32)),
                token_blocks_ST=tables[whose, positions // BLOCK_SIZE][None],
                token_offsets=positions % BLOCK_SIZE,
            )
        )
        ids = np.concatenate([token_ids[who][start:end] for who, start, end in spans])
        with torch.inference_mode(), active(backend):
            found = model(
                input_ids=torch.from_numpy(ids[None]),
                position_ids=torch.from_numpy(positions[None]),
                use_cache=False,
            ).logits[0]
        for who, _, end in spans:
            logits[who].append(found[whose == who])
            done[who] = end
    return [torch.cat(each) for each in logits]


@pytest.mark.parametrize("name", FUSED)
def test_families_made_as_most_are_have_all_their_layers_fused_and_their_logits_unchanged(
    name, toolkit, device
):
    model = build(name)
    reference = deepcopy(model)
    reference.set_attn_implementation("eager")
    done = replace_layers(model, toolkit, device, max_model_len=64)
    assert (done.num_fused, done.num_layers, dict(done.reasons)) == (2, 2, {})
    assert all(isinstance(layer, TritonLayer) for layer in model.model.layers)
    generator = np.random.default_rng(3)
    token_ids = [generator.integers(3, 300, sum(dict(step).get(who, 0) for step in STEPS)) for who in (0, 1)]
    begun = num_layers_begun()
    found = serve(model, device, token_ids)
    assert num_layers_begun() - begun == 2 * len(STEPS), "a long step is known by the layers that it begins"
    for ids, logits_TV in zip(token_ids, found, strict=True):
        with torch.inference_mode():
            expected_TV = reference(input_ids=torch.from_numpy(ids[None]), use_cache=False).logits[0]
        error = (logits_TV - expected_TV).abs().max() / expected_TV.abs().max()
        assert error < 2e-5


def test_a_layer_whose_mlp_is_given_more_than_its_hidden_state_stays_as_it_is(toolkit, device):
    """A trial with something simple in its place would not see it."""
    model = build("mixtral")
    for layer in model.model.layers:
        computed = layer.mlp.forward
        layer.mlp.forward = lambda hidden_states, extra=None, computed=computed: computed(hidden_states)
        layer.mlp.register_forward_pre_hook(lambda mlp, args, kwargs: (args, {"extra": 1}), with_kwargs=True)
    done = replace_layers(model, toolkit, device, max_model_len=64)
    assert dict(done.reasons) == {"its MLP takes or returns more than a hidden state": 2}


def test_a_norm_of_all_heads_of_a_token_as_one_has_no_kernel(toolkit, device):
    done = replace_layers(build("olmo2"), toolkit, device, max_model_len=64)
    assert dict(done.reasons) == {"it norms all heads of a token as one": 2}


def test_what_only_the_cpus_kernels_know_is_refused(toolkit, device):
    model = build("cohere")
    assert dict(replace_layers(model, toolkit, device, max_model_len=64).reasons) == {
        "its CohereLayerNorm is no root-mean-square norm": 2
    }
    for layer in model.model.layers:
        layer.input_layernorm = LlamaRMSNorm(model.config.hidden_size)
    assert dict(replace_layers(model, toolkit, device, max_model_len=64).reasons) == {
        "its MLP is given what attention is given": 2
    }


def test_weights_that_were_merged_are_not_kept_twice(toolkit, device):
    model = build("llama")
    layer = model.model.layers[1]
    old = [weakref.ref(weight) for weight in (layer.self_attn.q_proj.weight, layer.mlp.up_proj.weight)]
    del layer
    replace_layers(model, toolkit, device, max_model_len=64)
    gc.collect()
    assert not any(each() is not None for each in old)


def test_a_layer_that_computes_something_else_stays_as_it_is(toolkit, device):
    model = build("llama")
    layer = model.model.layers[1]

    class ScaledLayer(type(layer)):
        def forward(self, hidden_states, **kwargs):
            return super().forward(hidden_states, **kwargs) * 1.01

    layer.__class__ = ScaledLayer
    done = replace_layers(model, toolkit, device, max_model_len=64)
    assert done.num_fused == 1
    assert "computes something else" in done.describe()
    assert "Triton kernels: 1 of 2 layers fused" in done.describe()

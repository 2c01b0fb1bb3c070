"""One call computes all layers of a model, where nothing but its own parts stands around them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.families import Family
from tests.worker.family_trial import tiny_config
from worker.attention.interface import ATTENTION_NAME, active, num_layers_begun
from worker.cpu import cpu_layer
from worker.cpu.cpu_attention import LayerAttention
from worker.cpu.cpu_layer import CpuBody, begin_trial
from worker.cpu.cpu_toolkit import CpuToolkit
from worker.cpu.native import Kernels
from worker.devices.device import open_device
from worker.model.surgery import put_kernels_under
from worker.worker_config import WorkerConfig


@pytest.fixture
def toolkit(built: Path) -> CpuToolkit:
    return CpuToolkit(Kernels(built, 2), open_device(WorkerConfig(model_path="", device="cpu")))


def build(toolkit: CpuToolkit, model_type: str, **settings: Any) -> Any:
    """Fuse the layers of a model of three of them; its norms are not those of ones."""
    config = tiny_config(Family(model_type=model_type, settings=settings))
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).eval().bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.1, 0.3)
    device = open_device(WorkerConfig(model_path="", device="cpu"))
    assert put_kernels_under(model, toolkit, device, max_model_len=512).num_fused == 3
    return model


def compute(body: Any, backend: LayerAttention, start: int, num_tokens: int) -> Tensor:
    with torch.inference_mode(), active(backend):
        return body(**begin_trial(backend, 60, start, num_tokens)).last_hidden_state


def compute_one_by_one(body: CpuBody, backend: LayerAttention, start: int, num_tokens: int) -> Tensor:
    arguments = begin_trial(backend, 60, start, num_tokens)
    with torch.inference_mode(), active(backend):
        hidden_1TH = body.embed_tokens(arguments["input_ids"])
        rotation = body.rotary_emb(hidden_1TH, arguments["position_ids"])
        for layer in body.layers:
            hidden_1TH = layer(hidden_1TH, position_embeddings=rotation)
        return body.normed(hidden_1TH)


@pytest.mark.parametrize("num_tokens", [1, 2, 21])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "olmo2"])
def test_all_layers_in_one_call_are_the_same_to_the_bit_as_one_by_one(toolkit, model_type, num_tokens):
    body = build(toolkit, model_type).model
    assert isinstance(body, CpuBody)
    backend = toolkit.attention_over(body.small_cache())
    found = compute(body, backend, 5, num_tokens)
    assert torch.equal(found, compute_one_by_one(body, backend, 5, num_tokens))


def test_rotations_are_the_same_whether_they_are_kept_or_not(toolkit, monkeypatch):
    body = build(toolkit, "llama").model
    backend = toolkit.attention_over(body.small_cache())
    starts = (0, 250, 400)
    kept = [compute(body, backend, start, 9) for start in starts]
    monkeypatch.setattr(cpu_layer, "_MOST_KEPT_POSITIONS", 0)
    assert all(
        torch.equal(one, compute(body, backend, start, 9)) for one, start in zip(kept, starts, strict=True)
    )
    assert not torch.equal(kept[0], kept[1])


def test_layers_of_one_call_count_as_progress_one_by_one(toolkit):
    body = build(toolkit, "llama").model
    backend = toolkit.attention_over(body.small_cache())
    before = num_layers_begun()
    compute(body, backend, 0, 3)
    assert num_layers_begun() - before == 3


KEPT = {
    "embeddings that are scaled by the body": ("granite", {"embedding_multiplier": 1.01}),
    "MLPs that stay": ("qwen3_moe", {}),
    "two rotations": ("gemma3_text", {}),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_body_with_more_than_these_parts_stays_and_calls_its_layers(toolkit, name):
    model_type, settings = KEPT[name]
    assert not isinstance(build(toolkit, model_type, **settings).model, CpuBody)


def test_a_head_that_scales_its_logits_is_called_and_a_plain_one_is_not_needed(toolkit):
    scaled, plain = build(toolkit, "cohere", logit_scale=0.25).model, build(toolkit, "llama").model
    assert isinstance(scaled, CpuBody)
    assert (len(scaled.plain_head), len(plain.plain_head)) == (0, 1)

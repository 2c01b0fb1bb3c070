"""One call computes all layers of a model, where nothing but its own parts stands around them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.families import Family
from tests.worker.family_trial import tiny_config
from worker.attention.interface import ATTENTION_NAME, active, num_layers_begun
from worker.attention.trial_step import trial_cache, trial_metadata
from worker.cpu import body as cpu_body
from worker.cpu.attention import CpuAttention, LayerAttention
from worker.cpu.body import CpuBody, join_body, trial_arguments
from worker.cpu.native import Kernels
from worker.cpu.products import TAKEN
from worker.cpu.toolkit import CpuToolkit
from worker.cpu.unfused import PackedOutput
from worker.devices.device import open_device
from worker.load.recurrent_functions import replace_functions
from worker.model.body import whole_body_of
from worker.model.layer_parts import Unrecognised
from worker.model.layer_replacement import replace_layers
from worker.steps.model_runner import ModelRunner
from worker.steps.tokens import StepTokens
from worker.worker_config import WorkerConfig

CPU = WorkerConfig(model_path="", device="cpu")
MAX_MODEL_LEN = 512


@pytest.fixture
def toolkit(built: Path) -> CpuToolkit:
    return CpuToolkit(Kernels(built, 2), open_device(CPU))


@pytest.fixture
def one_by_one(toolkit: CpuToolkit, monkeypatch: pytest.MonkeyPatch) -> CpuToolkit:
    monkeypatch.setattr(CpuToolkit, "_join_layers", lambda *_: None)
    return toolkit


def build_plain(model_type: str, kind: Any = AutoModelForCausalLM, **settings: Any) -> Any:
    """Build a model of three layers, whose norms are not those of ones."""
    torch.manual_seed(3)
    config = tiny_config(Family(model_type=model_type, settings=settings))
    model = kind.from_config(config, attn_implementation=ATTENTION_NAME).eval().bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.1, 0.3)
    return model


def fuse(toolkit: CpuToolkit, model: Any) -> Any:
    """Fuse its layers, and try to join them."""
    done = replace_layers(model, toolkit, open_device(CPU), max_model_len=MAX_MODEL_LEN)
    assert done.num_fused == 3
    assert ("all by one call" in done.describe()) is (whole_body_of(model) is not None)
    return model


def build(toolkit: CpuToolkit, model_type: str, kind: Any = AutoModelForCausalLM, **settings: Any) -> Any:
    return fuse(toolkit, build_plain(model_type, kind, **settings))


def join(toolkit: CpuToolkit, model: Any) -> None:
    join_body(model, TAKEN, toolkit.attention_over, open_device(CPU), MAX_MODEL_LEN)


def open_backend(toolkit: CpuToolkit, body: Any) -> LayerAttention:
    shapes = {layer.layer_idx: layer.shape for layer in body.layers if layer.state is None}
    states = {layer.layer_idx: layer.state for layer in body.layers if layer.state is not None}
    return toolkit.attention_over(trial_cache(shapes, torch.bfloat16, open_device(CPU), states))


def compute(body: Any, backend: LayerAttention, start: int, num_tokens: int) -> Tensor:
    backend.begin_step(trial_metadata(num_tokens))
    with torch.inference_mode(), active(backend):
        return body(**trial_arguments(60, start, num_tokens)).last_hidden_state


def compute_one_by_one(body: CpuBody, backend: LayerAttention, start: int, num_tokens: int) -> Tensor:
    arguments = trial_arguments(60, start, num_tokens)
    backend.begin_step(trial_metadata(num_tokens))
    with torch.inference_mode(), active(backend):
        hidden_1TH = body.embed_tokens(arguments["input_ids"])
        rotation = body.rotary_emb(hidden_1TH, arguments["position_ids"])
        for layer in body.layers:
            hidden_1TH = layer(hidden_1TH, position_embeddings=rotation)
        return body.normed(hidden_1TH)


def compute_logits(
    model: Any, backend: LayerAttention, indices: list[int], num_tokens: int = 9, vocab_size: int = 60
) -> Tensor:
    backend.begin_step(trial_metadata(num_tokens))
    inputs = trial_arguments(60, 5, num_tokens).values()
    indices_N = torch.tensor(indices, dtype=torch.int64)
    return ModelRunner(model, vocab_size).forward(StepTokens(*inputs, indices_N), backend).logits_NV


@pytest.mark.parametrize("num_tokens", [1, 2, 21])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "olmo2"])
def test_all_layers_in_one_call_are_the_same_to_the_bit_as_one_by_one(toolkit, model_type, num_tokens):
    body = build(toolkit, model_type).model
    assert isinstance(body, CpuBody)
    backend = open_backend(toolkit, body)
    found = compute(body, backend, 5, num_tokens)
    assert torch.equal(found, compute_one_by_one(body, backend, 5, num_tokens))


@pytest.mark.parametrize("num_drafts", [0, 1, 4])
def test_recurrent_layers_in_one_call_keep_what_they_keep_in_halves(toolkit, num_drafts):
    """A step with drafts is computed layer by layer, around single calls for its states."""
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    plain = build_plain("qwen3_5_text", layer_types=kinds)
    replace_functions(plain)
    body = fuse(toolkit, plain).model
    assert isinstance(body, CpuBody)
    found = []
    for num_drafts_R in ((), (num_drafts,)):
        backend = open_backend(toolkit, body)
        num_state_blocks = backend.states._layout.num_stripes
        metadata = trial_metadata(9, num_state_blocks)
        backend.begin_step(replace(metadata, num_drafts_R=num_drafts_R if num_drafts else ()))
        with torch.inference_mode(), active(backend):
            hidden_1TH = body(**trial_arguments(60, 5, 9)).last_hidden_state
            backend.states.accept_drafts((num_drafts,))
        found.append((hidden_1TH, backend.states._bytes_NE))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_rows_of_embeddings_are_computed_as_their_ids_are_and_stay_as_they_were(toolkit):
    model = build(toolkit, "llama")
    body, backend = model.model, open_backend(toolkit, model.model)
    ids_1T, positions_1T = trial_arguments(60, 5, 9).values()
    tokens = StepTokens(ids_1T, positions_1T, torch.tensor([3, 8]), body.embed_tokens(ids_1T).detach())
    before_1TH = tokens.embeds_1TH.clone()
    backend.begin_step(trial_metadata(9))
    outcome = ModelRunner(model, 60).forward(tokens._replace(keeps_hidden=True), backend)
    assert torch.equal(outcome.logits_NV, compute_logits(model, backend, [3, 8]))
    assert torch.equal(outcome.hidden.hidden_TH, compute(body, backend, 5, 9)[0])
    assert torch.equal(tokens.embeds_1TH, before_1TH)


def test_positions_of_three_numbers_are_rotated_by_the_module_of_the_model(toolkit):
    body = build(toolkit, "llama").model
    backend, own = open_backend(toolkit, body), body.rotary_emb
    expected = compute(body, backend, 5, 9)
    body._angles._module = lambda hidden_1TH, position_ids: own(hidden_1TH, position_ids[0])
    arguments = trial_arguments(60, 5, 9)
    one_axis_1T = arguments["position_ids"]
    arguments["position_ids"] = torch.stack([one_axis_1T, one_axis_1T + 1, one_axis_1T + 2])
    backend.begin_step(trial_metadata(9))
    with torch.inference_mode(), active(backend):
        assert torch.equal(body(**arguments).last_hidden_state, expected)


def test_rotations_are_the_same_whether_they_are_kept_or_not(toolkit, monkeypatch):
    body = build(toolkit, "llama").model
    backend = open_backend(toolkit, body)
    starts = (0, 250, 400)
    kept = [compute(body, backend, start, 9) for start in starts]
    monkeypatch.setattr(cpu_body, "_MOST_KEPT_POSITIONS", 0)
    body = build(toolkit, "llama").model
    assert all(
        torch.equal(one, compute(body, backend, start, 9)) for one, start in zip(kept, starts, strict=True)
    )
    assert not torch.equal(kept[0], kept[1])


def test_rotations_are_computed_at_load_and_in_no_step_before_the_last_that_is_kept(toolkit, monkeypatch):
    body = build(toolkit, "llama").model
    backend = open_backend(toolkit, body)
    before = compute(body, backend, MAX_MODEL_LEN - 9, 9)
    monkeypatch.setattr(body.rotary_emb, "forward", None)
    assert torch.equal(compute(body, backend, MAX_MODEL_LEN - 9, 9), before)
    with pytest.raises(TypeError):
        compute(body, backend, MAX_MODEL_LEN - 8, 9)


def test_a_call_of_all_layers_counts_as_many_layers_begun(toolkit):
    body = build(toolkit, "llama").model
    backend = open_backend(toolkit, body)
    before = num_layers_begun()
    compute(body, backend, 0, 3)
    assert num_layers_begun() - before == 3


KEPT = {
    "embeddings that are scaled by the body": (
        "granite",
        {"embedding_multiplier": 1.01},
        "more than its parts",
    ),
    "MLPs that stay": ("qwen3_moe", {}, "not all of its layers are whole"),
    "two rotations": ("gemma3_text", {}, r"cannot be joined \(TypeError\)"),  # it is to be told which
}


@pytest.mark.parametrize("name", KEPT)
def test_a_body_with_more_than_these_parts_stays_and_calls_its_layers(toolkit, name):
    model_type, settings, reason = KEPT[name]
    model = build(toolkit, model_type, **settings)
    assert whole_body_of(model) is None
    with pytest.raises(Unrecognised, match=reason):
        join(toolkit, model)


def add_at_late_positions(body: Any) -> None:
    """Let a body add to what comes to its norm where a position is above 400."""
    added: list[Tensor] = []

    def before(_: Any, __: Any, given: dict[str, Any]) -> None:
        added.append((given["position_ids"].max() > 400) * torch.arange(64))

    body.register_forward_pre_hook(before, with_kwargs=True)
    body.register_forward_hook(lambda *_: added.clear())
    body.norm.register_forward_pre_hook(lambda _, given: (given[0] + sum(added),))


def test_a_body_that_computes_more_at_late_positions_alone_stays(toolkit):
    model = build_plain("llama")
    add_at_late_positions(model.model)
    fuse(toolkit, model)
    assert whole_body_of(model) is None
    with pytest.raises(Unrecognised, match="more than its parts"):
        join(toolkit, model)


def raise_memory_error(*_: Any, **__: Any) -> Any:
    raise MemoryError


@pytest.mark.parametrize("part", [(CpuAttention, "run_layers"), (PackedOutput, "_multiply")])
def test_a_trial_without_memory_leaves_the_very_body_and_its_logits(one_by_one, monkeypatch, part):
    model = build(one_by_one, "llama")
    body, backend = model.model, open_backend(one_by_one, model.model)
    expected = compute_logits(model, backend, [3, 8])
    with monkeypatch.context() as without_memory:
        without_memory.setattr(*part, raise_memory_error)
        with pytest.raises(Unrecognised, match="MemoryError"):
            join(one_by_one, model)
    assert model.model is body
    assert torch.equal(compute_logits(model, backend, [3, 8]), expected)


def test_a_head_that_scales_its_logits_is_called_and_a_plain_one_is_not_needed(toolkit, caplog):
    caplog.set_level("INFO")
    scaled = build(toolkit, "cohere", logit_scale=0.25).model
    assert "not the outputs of its output layer" in caplog.text
    caplog.clear()
    plain = build(toolkit, "llama").model
    assert "output layer" not in caplog.text
    assert isinstance(scaled, CpuBody)
    assert (len(scaled.plain_head), len(plain.plain_head)) == (0, 1)


@pytest.mark.parametrize("vocab_size", [60, 50])
@pytest.mark.parametrize("indices", [[], [8], [2, 3, 8], list(range(9))])
def test_a_plain_head_computes_the_logits_of_the_models_own_forward(toolkit, indices, vocab_size):
    model = build(toolkit, "llama", vocab_size=60)
    assert model.config.vocab_size == 60
    backend = open_backend(toolkit, model.model)
    direct = compute_logits(model, backend, indices, vocab_size=vocab_size)
    assert model.model.plain_head
    model.model.plain_head = ()
    expected = compute_logits(model, backend, indices, vocab_size=vocab_size)
    assert direct.shape == (len(indices), vocab_size)
    assert torch.equal(direct, expected)


@pytest.mark.parametrize("kind", [AutoModel, AutoModelForSequenceClassification])
def test_models_without_a_head_have_their_layers_joined_too(toolkit, kind):
    model = build(toolkit, "qwen3", kind)
    body = whole_body_of(model)
    assert isinstance(body, CpuBody)
    assert body.plain_head == ()
    backend = open_backend(toolkit, body)
    assert torch.equal(compute(body, backend, 5, 9), compute_one_by_one(body, backend, 5, 9))

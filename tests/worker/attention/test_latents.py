"""Latents: a layer that compresses its keys and values keeps them as they are, and computes the same."""

import importlib
import pkgutil
from pathlib import Path

import pytest
import torch
import transformers.models
from torch import Tensor, nn

from tests.worker.conftest import MakeCheckpoint, load_worker
from worker.attention.interface import active, attention_forward
from worker.attention.kv_cache import FLOAT8, BlockLayout, KVCache, LayerShape
from worker.attention.latents import LatentExpansion, LatentSizes, keep_latents
from worker.attention.probe_attention import ProbeAttention
from worker.load.model_kind import find_kind
from worker.worker_config import WorkerConfig

NUM_HEADS, LATENT, PLAIN, ROTATED, VALUE = 4, 32, 16, 8, 12
SIZES = LatentSizes(LATENT, PLAIN, VALUE)


class Compressing(nn.Module):
    """Stand-in for an attention module of transformers that compresses keys and values."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer_idx, self.qk_nope_head_dim, self.v_head_dim = 0, PLAIN, VALUE
        self.kv_b_proj = nn.Linear(LATENT, NUM_HEADS * (PLAIN + VALUE), bias=False, dtype=dtype)

    def expand_kv(self, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        expanded = self.kv_b_proj(latents[:, 0]).view(1, -1, NUM_HEADS, PLAIN + VALUE).transpose(1, 2)
        plain, values = expanded.split([PLAIN, VALUE], dim=-1)
        return torch.cat((plain, rotated.expand(-1, NUM_HEADS, -1, -1)), dim=-1), values


def attend(module: Compressing, query: Tensor, latents: Tensor, rotated: Tensor) -> tuple[Tensor, LayerShape]:
    probe = ProbeAttention()
    with torch.inference_mode(), active(probe):
        keys, values = module.expand_kv(latents, rotated)
        return attention_forward(module, query, keys, values, None, scaling=0.2)[0], probe.shapes[0]


def inputs_of(scale: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((1, NUM_HEADS, 40, PLAIN + ROTATED), (1, 1, 40, LATENT), (1, 1, 40, ROTATED))
    query, *others = (torch.randn(shape, generator=generator) for shape in shapes)
    return [query * scale, *others]


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_latents_in_bfloat16_are_no_further_from_exact_than_expanded_ones(scale: float) -> None:
    torch.manual_seed(5)
    module = Compressing(torch.bfloat16)
    rounded = [each.bfloat16() for each in inputs_of(scale)]
    exact = Compressing(torch.float32)
    exact.load_state_dict(module.state_dict())
    wanted, _ = attend(exact, *(each.float() for each in rounded))
    expanded, kept = attend(module, *rounded)
    assert kept == LayerShape(NUM_HEADS, PLAIN + ROTATED, VALUE)
    keep_latents(nn.ModuleList([module]))
    absorbed, kept = attend(module, *rounded)
    assert kept == LayerShape(1, LATENT + ROTATED, LATENT, value_is_key_part=True)
    errors = [float((each.float() - wanted).norm() / wanted.norm()) for each in (absorbed, expanded)]
    assert errors[0] <= 1.1 * errors[1]


def test_in_float32_both_forms_are_one() -> None:
    torch.manual_seed(5)
    module = Compressing(torch.float32)
    expanded, _ = attend(module, *inputs_of(1.0))
    keep_latents(nn.ModuleList([module]))
    absorbed, _ = attend(module, *inputs_of(1.0))
    torch.testing.assert_close(absorbed, expanded, atol=1e-5, rtol=1e-5)


def test_outside_of_a_step_a_model_expands_as_before() -> None:
    module = Compressing(torch.float32)
    given = inputs_of(1.0)[1:]
    before = module.expand_kv(*given)
    keep_latents(nn.ModuleList([module]))
    assert isinstance(module.kv_b_proj, LatentExpansion)
    assert all(torch.equal(*each) for each in zip(module.expand_kv(*given), before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, FLOAT8])
def test_values_lie_in_keys_and_take_no_memory(dtype: torch.dtype) -> None:
    latents, plain = LayerShape(1, 24, 16, value_is_key_part=True), LayerShape(2, 16, 8)
    layout = BlockLayout(layers={0: plain, 1: latents, 2: plain}, block_size=4, dtype=dtype)
    assert sum(shape.numel for shape in layout.layers.values()) == 24 + 2 * 2 * (16 + 8)
    cache = KVCache(layout, 2, torch.zeros(3 * layout.block_numel, dtype=layout.storage))
    keys, values = cache.layers[1].keys, cache.layers[1].values
    page = keys.pages_per_block  # of the first block behind that of padding
    row = page * layout.block_size + 1
    keys.write(torch.tensor([row]), torch.arange(24.0)[None])
    for found in (values.rows_RD[row], values.pages_PSD[page, 1], values.blocks_NHSD[1, 0, 1]):
        assert torch.equal(found.float(), torch.arange(16.0))
    for other in (0, 2):
        assert not cache.layers[other].keys.blocks_NHSD.float().any()
        assert not cache.layers[other].values.blocks_NHSD.float().any()


@pytest.mark.parametrize(
    ("num_layers", "expanded", "latents", "factor"),
    [
        (61, LayerShape(128, 192, 128), LayerShape(1, 576, 512, value_is_key_part=True), 71.1),
        (27, LayerShape(16, 192, 128), LayerShape(1, 576, 512, value_is_key_part=True), 8.9),
        (47, LayerShape(20, 256, 256), LayerShape(1, 576, 512, value_is_key_part=True), 17.8),
        (62, LayerShape(40, 96, 64), LayerShape(1, 288, 256, value_is_key_part=True), 22.2),
    ],
    ids=["DeepSeek V3", "DeepSeek V2 Lite", "GLM-4.7-Flash", "MiniCPM3"],
)
def test_as_many_more_sequences_fit_as_a_row_is_smaller(
    num_layers: int, expanded: LayerShape, latents: LayerShape, factor: float
) -> None:
    num_bytes = [
        BlockLayout(
            layers=dict.fromkeys(range(num_layers), shape), block_size=16, dtype=torch.bfloat16
        ).block_bytes
        for shape in (expanded, latents)
    ]
    assert num_bytes[0] / num_bytes[1] == pytest.approx(factor, abs=0.05)


def test_a_model_that_compresses_keeps_its_latents_alone(checkpoints: MakeCheckpoint) -> None:
    _, facts = load_worker(checkpoints("deepseek_v3"), num_blocks=9)
    # 3 layers of 16 numbers and 8 rotated ones, of 4 bytes, in 10 blocks of 4 tokens. Expanded: 4 x 36 each.
    assert facts.kv_cache_bytes == 10 * 4 * 3 * (16 + 8) * 4


def test_kimi_k2_is_served_as_the_family_that_it_is(
    checkpoints: MakeCheckpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "kimi"
    folder.mkdir()
    for file in checkpoints("deepseek_v3").iterdir():
        content = file.read_bytes()
        if file.name == "config.json":
            content = content.replace(b'"deepseek_v3"', b'"kimi_k2"')
        (folder / file.name).write_bytes(content)
    with caplog.at_level("INFO"):
        kind = find_kind(WorkerConfig(model_path=str(folder)))
    assert kind.checkpoint_config["model_type"] == "deepseek_v3"
    assert "model_type kimi_k2 is served as deepseek_v3" in caplog.text
    assert load_worker(folder)[1].model_type == "deepseek_v3"


@pytest.mark.night
def test_every_class_that_expands_latents_has_the_parts_that_are_read() -> None:
    """These are names of transformers: a release that renames one would expand latents again."""
    found = []
    for package in pkgutil.iter_modules(transformers.models.__path__):
        source = Path(transformers.models.__path__[0]) / package.name / f"modeling_{package.name}.py"
        if source.is_file() and "def expand_kv(" in source.read_text(encoding="utf-8"):
            found.append(
                importlib.import_module(f"transformers.models.{package.name}.modeling_{package.name}")
            )
    assert len(found) >= 7
    for module in found:
        text = Path(str(module.__file__)).read_text(encoding="utf-8")
        for name in ("self.kv_b_proj = nn.Linear(", "self.qk_nope_head_dim = ", "self.v_head_dim = "):
            assert name in text, module.__name__


@pytest.mark.parametrize("is_arranged", [False, True])
def test_one_product_absorbs_and_expands_as_its_two_parts(*, is_arranged: bool) -> None:
    weight = nn.Parameter(torch.randn(NUM_HEADS * (PLAIN + VALUE), LATENT), requires_grad=False)
    expansion = LatentExpansion(weight, SIZES)
    if is_arranged:
        expansion.arrange()
    latent, query = torch.randn(LATENT), torch.randn(NUM_HEADS, 1, PLAIN + ROTATED)
    expanded = expansion(latent).view(NUM_HEADS, PLAIN + VALUE)
    absorbed = expansion.absorb(query)
    assert torch.equal(absorbed[..., LATENT:], query[..., PLAIN:])
    scores = (absorbed[:, 0, :LATENT] * latent).sum(dim=-1)
    torch.testing.assert_close(scores, (query[:, 0, :PLAIN] * expanded[:, :PLAIN]).sum(dim=-1))
    values = expansion.expand(latent.expand(1, NUM_HEADS, -1))
    torch.testing.assert_close(values[0], expanded[:, PLAIN:])


def test_values_of_eight_bits_have_the_scale_of_the_keys_that_they_lie_in() -> None:
    latents = LayerShape(1, 24, 16, value_is_key_part=True)
    layout = BlockLayout(layers={0: latents}, block_size=4, dtype=FLOAT8, scales={0: (0.5, 4.0)})
    layer = KVCache(layout, 1, torch.zeros(2 * layout.block_numel, dtype=layout.storage)).layers[0]
    layer.keys.write(torch.tensor([5]), torch.arange(24.0)[None])
    assert torch.equal(layer.values.rows_RD[5].float() * layer.values.scale, torch.arange(16.0))


@pytest.mark.night
def test_a_cache_of_eight_bits_keeps_latents(checkpoints: MakeCheckpoint) -> None:
    """The check at load compares its logits with the model's own."""
    for family in ("deepseek_v3", "deepseek_v32"):
        _, facts = load_worker(checkpoints(family), num_blocks=9, kv_cache_dtype="fp8", cpu_kernels="off")
        assert facts.kv_cache_bytes == 10 * 4 * 3 * (16 + 8 + (24 if family == "deepseek_v32" else 0))

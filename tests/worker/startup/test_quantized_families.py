"""Quantized checkpoints give the tokens of the plain ones that they stand for, in every way of a step."""

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.families import MATRIX
from tests.gguf_checkpoints import write_gguf
from tests.quantized_checkpoints import quantize, write_quantized
from tests.tiers import by_day
from tests.worker.conftest import BLOCK_SIZE, load_worker
from tests.worker.family_formats import build, formats_of, likeliest
from tests.worker.family_trial import tiny_config
from tests.worker.plan_driver import PlanDriver
from tests.worker.transformers_generate import reference
from worker.checkpoint.gguf.folder import folder_of
from worker.devices.device import open_device
from worker.load.loader import load_model
from worker.load.model_kind import find_kind
from worker.load.weight_files import foreseen_weights
from worker.progress import LoadStage
from worker.worker import Worker
from worker.worker_config import WorkerConfig
from worker.worker_errors import StartupError

NUM_TOKENS = 6
LONG = [(7 * index + 3) % 300 for index in range(29)]


class Gguf(NamedTuple):
    """Types of the tensors of a GGUF file, by the end of the module's name."""

    family: str
    kinds: dict[str, str]
    is_tied: bool = False


MIXED = {"": "Q4_K", "v_proj": "Q6_K", "down_proj": "Q6_K", "embed_tokens": "Q6_K"}
"""Types as llama.cpp writes them in most files: merged projections are of different types."""
GGUF_CASES = {
    "gguf Q4_0": Gguf("llama", {"": "Q4_0", "lm_head": "Q6_K"}),
    "gguf Q4_K": Gguf("qwen2", MIXED, is_tied=True),
    "gguf Q8_0": Gguf("qwen3", {"": "Q8_0", "lm_head": "F16"}),
    "gguf Q5_K": Gguf("gemma2", {"": "Q5_K", "up_proj": "Q5_0", "gate_proj": "Q5_1"}, is_tied=True),
    "gguf Q4_1": Gguf("gemma3_text", {"": "Q4_1", "o_proj": "BF16"}, is_tied=True),
    "gguf F32": Gguf("llama", {"": "F32", "embed_tokens": "F16"}, is_tied=True),
    "gguf IQ4_XS": Gguf("smollm3", {"": "IQ4_XS", "down_proj": "IQ4_NL"}),
    "gguf Q8_0 of multipliers": Gguf("granite", {"": "Q8_0"}, is_tied=True),
    "gguf Q4_K of experts": Gguf("qwen3_moe", MIXED),
    "gguf Q4_0 of experts": Gguf("mixtral", {"": "Q4_0"}),
    "gguf BF16 of experts": Gguf("qwen3_moe", {"": "BF16"}),
    "gguf Q4_K of states": Gguf("qwen3_5_text", MIXED, is_tied=True),
    "gguf Q4_0 of states and experts": Gguf("qwen3_5_moe_text", {"": "Q4_0", "out_proj": "Q5_1"}),
    "gguf Q8_0 of states and experts": Gguf("qwen3_next", {"": "Q8_0"}),
    "gguf Q4_K of four norms": Gguf("gemma4_text", MIXED, is_tied=True),
    "gguf Q5_0 of four norms and experts": Gguf("gemma4_experts", {"": "Q5_0"}, is_tied=True),
    "gguf MXFP4": Gguf(
        "gpt_oss", {"": "Q8_0", "experts.gate_up_proj": "MXFP4", "experts.down_proj": "MXFP4"}
    ),
    "gguf F16 of interleaved experts": Gguf("gpt_oss", {"": "F16"}),
    "gguf Q4_K of merged gates": Gguf("glm4", MIXED),
    "gguf IQ4_XS of shared experts": Gguf("glm4_moe", {"": "IQ4_XS"}),
    "gguf Q8_0 of latents": Gguf("deepseek_v2", {"": "Q8_0"}),
    "gguf Q4_0 of latents": Gguf("deepseek_v3", {"": "Q4_0", "down_proj": "Q5_0"}),
    "gguf Q4_K of merged projections": Gguf("phi3", MIXED),
    "gguf Q6_K of scaled queries": Gguf("ministral3", {"": "Q6_K"}),
    "gguf IQ4_NL of convolutions": Gguf("lfm2", {"": "IQ4_NL"}, is_tied=True),
    "gguf Q4_K of stacks read as numbers": Gguf("llama4_scout", {"": "Q4_K"}),
    "gguf Q4_1 of norms behind": Gguf("olmo2", {"": "Q4_1"}),
    "gguf Q4_K of angles in windows alone": Gguf("exaone4", MIXED),
    "gguf Q4_K of layers without windows": Gguf("exaone4_full", MIXED, is_tied=True),
    "gguf Q5_0 of biases of heads": Gguf("seed_oss", {"": "Q5_0"}),
    "gguf Q6_K of neighbouring angles": Gguf("ernie4_5", {"": "Q6_K"}, is_tied=True),
    "gguf Q4_0 of convolutions and experts": Gguf("lfm2_moe", {"": "Q4_0"}, is_tied=True),
}
SHORT = [40, 41, 42, 43, 44]
CASES = (
    *(("llama", name) for name in ("int4", "int4 with zeros", "int4 by channel", "awq", "gptq", "gptq v2")),
    *(("qwen3", name) for name in ("int8", "float8", "nvfp4", "fp8")),
    *(("qwen3_moe", name) for name in ("int4 with zeros", "awq", "fp8")),
    ("mixtral", "gptq"),
    *(("deepseek_v3", name) for name in ("fp8", "int4")),
    ("gpt_oss", "mxfp4"),
    ("gpt_oss", "int8"),
    *(("llama", name) for name in ("auto-round", "nf4", "torchao int4", "torchao float8")),
    *(("qwen3", name) for name in ("modelopt nvfp4", "llm.int8")),
    *(("qwen3_moe", name) for name in ("modelopt nvfp4", "nf4")),
    *((case.family, name) for name, case in GGUF_CASES.items()),
)

BY_DAY = (
    *(("llama", "int4 with zeros"), ("llama", "gptq"), ("qwen3", "nvfp4"), ("qwen3", "fp8")),
    *(
        ("llama", "nf4"),
        ("qwen3_moe", "awq"),
        ("gpt_oss", "mxfp4"),
        ("qwen2", "gguf Q4_K"),
        ("gemma2", "gguf Q5_K"),
        ("qwen3_moe", "gguf Q4_K of experts"),
        ("qwen3_5_text", "gguf Q4_K of states"),
        ("gpt_oss", "gguf MXFP4"),
        ("llama4_scout", "gguf Q4_K of stacks read as numbers"),
    ),
)
"""Each way in which codes are stored; tests/worker/quantized reads every format."""


@pytest.fixture(scope="module", params=by_day(CASES, BY_DAY), ids=" ".join)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    family, name = request.param
    root = tmp_path_factory.mktemp("quantized")
    if name not in GGUF_CASES:
        return write_quantized(family, name, root)
    path, plain = write_gguf(family, GGUF_CASES[name].kinds, root, is_tied=GGUF_CASES[name].is_tied)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_CACHE_HOME", str(root))
        return folder_of(path), plain


@pytest.fixture(scope="module")
def started(folders: tuple[Path, Path]) -> tuple[Worker, list[str]]:
    """A worker, and what its start logged."""
    logger, lines = logging.getLogger("worker"), BufferingHandler(capacity=1000)
    before = logger.level
    logger.setLevel(logging.INFO)  # it forgets which levels loggers below it have found to be off
    logger.addHandler(lines)
    try:
        worker, _ = load_worker(folders[0], swap_space_bytes=1 << 20)
    finally:
        logger.removeHandler(lines)
        logger.setLevel(before)
    return worker, [record.getMessage() for record in lines.buffer]


@pytest.fixture
def driver(started: tuple[Worker, list[str]]) -> Iterator[PlanDriver]:
    driver = PlanDriver(started[0], BLOCK_SIZE)
    yield driver
    driver.release_all()


def test_prompts_in_chunks_beside_others_give_the_tokens_of_the_plain_checkpoint(
    folders: tuple[Path, Path], driver: PlanDriver
) -> None:
    decoding, chunked = driver.add(SHORT), driver.add(LONG)
    driver.step({decoding: None})
    for num_tokens in (6, 1, 13):
        driver.step({chunked: num_tokens, decoding: None})
    driver.generate([decoding, chunked], NUM_TOKENS)
    answers = [driver.generated(each) for each in (chunked, decoding)]
    assert answers == likeliest(reference(folders[1]), answers, [LONG, SHORT])


def test_preempted_swapped_and_sharing_sequences_give_the_tokens_of_the_plain_checkpoint(
    folders: tuple[Path, Path], driver: PlanDriver
) -> None:
    victim, swapped = driver.add(LONG), driver.add(SHORT)
    driver.step({victim: 20})  # a state is shared where a share ended
    for _ in range(3):
        driver.step({victim: None, swapped: None})
    sharer = driver.add([*LONG[:22], *SHORT], shares_with=victim)
    driver.step({sharer: None})
    driver.preempt(victim)
    driver.swap_out(swapped)
    driver.step({sharer: None})
    driver.generate([victim, swapped, sharer], NUM_TOKENS)
    answers = [driver.generated(each) for each in (victim, swapped, sharer)]
    assert answers == likeliest(reference(folders[1]), answers, [LONG, SHORT, [*LONG[:22], *SHORT]])


def test_logits_are_those_of_the_plain_checkpoint(folders: tuple[Path, Path]) -> None:
    config = WorkerConfig(model_path=str(folders[0]), dtype="float32", device="cpu", num_threads=1)
    loaded = load_model(config, find_kind(config), open_device(config), LoadStage())
    plain = reference(folders[1])
    with torch.inference_mode():
        ids = torch.tensor([LONG])
        loaded.model.set_attn_implementation("eager")
        found, exact = loaded.model(ids, use_cache=False).logits, plain(ids).logits
    assert (found - exact).abs().max() <= 1e-4 * exact.abs().max()
    assert loaded.num_parameters == sum(each.numel() for each in plain.parameters())
    foreseen = foreseen_weights(config, find_kind(config), open_device(config)).total
    assert abs(foreseen - loaded.weight_bytes) <= 0.05 * foreseen


def test_the_start_says_what_each_kind_of_weight_is_computed_with(
    folders: tuple[Path, Path], started: tuple[Worker, list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    messages = started[1]
    if "nf4" in folders[0].name:
        # No kernel looks up numbers that bfloat16 lacks: those of NF4 are exact by torch alone.
        with caplog.at_level(logging.INFO):
            load_worker(folders[0], dtype="bfloat16")
        messages = caplog.messages
    lines = [line for line in messages if " weights of " in line]
    assert lines or "quantization_config" not in json.loads((folders[0] / "config.json").read_text())
    for line in lines:
        assert "by kernels" in line
        assert "slowly" not in line


# What a family does with its layers by itself: reads their dtype, merges them, has experts without gates,
# multiplies by a weight; or what is done for it behind a product of queries.
OWN_CODE = {
    "llama4": {},
    "glm_moe_dsa": {},
    "minimax_m3_vl": {},
    "nemotron_h": {},
    "jamba": {"mamba_dt_rank": 16},
}


@pytest.mark.parametrize("name", by_day(OWN_CODE, ["minimax_m3_vl"]))
def test_a_family_whose_code_knows_its_layers_is_served_in_codes(tmp_path: Path, name: str) -> None:
    [family] = [each for each in MATRIX if each.name == name]
    changed = replace(family, settings=family.settings | OWN_CODE[name])
    assert formats_of(changed, tmp_path, ["fp8"]) == ["fp8"]


@pytest.mark.night
def test_a_layer_of_which_only_a_part_is_quantized_is_refused_by_name(tmp_path: Path) -> None:
    [family] = [each for each in MATRIX if each.name == "minimax_m3_vl"]
    plain, quantized = tmp_path / "plain", tmp_path / "quantized"
    build(tiny_config(family)).save_pretrained(plain)
    numbers = load_file(plain / "model.safetensors")
    quantize(plain, quantized, "int8")
    tensors = load_file(quantized / "model.safetensors")
    ending = "layers.0.block_sparse_moe.shared_experts.up_proj"
    [part] = [name for name in tensors if name.endswith(f"{ending}.weight_scale")]
    module = part.removesuffix(".weight_scale")
    tensors = {key: each for key, each in tensors.items() if not key.startswith(f"{module}.")}
    save_file(tensors | {f"{module}.weight": numbers[f"{module}.weight"]}, quantized / "model.safetensors")
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"]["ignore"].append(module)
    (quantized / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        StartupError, match=r"gate_proj is quantized, and other parts of .*gate_up_proj are not"
    ):
        load_worker(quantized)

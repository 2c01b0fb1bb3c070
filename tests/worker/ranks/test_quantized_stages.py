"""Stages of models whose ends are codes: the embedding on the first stage, the output layer on the last."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.checkpoints import make_checkpoint
from tests.gguf_checkpoints import write_gguf
from tests.worker.ranks.divided import DividedWorker
from tests.worker.ranks.histories import a_busy_hour, check_busy_hour, config_of, load_alone, load_divided
from worker.checkpoint.gguf.folder import folder_of
from worker.cpu.kernel_build import CannotBuild, build_library, find_library
from worker.cpu.native import Kernels
from worker.cpu.toolkit import CpuToolkit
from worker.cpu.unfused import PackedOutput
from worker.devices.device import open_device
from worker.model.linear import Linear, linear_of
from worker.model.quantization import round_to_int4
from worker.model.quantized_layers import QuantizedEmbedding, QuantizedLinear
from worker.model.stage_layers import drop_ends
from worker.quantized.grouped_weight import GroupedWeight
from worker.ranks.stage import Stage

pytestmark = pytest.mark.night


@pytest.fixture
def last_stage(folder: Path) -> Any:
    """A model of which only the last stage's end is left; that and the embedding were codes."""
    config = AutoConfig.from_pretrained(make_checkpoint("llama", folder / "ends"))
    model = AutoModelForCausalLM.from_config(config)
    output = model.get_output_embeddings()
    codes = round_to_int4(linear_of(output) or Linear.of(output.weight, None)).weight
    assert isinstance(codes, GroupedWeight)
    model.set_output_embeddings(QuantizedLinear(output))
    model.get_output_embeddings().fill(codes)
    model.set_input_embeddings(QuantizedEmbedding(model.get_input_embeddings()))
    drop_ends(model, Stage(1, 2))
    return model


def test_a_stage_without_the_embedding_begins_with_zeros(last_stage: Any) -> None:
    found = last_stage.get_input_embeddings()(torch.tensor([[1, 2, 3]]))
    assert torch.equal(found, torch.zeros(1, 3, last_stage.config.hidden_size))


def test_the_last_stage_packs_an_output_layer_of_codes(last_stage: Any, folder: Path) -> None:
    try:
        kernels = Kernels(find_library() or build_library(), 1)
    except CannotBuild as error:
        pytest.skip(str(error))
    CpuToolkit(kernels, open_device(config_of(folder))).replace_others(last_stage, 64)
    assert isinstance(last_stage.get_output_embeddings(), PackedOutput)


@pytest.mark.parametrize(("family", "is_tied"), [("llama", False), ("gemma3_text", True)])
def test_stages_of_a_gguf_file_sample_the_tokens_of_one_process(
    two_stages: DividedWorker, tmp_path: Path, family: str, is_tied: bool
) -> None:
    file, _ = write_gguf(family, {"": "Q4_K", "down_proj": "Q6_K"}, tmp_path, is_tied=is_tied)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_CACHE_HOME", str(tmp_path))
        checkpoint = folder_of(file)
    expected = a_busy_hour(load_alone(checkpoint)[0])
    load_divided(two_stages, checkpoint)
    check_busy_hour(two_stages, expected)

"""The check at load refuses what computes something else, and not what is rounded in another order."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.quantized_checkpoints import write_quantized
from tests.worker.conftest import load_worker
from worker.cpu.cpu_attention import CpuAttention
from worker.worker_errors import StartupError


@pytest.fixture(scope="module")
def cancelling(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Checkpoints of the same numbers whose reference in bfloat16 is off by a third in the last token."""
    return write_quantized("llama", "gptq v2", tmp_path_factory.mktemp("cancelling"))


@pytest.mark.parametrize("place", [0, 1], ids=["codes", "plain"])
def test_a_model_starts_of_which_one_token_is_lost_to_rounding(
    cancelling: tuple[Path, Path], place: int
) -> None:
    _, facts = load_worker(cancelling[place], dtype="bfloat16")
    assert facts.dtype == "bfloat16"


@pytest.mark.parametrize(
    "fault", [lambda x: x.roll(1, dims=1), lambda x: x * torch.nan], ids=["other numbers", "not numbers"]
)
@pytest.mark.parametrize("num_tokens", [1, 4, 7])
def test_kernels_that_are_wrong_in_steps_of_one_size_are_refused(
    cancelling: tuple[Path, Path],
    num_tokens: int,
    fault: Callable[[Tensor], Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_layer = CpuAttention.run_layer

    def run_wrongly(self: CpuAttention, layer: Any, layer_idx: int, hidden_TH: Tensor, given: Any) -> None:
        run_layer(self, layer, layer_idx, hidden_TH, given)
        if len(hidden_TH) == num_tokens:
            hidden_TH.copy_(fault(hidden_TH))

    monkeypatch.setattr(CpuAttention, "run_layer", run_wrongly)
    with pytest.raises(StartupError, match="computes other logits with the CPU kernels"):
        load_worker(cancelling[1], dtype="bfloat16")

"""The check at load refuses what computes something else, and not what is rounded in another order."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from scheduler.cache_groups import CacheGroup
from tests.quantized_checkpoints import write_quantized
from tests.worker.conftest import load_worker
from worker.attention.interface import AttentionBackend
from worker.attention.kv_cache import FLOAT8, KVCache
from worker.cpu.attention import CpuAttention
from worker.devices.device import Device
from worker.load.loader import LoadedModel
from worker.ranks.ranks import ALONE
from worker.startup.self_check import LONGEST_CHECK, SelfCheck
from worker.steps.tokens import StepOutcome, StepTokens
from worker.worker_errors import FamilyRefused, StartupError


class _Model:
    """Its last token's logits are others through the cache, however it is cut."""

    def __init__(self, num_tokens: int) -> None:
        self.own = torch.randn(num_tokens, 8, generator=torch.Generator().manual_seed(0))
        self.steps: list[int] = []

    def forward(self, tokens: StepTokens, _: Any) -> StepOutcome:
        self.steps.append(tokens.position_ids.shape[1])
        paged = self.own.clone()
        paged[-1] *= 2
        return StepOutcome(paged[tokens.position_ids[0]])

    def forward_alone(self, input_ids_1T: Tensor) -> Tensor:
        return self.own


def run_check(
    dtype: torch.dtype, cache_dtype: torch.dtype | None = None, num_tokens: int = LONGEST_CHECK
) -> list[int]:
    """Run the check with a last token that differs. Returns the tokens of each step."""
    model = _Model(num_tokens)
    transformer = SimpleNamespace(set_attn_implementation=lambda name: None)
    check = SelfCheck(
        loaded=cast(
            LoadedModel,
            SimpleNamespace(model=transformer, model_type="any", dtype=dtype, ranks=ALONE, vocab_size=100),
        ),
        runner=model,
        backend=cast(AttentionBackend, SimpleNamespace(begin_step=lambda metadata: None)),
        cache=cast(
            KVCache,
            SimpleNamespace(
                num_blocks=8,
                most_tokens=8 * 16,
                layout=SimpleNamespace(block_size=16, dtype=cache_dtype or dtype, groups=(CacheGroup(),)),
            ),
        ),
        device=cast(Device, SimpleNamespace(tensor=torch.from_numpy)),
        max_model_len=num_tokens,
    )
    check.run()
    return model.steps


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [(torch.bfloat16, None), (torch.float16, None), (torch.float32, FLOAT8)],
    ids=["bfloat16", "float16", "fp8 cache"],
)
def test_a_model_starts_of_which_one_token_is_lost_to_rounding(
    dtype: torch.dtype, cache_dtype: torch.dtype | None
) -> None:
    assert run_check(dtype, cache_dtype) == [7, 4, 1, 7, 2, 1, 1, 1]


def test_float32_loses_no_token_to_rounding() -> None:
    with pytest.raises(FamilyRefused, match="computes other logits through the paged KV cache"):
        run_check(torch.float32)


@pytest.mark.parametrize("num_tokens", [2, 3])
def test_one_of_two_decodes_that_is_wrong_is_refused(num_tokens: int) -> None:
    with pytest.raises(FamilyRefused, match="computes other logits through the paged KV cache"):
        run_check(torch.bfloat16, num_tokens=num_tokens)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_quantized("llama", "gptq v2", tmp_path_factory.mktemp("plain"))[1]


@pytest.mark.parametrize(
    "fault", [lambda x: x.roll(1, dims=1), lambda x: x * torch.nan], ids=["other numbers", "not numbers"]
)
@pytest.mark.parametrize("num_tokens", [1, 4, 7])
def test_kernels_that_are_wrong_in_steps_of_one_size_are_refused(
    checkpoint: Path, num_tokens: int, fault: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_wrong(name: str) -> None:
        run = getattr(CpuAttention, name)

        def run_wrongly(self: CpuAttention, layers: Any, hidden_TH: Tensor, angles: Any) -> None:
            run(self, layers, hidden_TH, angles)
            if len(hidden_TH) == num_tokens:
                hidden_TH.copy_(fault(hidden_TH))

        monkeypatch.setattr(CpuAttention, name, run_wrongly)

    make_wrong("run_layer")
    make_wrong("run_layers")
    with pytest.raises(StartupError, match="computes other logits with the CPU kernels"):
        load_worker(checkpoint, dtype="bfloat16")
    # Where the options round weights, that is the likelier reason.
    with pytest.raises(StartupError, match=r"rounded as the options ask, llama .* few bits lose this model"):
        load_worker(checkpoint, dtype="bfloat16", quantization="int8")

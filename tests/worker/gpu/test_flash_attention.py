"""FlashAttention 3 attends where a trial at load found it right and faster; here a stand-in computes."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.worker.gpu import attention_library
from tests.worker.gpu.attention_library import Changed, Stopwatch, attend_causally
from tests.worker.gpu.test_attention_kernels import Case, Step, assert_close
from worker.attention.interface import SeenPictures
from worker.attention.kv_cache import KVCache
from worker.devices.device import Device
from worker.gpu.attention import choose_attention
from worker.gpu.state_kernels.executor import GpuStatesInWaves
from worker.gpu.trials import flash_attention
from worker.gpu.trials.attention_trial import LibraryAttention
from worker.gpu.trials.flash_attention import FlashAttention3
from worker.gpu.triton_attention import TritonAttention
from worker.states.interface import StateShape
from worker.states.state_layout import StateLayout

STEP = Case([(20, 1), (3, 1), (9, 5)], dtype=torch.float16, softcap=20.0)
DECODES = Case([(20, 1), (3, 1)], dtype=torch.float16, softcap=20.0)


class StandIn:
    """Computes as the library documents: causal from the bottom right corner, no padding rows."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.change: Callable[[Tensor], Tensor] = lambda out_THD: out_THD

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cache_seqlens: Tensor,
        page_table: Tensor,
        cu_seqlens_q: Tensor,
        max_seqlen_q: int,
        softmax_scale: float,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
    ) -> Tensor:
        self.num_calls += 1
        assert causal
        assert window_size == (-1, -1)
        assert {each.dtype for each in (cache_seqlens, page_table, cu_seqlens_q)} == {torch.int32}
        assert k_cache.stride(-1) == v_cache.stride(-1) == 1
        assert len(page_table) == len(cache_seqlens) == len(cu_seqlens_q) - 1
        out = torch.full_like(q, torch.nan)
        starts = cu_seqlens_q.tolist()
        for row, (start, end) in enumerate(pairwise(starts)):
            num_keys = int(cache_seqlens[row])
            assert end - start <= max_seqlen_q
            blocks = page_table[row, : -(-num_keys // k_cache.shape[1])].long()
            keys, values = (each[blocks].flatten(0, 1)[:num_keys] for each in (k_cache, v_cache))
            out[start:end] = attend_causally(q[start:end], keys, values, softmax_scale, softcap)
        return self.change(out)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in, module = StandIn(), ModuleType("flash_attn_interface")
    module.flash_attn_with_kvcache = stand_in.flash_attn_with_kvcache  # type: ignore[attr-defined]
    module.__spec__ = type(sys.__spec__)("flash_attn_interface", None)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    return stand_in


OF_VLLM = "worker.gpu.trials.vllm_flash_attention"
SCHEMA = (
    "fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, "
    "Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, "
    "Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, "
    "Tensor? k_descale, Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left, "
    "int window_size_right, float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, "
    "int num_splits, bool? pack_gqa, int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, "
    "Tensor? cp_tot_seqused_k{}) -> Tensor[]"
)
"""Schema of the library of vLLM 0.24, with what a later one may add."""


@pytest.fixture
def of_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], StandIn]]:
    """Install a vLLM of which the library alone can be loaded; returns what registers its function."""
    stand_in, loaded = StandIn(), list[str]()
    library = tmp_path / "vllm" / "vllm_flash_attn" / "_vllm_fa3_C.abi3.so"
    library.parent.mkdir(parents=True)
    library.touch()
    (tmp_path / "vllm" / "__init__.py").write_text("raise AssertionError('vLLM is loaded')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, OF_VLLM, raising=False)
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)

    def register(more: str) -> StandIn:
        torch.library.define("_vllm_fa3_C::fwd", SCHEMA.format(more).removeprefix("fwd"), lib=namespace)
        names = [each.name for each in torch.ops._vllm_fa3_C.fwd.default._schema.arguments]

        def fwd(*values: Any) -> list[Tensor]:
            given = {name: value for name, value in zip(names, values, strict=True) if value is not None}
            tensors = {"cache_seqlens": given.pop("seqused_k"), "page_table": given.pop("page_table")}
            window = given.pop("window_size_left"), given.pop("window_size_right")
            assert (given.pop("is_rotary_interleaved"), given.pop("num_splits")) == (True, 0)
            assert (given.pop("sm_margin"), given.pop("cp_world_size"), given.pop("cp_rank")) == (0, 1, 0)
            keys, values_ = given.pop("k"), given.pop("v")
            return [
                stand_in.flash_attn_with_kvcache(
                    given.pop("q"), keys, values_, causal=given.pop("is_causal"), window_size=window,
                    **tensors, **given,
                )
            ]  # fmt: skip

        namespace.impl("fwd", fwd, "CPU")
        return stand_in

    with torch.library._scoped_library("_vllm_fa3_C", "FRAGMENT") as namespace:
        yield register
    assert loaded in ([], [str(library)])


def tried(case: Case, device: Stopwatch) -> tuple[Step, LibraryAttention]:
    step = Step(case)
    return step, attention_library.tried(step, FlashAttention3, device)


@pytest.mark.parametrize(
    ("case", "sizes"), [(STEP, (0, 6, 12)), (DECODES, (4, 4, 4))], ids=["mixed", "decodes"]
)
def test_steps_that_passed_the_trial_are_the_librarys_and_padding_gets_zeros(library, case, sizes):
    step, backend = tried(case, Stopwatch(2.0, 1.0))
    step.triton, before = backend, library.num_calls
    num_decodes, num_sequences, num_tokens = sizes
    found = step.attend_padded(num_decodes=num_decodes, num_sequences=num_sequences, num_tokens=num_tokens)
    num_real = step.query.shape[1]
    assert library.num_calls == before + 1
    assert_close(found[:num_real], step.expected())
    assert not found[num_real:].any()


def test_a_step_with_pictures_that_are_seen_whole_is_left_to_our_kernels(library):
    step, backend = tried(STEP, Stopwatch(2.0, 1.0))
    seen = SeenPictures(np.array([0, 0, 0, 13, 13, 13, 0]), in_windows_only=False)
    step.triton = Changed(backend, lambda batch: batch.with_pictures(seen, step.device))
    step.metadata, before = replace(step.metadata, pictures=seen), library.num_calls
    found = step.attend_padded(num_decodes=0, num_sequences=len(STEP.shares), num_tokens=step.query.shape[1])
    assert library.num_calls == before
    assert_close(found, step.expected())


def test_lines_of_the_tables_are_found_by_the_workers_rows(library):
    step, backend = tried(DECODES, Stopwatch(2.0, 1.0))
    order = torch.tensor([1, 0], dtype=torch.int32)
    step.triton = Changed(
        backend,
        lambda batch: batch._replace(
            block_tables_SCB=batch.block_tables_SCB[:, order.long()], table_rows_R=order
        ),
    )
    before = library.num_calls
    assert_close(step.attend_padded(num_decodes=2, num_sequences=2, num_tokens=2), step.expected())
    assert library.num_calls == before + 1


@pytest.mark.parametrize(
    ("change", "times", "words"),
    [
        (lambda out: out * 1.05, (2.0, 1.0), "is wrong by 5.0e-02"),
        (lambda out: out, (1.0, 1.0), "left"),
        (lambda out: out.view(-1, 7), (2.0, 1.0), "fails: shape"),
    ],
    ids=["wrong", "no faster", "refused"],
)
def test_our_kernels_stay_where_the_library_is_wrong_slow_or_refuses(library, change, times, words, caplog):
    caplog.set_level("INFO")
    library.change = change
    step, backend = tried(DECODES, Stopwatch(*times))
    assert words in caplog.text
    step.triton, before = backend, library.num_calls
    assert_close(step.attend_padded(num_decodes=2, num_sequences=2, num_tokens=2), step.expected())
    assert library.num_calls == before


def test_it_is_timed_and_taken_where_other_layers_are_recurrent(library):
    layout = StateLayout({0: StateShape(num_channels=16, num_columns=3)}, 1024)

    class Recurrent(FlashAttention3):
        def __init__(self, cache: KVCache, device: Device) -> None:
            super().__init__(cache, device)
            self.states = GpuStatesInWaves(torch.zeros(2, 256), layout, device)

    backend = attention_library.tried(Step(DECODES), Recurrent, Stopwatch(2.0, 1.0))
    assert list(backend._taken.values()) == [True]


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": torch.float32},
        {"window": 7},
        {"chunk": 8},
        {"has_sinks": True},
    ],
    ids=str,
)
def test_layers_that_it_does_not_take_are_never_given_to_it(library, changed, caplog):
    caplog.set_level("INFO")
    tried(STEP._replace(**changed), Stopwatch(2.0, 1.0))
    assert not library.num_calls
    assert ("is not given prompts of 2 KV heads of 8" in caplog.text) != ("dtype" in changed)


def test_a_version_with_another_signature_is_refused_with_the_reason(library, monkeypatch, caplog):
    def older(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor) -> None: ...

    monkeypatch.setattr(sys.modules["flash_attn_interface"], "flash_attn_with_kvcache", older)
    assert "has no cache_seqlens, page_table" in flash_attention.find_obstacle()
    assert choose_attention("fa3") is TritonAttention
    assert "--attention-backend fa3: flash_attn_with_kvcache of this version" in caplog.text


def test_without_the_library_our_kernels_attend(caplog):
    assert choose_attention("fa3") is TritonAttention
    assert "neither flash_attn_interface nor vLLM's library of it is installed" in caplog.text


def test_an_installed_library_is_opened(library):
    assert choose_attention("fa3") is FlashAttention3


@pytest.mark.parametrize("step", [STEP, DECODES], ids=["mixed", "decodes"])
def test_the_library_of_an_installed_vllm_attends_without_vllm(of_vllm, step):
    stand_in = of_vllm("")
    assert choose_attention("fa3") is FlashAttention3
    taken = tried(step, Stopwatch(2.0, 1.0))[1]._taken
    assert set(taken.values()) == {True}
    assert stand_in.num_calls


def test_a_vllm_whose_function_asks_for_more_is_refused_with_the_argument(of_vllm, caplog):
    of_vllm(", int num_mysteries")
    assert choose_attention("fa3") is TritonAttention
    assert "vLLM's FlashAttention 3 has other arguments: num_mysteries" in caplog.text

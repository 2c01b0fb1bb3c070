"""FlashInfer attends where a trial at load found it right and faster; here a stand-in computes.

It holds callers to what the library's code relies on and does not check.
"""

import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worker.gpu import attention_library
from tests.worker.gpu.attention_library import Changed, Stopwatch, attend_causally
from tests.worker.gpu.test_attention_kernels import LAYER, Case, Heads, Step, assert_close
from worker.attention.kv_cache import BlockLayout, KVCache, LayerShape
from worker.gpu import kernel_choice as gpu_kernel_choice
from worker.gpu.attention import choose_attention
from worker.gpu.trials import flashinfer
from worker.gpu.trials.attention_trial import LibraryAttention
from worker.gpu.trials.flashinfer import FlashInfer
from worker.gpu.triton_attention import TritonAttention
from worker.worker_config import WorkerConfig

HEADS = Heads(num_kv_heads=2, num_groups=3, key_dim=64, value_dim=64)
PROMPTS = Case([(20, 1), (3, 1), (9, 5)], HEADS, block_size=16, dtype=torch.float16)
DECODES = PROMPTS._replace(shares=[(20, 1), (3, 1)])
FULL_WORKSPACE_BYTES = flashinfer.WORKSPACE_BYTES
WORKSPACE_BYTES, COUNTER_BYTES = 1 << 12, 1 << 10
STEPS = pytest.mark.parametrize(
    ("case", "sizes"), [(PROMPTS, (0, 3, 7)), (DECODES, (2, 2, 2))], ids=["mixed", "decodes"]
)


class AlikeStep(Step):
    """A step of a model whose layers are alike."""

    def new_cache(self, dtype: torch.dtype) -> KVCache:
        heads = self.case.heads
        shape = LayerShape(heads.num_kv_heads, heads.key_dim, heads.value_dim)
        layout = BlockLayout(
            layers={0: shape, LAYER: shape, 9: shape}, block_size=self.case.block_size, dtype=dtype
        )
        memory = torch.full(((self.num_blocks + 1) * layout.block_numel,), torch.nan, dtype=dtype)
        return KVCache(layout, self.num_blocks, memory)


class StandIn:
    """Computes as the library's kernels do, from the tables and lengths that they find."""

    def __init__(self) -> None:
        self.card = 9
        self.given: list[dict[str, Any]] = []
        self.change: Callable[[Tensor], Tensor] = lambda out_THD: out_THD

    def get_compute_capability(self, device: torch.device) -> tuple[int, int]:
        return self.card, 0

    def xqa_batch_decode_with_kv_cache(
        self,
        query: Tensor,
        kv_cache: tuple[Tensor, Tensor],
        workspace_buffer: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        max_seq_len: int,
        bmm1_scale: float = 1.0,
        bmm2_scale: float = 1.0,
        window_left: int = -1,
        sinks: Tensor | None = None,
        kv_layout: str = "NHD",
        enable_pdl: bool | None = None,
    ) -> Tensor:
        self.given.append(dict(locals()))
        assert kv_layout == "HND"
        assert enable_pdl is False, "by default it may begin before our kernels have ended"
        # Only addresses of these reach the kernel.
        assert query.is_contiguous()
        assert block_tables.is_contiguous()
        assert {block_tables.dtype, seq_lens.dtype} == {torch.int32}
        assert (seq_lens > 0).all(), "it takes the one token off, without a sign"
        assert not workspace_buffer[:COUNTER_BYTES].any(), "its counters end as zero, and begin so"
        workspace_buffer[COUNTER_BYTES:] = 7
        out = torch.empty_like(query)
        for row, num_keys in enumerate(seq_lens.tolist()):
            pages = block_tables[row, : -(-num_keys // kv_cache[0].shape[2])].long()
            keys, values = (each[pages].transpose(1, 2).flatten(0, 1)[:num_keys] for each in kv_cache)
            out[row : row + 1] = attend_causally(query[row : row + 1], keys, values, bmm1_scale, 0.0)
        return self.change(out)

    def trtllm_fmha_v2_prefill(
        self,
        qkv: tuple[Tensor, Tensor],
        input_layout: str,
        workspace_buffer: Tensor,
        seq_lens: Tensor,
        max_q_len: int,
        max_kv_len: int,
        bmm1_scale: float,
        bmm2_scale: float,
        batch_size: int,
        cum_seq_lens_q: Tensor,
        cum_seq_lens_kv: Tensor,
        block_tables: Tensor | None = None,
        logits_soft_cap_scale: float | None = None,
        mask_mode: str = "causal",
    ) -> Tensor:
        self.given.append(dict(locals()))
        query, pages_P2HSD = qkv
        assert (input_layout, mask_mode, bmm2_scale) == ("Q_PAGED_KV_HND", "causal", 1.0)
        # Strides are found from shapes: the first page says where all others are.
        assert query.is_contiguous()
        assert pages_P2HSD.is_contiguous()
        assert block_tables is not None
        assert block_tables.is_contiguous()
        assert {each.dtype for each in (block_tables, cum_seq_lens_q, cum_seq_lens_kv)} == {torch.int32}
        assert len(block_tables) == len(cum_seq_lens_q) - 1 == len(cum_seq_lens_kv) - 1 == batch_size
        workspace_buffer[:4] = 7  # a counter of tiles, which it clears itself
        out = torch.full_like(query, torch.nan)
        kv_lens = cum_seq_lens_kv.diff().tolist()
        for row, (start, end) in enumerate(pairwise(cum_seq_lens_q.tolist())):
            assert end - start <= max_q_len
            assert kv_lens[row] <= max_kv_len
            pages = pages_P2HSD[block_tables[row, : -(-kv_lens[row] // pages_P2HSD.shape[3])].long()]
            keys, values = pages.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, : kv_lens[row]]
            softcap = logits_soft_cap_scale or 0.0
            out[start:end] = attend_causally(query[start:end], keys, values, bmm1_scale, softcap)
        return self.change(out)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    for name, function in (
        ("flashinfer", ""),
        ("flashinfer.decode", "xqa_batch_decode_with_kv_cache"),
        ("flashinfer.prefill", "trtllm_fmha_v2_prefill"),
        ("flashinfer.utils", "get_compute_capability"),
    ):
        module = ModuleType(name)
        module.__spec__ = type(sys.__spec__)(name, None)
        if function:
            setattr(module, function, getattr(stand_in, function))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", WORKSPACE_BYTES)
    return stand_in


def tried(case: Case, device: Stopwatch, step_type: type[Step] = AlikeStep) -> tuple[Step, LibraryAttention]:
    step = step_type(case)
    return step, attention_library.tried(step, FlashInfer, device)


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        (PROMPTS, (0, 6, 12)),
        (PROMPTS._replace(softcap=20.0), (0, 3, 7)),
        (DECODES, (4, 4, 4)),
    ],
    ids=["mixed", "soft cap", "decodes"],
)
def test_steps_that_passed_the_trial_are_the_librarys_and_padding_gets_zeros(library, case, sizes):
    step, backend = tried(case, Stopwatch(2.0, 1.0))
    step.triton, before = backend, len(library.given)
    num_decodes, num_sequences, num_tokens = sizes
    found = step.attend_padded(num_decodes=num_decodes, num_sequences=num_sequences, num_tokens=num_tokens)
    num_real = step.query.shape[1]
    assert len(library.given) == before + 1
    assert_close(found[:num_real], step.expected())
    assert not found[num_real:].any()


def test_lines_of_the_tables_are_found_by_the_workers_rows(library):
    step, backend = tried(DECODES, Stopwatch(2.0, 1.0))
    order = torch.tensor([1, 0], dtype=torch.int32)
    step.triton = Changed(
        backend,
        lambda batch: batch._replace(
            block_tables_SCB=batch.block_tables_SCB[:, order.long()], table_rows_R=order
        ),
    )
    assert_close(step.attend_padded(num_decodes=2, num_sequences=2, num_tokens=2), step.expected())


def test_no_more_queries_than_keys_are_foreseen(library):
    """A graph for many tokens has that bound for a sequence, however short sequences are."""
    step, backend = tried(PROMPTS, Stopwatch(2.0, 1.0))
    step.triton = Changed(backend, lambda batch: batch._replace(max_query_len=2048))
    step.attend_padded(num_decodes=0, num_sequences=3, num_tokens=7)
    assert library.given[-1]["max_q_len"] == library.given[-1]["max_kv_len"]


@STEPS
def test_the_host_gives_nothing_that_depends_on_what_a_step_holds(library, case, sizes):
    """A graph keeps what the host gave: lengths and tables have to be read from the step's own tensors."""

    def given_to(case: Case) -> dict[str, Any]:
        step, step.triton = tried(case, Stopwatch(2.0, 1.0))
        num_decodes, num_sequences, num_tokens = sizes
        step.attend_padded(num_decodes=num_decodes, num_sequences=num_sequences, num_tokens=num_tokens)
        return {name: _shape(value) for name, value in library.given[-1].items()}

    (longest, _), *others = case.shares
    shorter = [(longest - 3, 1), *((before // 2, now) for before, now in others)]
    assert given_to(case._replace(shares=shorter)) == given_to(case)


def _shape(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_shape(each) for each in value]
    return value.shape[1:] if isinstance(value, Tensor) else value


def test_each_function_works_in_memory_of_its_own(library):
    """One leaves counters in it that have to be zero again, the other does not."""
    step, backend = tried(PROMPTS, Stopwatch(2.0, 1.0))
    decodes = step.spans([(20, 21), (3, 4)], [0, 1])
    for metadata, num_tokens in ((decodes, 2), (step.metadata, 7), (decodes, 2)):
        backend.begin_step(metadata)
        tokens = (each[:, :num_tokens] for each in (step.query, step.key, step.value))
        backend.attend(LAYER, *tokens, step.options)
    assert len({each["workspace_buffer"].data_ptr() for each in library.given}) == 2


def reserved_for(backend: str) -> int:
    config = WorkerConfig(model_path="", attention_backend=backend)
    sizes = {"checkpoint_len": 64, "vocab_size": 9, "dtype": torch.float16}
    return gpu_kernel_choice.reserve(config, torch.nn.Linear(1, 1), **sizes).buffer_bytes


def test_its_memory_is_reserved_before_the_cache_is_sized(library):
    assert reserved_for("flashinfer") - reserved_for("triton") == 2 * FULL_WORKSPACE_BYTES


def test_nothing_is_reserved_for_a_library_that_is_not_there():
    assert reserved_for("flashinfer") == reserved_for("triton")


def refuse_to_compile(_out: Tensor) -> Tensor:
    raise subprocess.CalledProcessError(1, ["nvcc"])


@pytest.mark.parametrize(
    ("change", "times", "words"),
    [
        (lambda out: out * 1.05, (2.0, 1.0), "is wrong by 5.0e-02"),
        (lambda out: out, (1.0, 1.0), "left"),
        (refuse_to_compile, (2.0, 1.0), "fails: Command '['nvcc']' returned"),
    ],
    ids=["wrong", "no faster", "not compiled"],
)
@STEPS
def test_our_kernels_stay_where_the_library_is_wrong_slow_or_refuses(
    library, case, sizes, change, times, words, caplog
):
    caplog.set_level("INFO")
    library.change = change
    step, backend = tried(case, Stopwatch(*times))
    assert words in caplog.text
    step.triton, before = backend, len(library.given)
    num_decodes, num_sequences, num_tokens = sizes
    found = step.attend_padded(num_decodes=num_decodes, num_sequences=num_sequences, num_tokens=num_tokens)
    assert_close(found, step.expected())
    assert len(library.given) == before


@pytest.mark.parametrize(
    ("case", "card", "reason"),
    [
        (PROMPTS._replace(window=7), 9, "it sees a window or a chunk"),
        (PROMPTS._replace(has_sinks=True), 9, "it has sinks"),
        (PROMPTS._replace(heads=HEADS._replace(value_dim=128)), 9, "its heads have 64 and 128 numbers"),
        (PROMPTS._replace(heads=HEADS._replace(key_dim=80, value_dim=80)), 9, "its heads have 80 numbers"),
        (DECODES._replace(heads=HEADS._replace(key_dim=72, value_dim=72)), 9, "its heads have 72 numbers"),
        (DECODES._replace(heads=HEADS._replace(num_groups=33)), 9, "a KV head has 33 query heads"),
        (DECODES._replace(block_size=8), 9, "blocks have 8 tokens"),
        (DECODES._replace(softcap=20.0), 9, "its scores have a soft cap"),
        (DECODES, 8, "the compute capability is 8, not 9 or 10 or 12"),
        (PROMPTS, 10, "the compute capability is 10, not 9 or 12"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_layers_that_it_does_not_take_are_never_given_to_it(library, case, card, reason, caplog):
    caplog.set_level("INFO")
    library.card = card
    tried(case, Stopwatch(2.0, 1.0))
    assert not library.given
    assert f"KV heads of {case.heads.key_dim}: {reason}" in caplog.text


def test_prompts_of_layers_of_several_sizes_stay_ours(library, caplog):
    caplog.set_level("INFO")
    tried(PROMPTS, Stopwatch(2.0, 1.0), step_type=Step)
    assert not library.given
    assert "FlashInfer is not given prompts of 2 KV heads of 64: layers differ in size" in caplog.text


def test_a_version_with_another_signature_is_refused_with_the_reason(library, monkeypatch, caplog):
    def older(query: Tensor, kv_cache: Tensor, workspace_buffer: Tensor) -> None: ...

    monkeypatch.setattr(sys.modules["flashinfer.decode"], "xqa_batch_decode_with_kv_cache", older)
    assert "has no block_tables, seq_lens" in flashinfer.find_obstacle()
    assert choose_attention("flashinfer") is TritonAttention
    assert "--attention-backend flashinfer: xqa_batch_decode_with_kv_cache of this version" in caplog.text


def test_a_package_that_cannot_be_loaded_is_refused_with_the_reason(library, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "flashinfer.prefill", None)
    assert choose_attention("flashinfer") is TritonAttention
    assert "flashinfer.prefill cannot be loaded" in caplog.text


def test_without_the_library_our_kernels_attend(caplog):
    assert choose_attention("flashinfer") is TritonAttention
    assert "flashinfer is not installed; Triton's kernels attend" in caplog.text


def test_an_installed_library_is_opened(library):
    assert choose_attention("flashinfer") is FlashInfer

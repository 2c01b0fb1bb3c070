"""Kernels of sampling compute what their definitions say, also where lists overflow."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad

from scheduler.messages import SamplingParams
from tests.worker.gpu.cross_compile import SHARED_BYTES_LIMIT, Compiled, Kernel, compile_kernels
from worker.gpu.kernels.input_fill import fill_unknown_tokens, remember_tokens
from worker.gpu.sampling_kernels import truncation
from worker.gpu.sampling_kernels.token_draw import LogitRows, Workspace, draw
from worker.sampling.draw import BLOCK, Draw
from worker.sampling.draw import draw as draw_on_cpu
from worker.sampling.draw_fields import MIN_P, NUM_FIELDS, TEMPERATURE, TOP_K, TOP_P, UNIFORM

CPU = torch.device("cpu")


def drawn_by(logits_V: torch.Tensor, each: Draw) -> int:
    """Token that the kernels sample."""
    row = torch.zeros((1, NUM_FIELDS), dtype=torch.float64)
    row[0, [TEMPERATURE, MIN_P, TOP_K, TOP_P, UNIFORM]] = torch.tensor(
        [each.params.temperature, each.params.min_p, each.params.top_k, each.params.top_p, each.uniform],
        dtype=torch.float64,
    )
    outcome = torch.full((2, 1), -1)
    draw(LogitRows(logits_V[None], row), outcome, Workspace.allocate(1, len(logits_V), CPU))
    assert outcome[1].item() == 0
    return int(outcome[0])


def drawn_on_cpu(logits_V: torch.Tensor, each: Draw) -> int:
    logits_NW = pad(logits_V.float()[None], (0, -len(logits_V) % BLOCK), value=-torch.inf)
    return draw_on_cpu(logits_NW, logits_NW.amax(-1), [each])[0]


def some_draw(uniform: float = 0.73, **limits: float) -> Draw:
    return Draw(SamplingParams(**limits), uniform)


def flat_logits(vocab_size: int, *, num_levels: int, spread: float = 0.5) -> torch.Tensor:
    """Logits among which none stands out; with few levels, most are equal."""
    levels = torch.randint(num_levels, (vocab_size,), generator=torch.Generator().manual_seed(vocab_size))
    return levels.float() * spread / num_levels


@pytest.mark.parametrize(
    "limits",
    [
        {"top_p": 0.9},
        {"top_p": 0.02},
        {"top_k": 3000},
        {"top_k": 5000, "top_p": 0.6},
        {"top_k": 9000, "top_p": 0.999, "temperature": 0.3},
        {"top_p": 0.7, "min_p": 0.7},
    ],
)
@pytest.mark.parametrize("num_levels", [1, 3, 1 << 20])
def test_truncation_is_exact_where_the_list_of_candidates_overflows(limits, num_levels):
    """One level: the equals in question are more than can be listed. Many: they are found in a bracket."""
    logits_V = flat_logits(9001, num_levels=num_levels)
    for uniform in (0.31, 1 - 2.0**-53):
        each = some_draw(uniform=uniform, **limits)
        assert drawn_by(logits_V, each) == drawn_on_cpu(logits_V, each)


def test_candidates_that_turn_out_to_be_too_few_are_not_the_end_of_it():
    """The greatest are all in a few blocks, and top-p needs what is far below them."""
    logits_V = flat_logits(60_000, num_levels=1 << 20)
    logits_V[:300] += 4.0
    for uniform in (0.2, 0.97):
        each = some_draw(uniform=uniform, top_p=0.98)
        assert drawn_by(logits_V, each) == drawn_on_cpu(logits_V, each)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    st.integers(1, 700),
    st.sampled_from([0, 2, 5, 40, 300]),
    st.sampled_from([1.0, 0.95, 0.5, 1e-9]),
    st.sampled_from([0.0, 0.05]),
    st.sampled_from([1e-30, 0.3, 1.0, 5.0]),
    st.floats(0, 1, exclude_max=True),
)
def test_any_truncation_of_any_row(vocab_size, top_k, top_p, min_p, temperature, uniform):
    logits_V = (torch.randn(vocab_size, generator=torch.Generator().manual_seed(top_k)) * 8).round() / 4
    top_k = top_k if top_k < vocab_size else 0
    each = some_draw(uniform=uniform, top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    assert drawn_by(logits_V, each) == drawn_on_cpu(logits_V, each)


def test_a_share_of_the_mass_is_kept_up_to_the_token_that_completes_it():
    """Four equals: half of the mass is two of them, a little more is three."""
    logits_V = torch.tensor([0.0, -torch.inf, 0.0, 0.0, -torch.inf, 0.0])
    last = 1 - 2.0**-53
    assert drawn_by(logits_V, some_draw(uniform=last, top_p=0.5)) == 2
    assert drawn_by(logits_V, some_draw(uniform=last, top_p=0.5001)) == 3
    assert drawn_by(logits_V, some_draw(uniform=last, top_k=3)) == 3
    assert drawn_by(logits_V, some_draw(uniform=last, top_k=3, top_p=0.5)) == 2


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(1, 600), st.integers(1, 40), st.randoms(use_true_random=False))
def test_a_token_goes_from_the_step_that_draws_it_to_the_step_that_needs_it(num_tokens, num_rows, random):
    last_token_C = torch.arange(1000, 1000 + num_rows + 1)
    rows = random.sample(range(num_rows), random.randint(1, num_rows))
    drawn_N = torch.tensor([random.randrange(1000) for _ in rows])
    nobody = [num_rows] * 3
    remember_tokens(last_token_C, torch.tensor([*rows, *nobody], dtype=torch.int32), drawn_N)
    expected_C = torch.arange(1000, 1000 + num_rows + 1)
    expected_C[rows] = drawn_N
    assert torch.equal(last_token_C, expected_C)
    rows_T = torch.randint(num_rows + 1, (num_tokens,), dtype=torch.int32)
    known_T = torch.randint(5, (num_tokens,)) - 1
    input_ids_1T = known_T.clone()[None]
    fill_unknown_tokens(input_ids_1T, rows_T, last_token_C)
    assert torch.equal(input_ids_1T[0], torch.where(known_T < 0, last_token_C[rows_T.long()], known_T))


QWEN_VOCAB = 151_936
_SIZES = dict.fromkeys(("stride", "num_places", "num_tokens", "num_blocks", "num_spans"), "i32")
_ALL = {"ALL_BLOCKS": 2048, "ALL_SPANS": 64}
_ROWS = {"rows": "*fp64", "maxima": "*fp32", "peaks": "*fp32", "sums": "*i64"}
_LISTS = {"blocks": "*i32", "candidates": "*fp32", "candidate_ids": "*i32", "outcome": "*i64"}
_ODD = ("num_places", "num_blocks", "num_spans")


def _kernel(name: str, dtype: str, num_warps: int = 4, **constants: object) -> Kernel:
    module = f"worker.gpu.sampling_kernels.{name}"
    signature = {"logits": dtype, "faults": "*fp32", **_ROWS, **_LISTS, **_SIZES}
    signature |= dict.fromkeys(constants, "constexpr")
    return Kernel(
        function=module, signature=signature, constants=constants, unaligned=_ODD, num_warps=num_warps
    )


def _of_inputs() -> dict[str, Kernel]:
    return {
        "fill": Kernel(
            function="worker.gpu.kernels.input_fill:_fill_kernel",
            signature={
                **{"input_ids": "*i64", "rows": "*i32", "last_tokens": "*i64"},
                **{"num_tokens": "i32", "BLOCK": "constexpr"},
            },
            constants={"BLOCK": 256},
            unaligned=("num_tokens",),
        ),
        "remember": Kernel(
            function="worker.gpu.kernels.input_fill:_remember_kernel",
            signature={
                **{"last_tokens": "*i64", "rows": "*i32", "token_ids": "*i64"},
                **{"num_tokens": "i32", "BLOCK": "constexpr"},
            },
            constants={"BLOCK": 256},
            unaligned=("num_tokens",),
        ),
        "change": Kernel(
            function="worker.gpu.kernels.input_fill:_change_kernel",
            signature={
                **dict.fromkeys(("rows", "firsts", "starts", "blocks", "tables"), "*i32"),
                **{"stride": "i32", "BLOCK": "constexpr"},
            },
            constants={"BLOCK": 1024},
            unaligned=("stride",),
        ),
    }


@pytest.fixture(scope="module")
def compiled() -> dict[str, Compiled]:
    kernels = {
        "peaks": _kernel("token_draw:_peaks_kernel", "*bf16", HAS_FAULTS=False),
        "edited peaks": _kernel("token_draw:_peaks_kernel", "*fp32", HAS_FAULTS=True),
        "best": _kernel("token_draw:_best_kernel", "*bf16", **_ALL),
        "sums": _kernel("token_draw:_sums_kernel", "*bf16", ALL_SPANS=64),
        "draw": _kernel("token_draw:_draw_kernel", "*bf16", 16, **_ALL),
        "edited draw": _kernel("token_draw:_draw_kernel", "*fp32", 16, **_ALL),
        "copy": Kernel(
            function="worker.gpu.sampling_kernels.bitmask:_copy_kernel",
            signature={
                **{"logits": "*bf16", "lines": "*i32", "masks": "*i32", "edited": "*fp32", "faults": "*fp32"},
                **dict.fromkeys(("stride", "edited_stride", "num_tokens", "num_words", "num_spans"), "i32"),
                **{"HAS_MASKS": "constexpr", "SPAN": "constexpr"},
            },
            constants={"HAS_MASKS": True, "SPAN": 4096},
            unaligned=("num_words", "num_spans"),
        ),
        "penalize": Kernel(
            function="worker.gpu.sampling_kernels.penalties:_penalize_kernel",
            signature={
                **{"logits": "*fp32", "rows": "*i32", "amounts": "*fp64", "counts": "*i32"},
                **{"stride": "i32", "num_tokens": "i32", "BLOCK": "constexpr"},
            },
            constants={"BLOCK": 1024},
        ),
        "count": Kernel(
            function="worker.gpu.sampling_kernels.penalties:_count_kernel",
            signature={
                **{"counts": "*i32", "rows": "*i32", "places": "*i32", "outcome": "*i64"},
                **{"num_lines": "i32", "num_places": "i32", "num_tokens": "i32", "BLOCK": "constexpr"},
            },
            constants={"BLOCK": 256},
            unaligned=("num_lines", "num_places"),
        ),
    }
    kernels |= _of_inputs()
    return dict(zip(kernels, compile_kernels(list(kernels.values())), strict=True))


@pytest.mark.night
def test_every_kernel_compiles_for_hopper_and_stays_in_registers(compiled):
    """For a vocabulary of 151,936."""
    assert [name for name, each in compiled.items() if each.is_spilled] == []
    assert max(each.shared_bytes for each in compiled.values()) <= SHARED_BYTES_LIMIT


@pytest.mark.night
def test_whole_rows_are_read_sixteen_bytes_at_a_time(compiled):
    for name in ("peaks", "edited peaks", "sums", "draw", "edited draw", "copy"):
        assert compiled[name].widest_load_bytes == 16, name


def test_lists_of_the_largest_vocabularies_fit():
    """A program's share of a row's maxima is a power of two; that of 262,144 tokens is 2,048."""
    assert truncation.CAPACITY.value % 128 == 0
    work = Workspace.allocate(1, 262_144, CPU)
    assert work.maxima_MB.shape[1] == 2048

"""A mixture of experts is computed as transformers does, and the host never asks what was chosen."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from tests.families import Family
from tests.worker.family_trial import tiny_config
from tests.worker.gpu.cross_compile import SHARED_BYTES_LIMIT, Compiled, Kernel, compile_kernels
from worker.attention.interface import ATTENTION_NAME
from worker.gpu.kernels.expert_products import ExpertTiles, route
from worker.gpu.triton_experts import _DOWN_TILES, _GATE_UP_TILES, TritonExperts
from worker.model.layer_parts import GateActivation
from worker.model.mixture import Experts, Gate, find_experts, read_experts, replace_experts

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3}
few = settings(max_examples=15, deadline=None, derandomize=True)


def defined_experts(experts: Experts, hidden_TH, ids_TK, scores_TK) -> torch.Tensor:
    """One token and one expert after the other."""
    out_TH = torch.zeros(hidden_TH.shape, dtype=torch.float64)
    for token, (ids, scores) in enumerate(zip(ids_TK.tolist(), scores_TK.double(), strict=True)):
        x = hidden_TH[token].double()
        for expert, score in zip(ids, scores, strict=True):
            gate, up = experts.gate_ENH[expert].double() @ x, experts.up_ENH[expert].double() @ x
            if experts.gate_bias_EN is not None:
                gate, up = gate + experts.gate_bias_EN[expert], up + experts.up_bias_EN[expert]
            down = experts.down_EHI[expert].double() @ experts.gate(gate, up)
            if experts.down_bias_EH is not None:
                down = down + experts.down_bias_EH[expert]
            out_TH[token] += score * down
    return out_TH


def random_experts(dtype, num_experts, hidden_size, num_gates, layout, gate) -> Experts:
    """Weights as the layouts of transformers' families leave them behind."""
    is_transposed, is_concatenated, has_bias = layout
    merged = torch.randn(num_experts, 2 * num_gates, hidden_size).to(dtype)
    down = torch.randn(num_experts, hidden_size, num_gates).to(dtype)
    if is_transposed:
        merged = merged.transpose(1, 2).contiguous().transpose(1, 2)
        down = down.transpose(1, 2).contiguous().transpose(1, 2)
    biases = torch.randn(num_experts, 2 * num_gates).to(dtype)
    halves = [
        each.chunk(2, dim=1) if is_concatenated else (each[:, ::2], each[:, 1::2])
        for each in (merged, biases)
    ]
    gate_bias, up_bias = halves[1] if has_bias else (None, None)
    down_bias = torch.randn(num_experts, hidden_size).to(dtype) if has_bias else None
    return Experts(*halves[0], gate_bias, up_bias, down, down_bias, gate)


@few
@given(
    st.sampled_from(list(TOLERANCE)),
    st.integers(1, 9),
    st.integers(1, 6),
    st.tuples(st.sampled_from([24, 40, 130]), st.sampled_from([8, 33, 70])),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    st.sampled_from(
        [Gate(GateActivation.SILU), Gate(GateActivation.GELU_TANH), Gate(GateActivation.SILU, 1.7, 2.0, 1.0)]
    ),
    st.data(),
)
def test_each_token_gets_what_its_experts_make_of_it(
    dtype, num_tokens, num_experts, sizes, layout, gate, data
):
    torch.manual_seed(num_tokens)
    experts = random_experts(dtype, num_experts, *sizes, layout, gate)
    num_chosen = data.draw(st.integers(1, num_experts))
    hidden_TH = torch.randn(num_tokens, sizes[0]).to(dtype)
    # Sometimes all tokens choose alike, so that one expert has several tiles and others have none.
    num_favoured = data.draw(st.integers(num_chosen, num_experts))
    ids_TK = torch.rand(num_tokens, num_favoured).topk(num_chosen).indices
    scores_TK = torch.rand(num_tokens, num_chosen)
    found_TH = TritonExperts(experts)(hidden_TH, ids_TK, scores_TK)
    expected_TH = defined_experts(experts, hidden_TH, ids_TK, scores_TK)
    error = (found_TH.double() - expected_TH).norm() / expected_TH.norm()
    assert error < TOLERANCE[dtype]


@few
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 3), st.sampled_from([4, 16]), st.data())
def test_every_pair_is_in_one_tile_of_its_expert(num_tokens, num_experts, num_chosen, tile_pairs, data):
    ids = data.draw(
        st.lists(
            st.integers(0, num_experts - 1),
            min_size=num_tokens * num_chosen,
            max_size=num_tokens * num_chosen,
        )
    )
    routing = route(torch.tensor(ids).view(num_tokens, num_chosen), num_experts, tile_pairs)
    pairs = routing.pairs_P.tolist()
    assert pairs == sorted(range(len(ids)), key=lambda pair: ids[pair])  # which is stable
    seen = []
    for expert, start, end in zip(*(each.tolist() for each in routing[1:]), strict=True):
        if expert >= 0:
            tile = pairs[start : min(start + tile_pairs, end)]
            assert tile
            assert {ids[pair] for pair in tile} == {expert}
            seen += tile
    assert seen == pairs


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "olmoe", "gpt_oss"])
def test_experts_that_declare_their_layout_are_replaced_and_answer_the_same(name):
    torch.manual_seed(3)
    config = tiny_config(Family(model_type=name))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    token_ids = torch.randint(3, 300, (1, 5))
    with torch.inference_mode():
        expected = model(input_ids=token_ids, use_cache=False).logits
        done = replace_experts(model, TritonExperts, torch.device("cpu"))
        found = model(input_ids=token_ids, use_cache=False).logits
    assert (done.num_replaced, done.num_found, dict(done.reasons)) == (3, 3, {})
    assert sum(isinstance(module, TritonExperts) for module in model.modules()) == 3
    assert (found - expected).abs().max() / expected.abs().max() < 2e-5


def test_gates_of_gpt_oss_are_found_with_their_limits():
    model = AutoModelForCausalLM.from_config(tiny_config(Family(model_type="gpt_oss")))
    _, module = next(find_experts(model))
    assert read_experts(module).gate == Gate(GateActivation.SILU, alpha=1.702, limit=7.0, up_offset=1.0)


def test_experts_that_compute_something_else_stay_as_they_are():
    config = tiny_config(Family(model_type="mixtral"))
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    for _, module in find_experts(model):
        module.forward = lambda *inputs, computed=module.forward: computed(*inputs) * 1.01
    (reason,) = replace_experts(model, TritonExperts, torch.device("cpu")).reasons
    assert "experts compute something else" in reason


def test_a_gate_that_nobody_knows_stays_as_it_is():
    config = tiny_config(Family(model_type="mixtral"))
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).eval()
    for _, module in find_experts(model):
        module.act_fn = torch.nn.ReLU()
    done = replace_experts(model, TritonExperts, torch.device("cpu"))
    assert done.num_replaced == 0
    assert dict(done.reasons) == {"its experts have a gate of their own": 3}


def gate_up_kernel(tiles: ExpertTiles) -> Kernel:
    constants = {
        "NUM_CHOSEN": 8,
        "IS_GELU": False,
        "HAS_BIAS": False,
        "PRECISION": "tf32",
        "PAIRS": tiles.pairs,
        "OUTPUTS": tiles.outputs,
        "INPUTS": tiles.inputs,
        "input_stride": 1,
        "gate_bias_ptr": None,
        "up_bias_ptr": None,
    }
    signature = {
        **dict.fromkeys(("hidden_ptr", "gates_ptr", "ups_ptr", "gated_ptr"), "*bf16"),
        **dict.fromkeys(("pairs_ptr", "expert_of_tile_ptr", "start_of_tile_ptr", "end_of_tile_ptr"), "*i32"),
        **dict.fromkeys(("hidden_size", "num_gates", "expert_stride", "output_stride"), "i32"),
        **dict.fromkeys(("bias_expert_stride", "bias_stride"), "i32"),
        **dict.fromkeys(("alpha", "limit", "up_offset"), "fp32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    return Kernel(
        function="worker.gpu.kernels.expert_products:_gate_up_kernel",
        signature=signature,
        constants=constants,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def down_kernel(tiles: ExpertTiles) -> Kernel:
    constants = {
        "HAS_BIAS": False,
        "PRECISION": "tf32",
        "PAIRS": tiles.pairs,
        "OUTPUTS": tiles.outputs,
        "INPUTS": tiles.inputs,
        "input_stride": 1,
        "bias_ptr": None,
    }
    signature = {
        **dict.fromkeys(("gated_ptr", "down_ptr", "scores_ptr", "out_ptr"), "*bf16"),
        **dict.fromkeys(("pairs_ptr", "expert_of_tile_ptr", "start_of_tile_ptr", "end_of_tile_ptr"), "*i32"),
        **dict.fromkeys(("hidden_size", "num_gates", "expert_stride", "output_stride"), "i32"),
        "bias_expert_stride": "i32",
        **dict.fromkeys(constants, "constexpr"),
    }
    return Kernel(
        function="worker.gpu.kernels.expert_products:_down_kernel",
        signature=signature,
        constants=constants,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def route_kernel() -> Kernel:
    pointers = ("pairs_ptr", "expert_of_tile_ptr", "start_of_tile_ptr", "end_of_tile_ptr")
    return Kernel(
        function="worker.gpu.kernels.expert_products:_route_kernel",
        signature={
            "ids_ptr": "*i64",
            **dict.fromkeys(pointers, "*i32"),
            "num_pairs": "i32",
            "TILE": "constexpr",
            "BLOCK": "constexpr",
        },
        constants={"TILE": 16, "BLOCK": 1024},
        unaligned=("num_pairs", *pointers[1:]),
    )


PRODUCTS = {
    **{f"gates of {each.pairs} pairs": gate_up_kernel(each) for _, each in _GATE_UP_TILES},
    **{f"way down of {each.pairs} pairs": down_kernel(each) for _, each in _DOWN_TILES},
}


@pytest.fixture(scope="module")
def compiled() -> dict[str, Compiled]:
    done = compile_kernels([*PRODUCTS.values(), route_kernel()])
    return dict(zip([*PRODUCTS, "route"], done, strict=True))


@pytest.mark.night
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_hopper_gpu_multiplies_on_its_tensor_cores_without_spilling(compiled, name):
    found = compiled[name]
    assert found.uses_warp_group_products if "64" in name else found.uses_tensor_cores
    assert found.local_bytes == 0
    assert found.shared_bytes <= SHARED_BYTES_LIMIT
    assert found.widest_load_bytes == 16


@pytest.mark.parametrize("num_tokens", [1, 5, 18, 33])
def test_where_a_routing_lies_makes_nobody_compile_again(num_tokens):
    """Triton asks each pointer whether it is a multiple of 16."""
    routing = route(torch.zeros((num_tokens, 2), dtype=torch.int64), num_experts=5, tile_pairs=4)
    assert [each.data_ptr() % 16 for each in routing] == [0] * 4
    assert len(routing.expert_of_tile) == num_tokens * 2 // 4 + 5


@pytest.mark.night
def test_a_hopper_gpu_sorts_without_spilling(compiled):
    assert compiled["route"].local_bytes == 0

"""The recurrences give what transformers' functions give, and the same bits however a prompt is cut."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.mamba.modeling_mamba import mamba_selective_scan
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_5.modeling_qwen3_5 import causal_conv1d_fn, torch_chunk_gated_delta_rule

from worker.load import recurrent_functions
from worker.states import rules
from worker.states.interface import Convolution, Recurrence

NUM_TOKENS = 75
HEADS, GROUPS, KEY_DIM, VALUE_DIM = 4, 2, 16, 24
CUTS = (0, 1, 9, 10, 40, 75)


class Captured:
    """A StateExecutor that keeps what it is given, and computes it from zeros, cut where it is told."""

    def __init__(self, cuts: tuple[int, ...]) -> None:
        self._cuts = cuts
        self.state = torch.empty(0)

    def begin_layer(self, layer_idx: int) -> None:
        """Do nothing."""

    def convolve(self, given: Convolution) -> Tensor:
        num_channels, width = given.weight_CW.shape
        self.state = torch.zeros((1, width - 1, num_channels))
        return self._of_all(
            lambda part: rules.convolve(given._replace(input_TC=given.input_TC[part]), self.state)
        )

    def recur(self, given: Recurrence) -> Tensor:
        _, num_heads, value_dim = given.value_THV.shape
        self.state = torch.zeros((1, num_heads, value_dim, given.key_TGK.shape[-1]))
        return self._of_all(lambda part: rules.recur(given.of(part), self.state))

    def _of_all(self, compute: Callable[[slice], Tensor]) -> Tensor:
        return torch.cat([compute(slice(*cut)) for cut in zip(self._cuts, self._cuts[1:], strict=False)])


def delta(**settings: Any) -> dict[str, Any]:
    return {
        "query": torch.randn(1, NUM_TOKENS, GROUPS, KEY_DIM),
        "key": torch.randn(1, NUM_TOKENS, GROUPS, KEY_DIM),
        "value": torch.randn(1, NUM_TOKENS, HEADS, VALUE_DIM),
        "g": -torch.rand(1, NUM_TOKENS, HEADS),
        "beta": torch.rand(1, NUM_TOKENS, HEADS),
        "use_qk_l2norm_in_kernel": True,
        **settings,
    }


def of_channels() -> dict[str, Any]:
    shape = (1, NUM_TOKENS, HEADS, KEY_DIM)
    given = delta(query=torch.randn(shape), key=torch.randn(shape), g=-torch.rand(shape))
    return given | {"value": torch.randn(1, NUM_TOKENS, HEADS, KEY_DIM)}


def scan() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, NUM_TOKENS, HEADS, VALUE_DIM),
        "dt": torch.randn(1, NUM_TOKENS, HEADS),
        "A": -torch.rand(HEADS) * 3,
        "B": torch.randn(1, NUM_TOKENS, GROUPS, KEY_DIM),
        "C": torch.randn(1, NUM_TOKENS, GROUPS, KEY_DIM),
        "chunk_size": 16,
        "D": torch.randn(HEADS),
        "dt_bias": torch.randn(HEADS),
        "dt_softplus": True,
        "dt_limit": (0.01, 2.0),
    }


def selective_scan() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, HEADS, NUM_TOKENS),
        "dt": torch.randn(1, HEADS, NUM_TOKENS),
        "A": -torch.rand(HEADS, KEY_DIM),
        "B": torch.randn(1, KEY_DIM, NUM_TOKENS),
        "C": torch.randn(1, KEY_DIM, NUM_TOKENS),
        "D": torch.randn(HEADS),
        "z": torch.randn(1, HEADS, NUM_TOKENS),
        "delta_bias": torch.randn(HEADS),
        "delta_softplus": True,
    }


def convolution() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 32, NUM_TOKENS),
        "weight": torch.randn(32, 4),
        "bias": torch.randn(32),
        "activation": "silu",
    }


@contextmanager
def replaced(function: Callable[..., Any], states: Captured, patch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Replace a function where no model uses it, with `states` as those of the step."""
    module = type("Module", (), {function.__name__: function})
    recurrent_functions._replace(module, function.__name__)
    with patch.context() as within:
        within.setattr(recurrent_functions, "states_of_step", lambda: states)
        yield getattr(module, function.__name__)


CASES = {
    "delta rule": (torch_chunk_gated_delta_rule, delta),
    "delta rule with decays of channels": (chunk_kimi_delta_attention, of_channels),
    "Mamba 2": (mamba2_chunk_scan, scan),
    "Mamba 1": (mamba_selective_scan, selective_scan),
    "convolution": (causal_conv1d_fn, convolution),
}


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_transformers_computes_and_cuts_change_no_bit(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, draw = CASES[case]
    torch.manual_seed(3)
    given = draw()
    expected = function(**given)
    found = []
    for cuts in ((0, NUM_TOKENS), CUTS):
        states = Captured(cuts)
        with replaced(function, states, monkeypatch) as ours:
            outputs = ours(**given)
        assert type(outputs) is type(expected)
        found.append((outputs[0] if isinstance(outputs, tuple) else outputs, states.state))
    if isinstance(expected, tuple):
        expected = expected[0]
    (whole, state), (cut, state_of_cut) = found
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(whole, cut)
    assert torch.equal(state, state_of_cut)

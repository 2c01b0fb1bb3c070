"""Input and output of a forward pass."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from worker.devices.device import CpuDevice
from worker.steps.tokens import HiddenStates, StepTokens
from worker.worker_config import WorkerConfig

ONE_AXIS = np.array([3, 4, 0])
THREE_AXES = np.array([[3, 4, 0], [3, 3, 0], [3, 5, 0]])


def tokens_at(position_ids: NDArray[np.int64]) -> StepTokens:
    device = CpuDevice(WorkerConfig(model_path=""))
    return StepTokens.of(device, np.array([5, 6, 7]), position_ids, np.array([2]))


@pytest.mark.parametrize(("position_ids", "shape"), [(ONE_AXIS, (1, 3)), (THREE_AXES, (3, 1, 3))])
def test_positions_are_one_or_three_numbers(position_ids: Any, shape: tuple[int, ...]) -> None:
    tokens = tokens_at(position_ids)
    assert tokens.position_ids.shape == shape
    chosen = tokens.only(torch.tensor([1]))
    assert chosen.input_ids_1T.tolist() == [[6]]
    assert chosen.position_ids.squeeze().tolist() == position_ids[..., 1].tolist()


def test_rows_of_embeddings_take_the_place_of_ids() -> None:
    tokens = tokens_at(ONE_AXIS)
    assert tokens.arguments.keys() == {"input_ids", "position_ids"}
    tokens = tokens._replace(embeds_1TH=torch.arange(6.0).view(1, 3, 2))
    assert tokens.arguments.keys() == {"inputs_embeds", "position_ids"}
    assert tokens.only(torch.tensor([2, 0])).arguments["inputs_embeds"].tolist() == [[[4.0, 5.0], [0.0, 1.0]]]


def test_hidden_states_of_some_tokens_leave_those_of_all_as_they_are() -> None:
    outputs = SimpleNamespace(last_hidden_state=torch.arange(6.0).view(1, 3, 2), attentions=None)
    hidden = HiddenStates(tokens_at(ONE_AXIS), outputs)
    chosen = hidden.only(torch.tensor([0, 2]))
    assert chosen.hidden_TH.tolist() == [[0.0, 1.0], [4.0, 5.0]]
    assert chosen.tokens.input_ids_1T.tolist() == [[5, 7]]
    assert hidden.hidden_TH.shape == (3, 2)

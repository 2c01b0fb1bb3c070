"""A state that is kept in the middle of a share is that of the tokens before, and changes nothing else."""

import numpy as np
import pytest
import torch
from torch import Tensor

from worker.states.interface import Convolution, Recurrence, StateShape, StateStep, Tap
from worker.states.ref_states import RefStates
from worker.states.state_layout import StateLayout
from worker.states.states_in_waves import StatesInWaves

LENGTHS = (1, 9, 14)
SHAPE = StateShape(num_channels=48, num_columns=3, num_heads=3, key_dim=16, value_dim=16)
BLOCK_BYTES = 640


class World:
    """Three sequences, and blocks for as many taps."""

    def __init__(self) -> None:
        self.layout = StateLayout({4: SHAPE}, BLOCK_BYTES)
        self.num_stripes = self.layout.num_stripes
        self.pool = torch.full((12 * self.num_stripes, BLOCK_BYTES // 4), torch.nan)
        self.states = RefStates(self.pool, self.layout)

    def blocks(self, place: int) -> list[int]:
        return [place * self.num_stripes + stripe for stripe in range(self.num_stripes)][::-1]

    def step(self, lengths: tuple[int, ...] = LENGTHS) -> StateStep:
        return StateStep(
            num_decodes=sum(length == 1 for length in lengths),
            query_starts=np.cumsum([0, *lengths]),
            is_first_R=np.ones(len(lengths), np.bool_),
            blocks_RS=np.array([self.blocks(place) for place in range(len(lengths))]),
        )

    def content(self, place: int) -> Tensor:
        return self.pool[self.blocks(place)].view(torch.int32)


def recurrence(num_tokens: int) -> Recurrence:
    return Recurrence(
        query_TGK=torch.randn(num_tokens, 3, 16),
        key_TGK=torch.randn(num_tokens, 3, 16),
        value_THV=torch.randn(num_tokens, 3, 16),
        log_decay=-torch.rand(num_tokens, 3),
        beta_TH=torch.rand(num_tokens, 3),
        has_unit_keys=True,
        scaling=0.25,
    )


def convolution(num_tokens: int) -> Convolution:
    return Convolution(torch.randn(num_tokens, 48), torch.randn(48, 4), None, "silu")


@pytest.mark.parametrize("places", [((2, 5),), ((2, 14), (1, 8)), ((2, 4), (2, 12), (1, 9), (0, 1))])
def test_what_is_kept_is_the_state_of_the_tokens_before(places: tuple[tuple[int, int], ...]) -> None:
    torch.manual_seed(2)
    num_tokens = sum(LENGTHS)
    given, convolved = recurrence(num_tokens), convolution(num_tokens)
    plain, world = World(), World()
    plain.states.begin_step(plain.step())
    plain.states.begin_layer(4)
    tapped = StatesInWaves(world.states, world.pool, world.layout)
    taps = [Tap(seq, num, tuple(world.blocks(5 + index))) for index, (seq, num) in enumerate(places)]
    tapped.begin_step(world.step()._replace(taps=tuple(taps)))
    tapped.begin_layer(4)
    assert torch.equal(tapped.convolve(convolved), plain.states.convolve(convolved))
    assert torch.equal(tapped.recur(given), plain.states.recur(given))
    for place in range(len(LENGTHS)):
        assert torch.equal(world.content(place), plain.content(place))
    for index, (seq, num) in enumerate(places):
        alone = World()
        tokens = torch.arange(num) + sum(LENGTHS[:seq])
        alone.states.begin_step(alone.step((num,)))
        alone.states.begin_layer(4)
        alone.states.convolve(convolved.of(tokens))
        alone.states.recur(given.of(tokens))
        assert torch.equal(world.content(5 + index), alone.content(0))


@pytest.mark.parametrize("num_right_R", [(0, 0, 0), (0, 3, 1), (0, 1, 5)])
@pytest.mark.parametrize("has_tap", [False, True])
def test_states_take_in_the_drafts_that_are_right_and_no_others(
    num_right_R: tuple[int, ...], has_tap: bool
) -> None:
    torch.manual_seed(3)
    given, convolved = recurrence(sum(LENGTHS)), convolution(sum(LENGTHS))
    num_drafts_R = (0, 3, 5)
    plain, world = World(), World()
    waves = StatesInWaves(world.states, world.pool, world.layout)
    taps = (Tap(2, 4, tuple(world.blocks(5))),) if has_tap else ()
    waves.begin_step(world.step()._replace(num_drafts_R=num_drafts_R, taps=taps))
    waves.begin_layer(4)
    outputs = waves.convolve(convolved), waves.recur(given)
    waves.accept_drafts(num_right_R)
    plain.states.begin_step(plain.step())
    plain.states.begin_layer(4)
    torch.testing.assert_close(outputs[0], plain.states.convolve(convolved))
    torch.testing.assert_close(outputs[1], plain.states.recur(given))
    for place, (length, num_drafts, num_right) in enumerate(
        zip(LENGTHS, num_drafts_R, num_right_R, strict=True)
    ):
        alone = World()
        tokens = torch.arange(length - num_drafts + num_right) + sum(LENGTHS[:place])
        alone.states.begin_step(alone.step((len(tokens),)))
        alone.states.begin_layer(4)
        alone.states.convolve(convolved.of(tokens))
        alone.states.recur(given.of(tokens))
        assert torch.equal(world.content(place), alone.content(0))

"""Pictures of the sequences that a worker has rows for, and their part of each step.

Owns: which of them are computed now, and the rows and positions that they give a step; whether a model's
pictures are read at all.

Shapes: T tokens of the step, P places of pictures among them, L tokens of a prompt up to the end of its last
picture, H numbers of a hidden state.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from scheduler.input_messages import EncoderInput, Payload
from scheduler.messages import (
    Encoded,
    NewSequence,
    ScheduledSequence,
    SchedulerOutput,
    SequenceId,
)
from worker.attention.interface import SeenPictures
from worker.devices.device import Device
from worker.devices.weight_life import is_out_of_memory
from worker.pictures.eyes import MOST_PLACES, Eyes, PictureRows, has_eyes, vision_facts
from worker.pictures.outputs import Hold, OutputCache
from worker.pictures.sliced_call import SlicedCall
from worker.ranks.ranks import ALONE, Ranks
from worker.steps.inputs import StepInputs
from worker.steps.model_runner import ModelRunner
from worker.steps.tokens import PlacedRows
from worker.worker_config import ModelFacts
from worker.worker_errors import SequenceRefused

log = logging.getLogger(__name__)

_SHARED_MEMORY = Path("/dev/shm")
_DTYPES = frozenset({torch.float32, torch.int64, torch.int32, torch.bool})
GRID = "image_grid_thw"
"""Argument of families that take a picture's frames, rows and columns of patches."""


def read_payload(payload: Payload) -> dict[str, Tensor]:
    """Copy the tensors of one picture, a file of safetensors with the arguments of `get_image_features`.

    Raises SequenceRefused for bytes that are missing or broken.
    """
    # multiprocessing's own class would unlink the segment when this process ends.
    path = _SHARED_MEMORY / payload.segment.lstrip("/")
    try:
        if path.parent != _SHARED_MEMORY:
            raise ValueError("its name is a path")
        with path.open("rb") as file:
            tensors: dict[str, Tensor] = load(file.read(payload.num_bytes))
    except (OSError, ValueError, SafetensorError) as error:
        raise SequenceRefused(f"the bytes of a picture cannot be read ({type(error).__name__})") from error
    unknown = {tensor.dtype for tensor in tensors.values()} - _DTYPES
    if unknown or not tensors:
        raise SequenceRefused(f"the bytes of a picture are of {unknown or 'no tensor'}")
    grid = tensors.get(GRID)
    if grid is not None and grid.tolist() != [list(payload.grid)]:
        raise SequenceRefused(f"a picture of {grid.tolist()} patches was announced as one of {payload.grid}")
    return tensors


class PromptPositions:
    """Positions of the tokens of one sequence, where a rotation takes time, row and column apart.

    A picture's places have the position at which it begins, plus their row and column; the tokens behind it
    go on behind the largest of these.
    """

    def __init__(self, inputs: Sequence[EncoderInput], grids: Sequence[tuple[int, int, int]]) -> None:
        """Take in the pictures in their order, each with its frames, rows and columns of places."""
        parts, end, following = [], 0, 0
        for item, grid in zip(inputs, grids, strict=True):
            num_before = item.offset - end
            parts.append(np.broadcast_to(np.arange(following, following + num_before), (3, num_before)))
            following += num_before
            parts.append(following + np.indices(grid).reshape(3, -1))
            following += max(grid)
            end = item.end
        self._positions_3L = np.concatenate(parts, axis=1)
        self.end = end
        """Position of the sequence from which on all are `delta` further."""
        self.delta = following - end

    def between(self, start: int, end: int) -> NDArray[np.int64]:
        """Return the positions [3, T] of the tokens from `start` to `end`."""
        rest = np.arange(max(start, self.end), max(end, self.end)) + self.delta
        known_3T = self._positions_3L[:, start:end]
        return np.concatenate([known_3T, np.broadcast_to(rest, (3, len(rest)))], axis=1)


@dataclass(frozen=True, slots=True)
class _Seen:
    """Pictures of one sequence."""

    inputs: tuple[EncoderInput, ...]
    places: tuple[NDArray[np.int64], ...]
    """Positions of each input that its rows stand at: tokens of lines and tiles may lie between."""
    payloads: dict[str, Payload]
    positions: PromptPositions | None
    reported: set[int]
    """Offsets of the inputs that a step has reported as found: plans in flight ask again."""


class _Reading:
    """A picture that is being computed."""

    def __init__(self, payload: Payload, num_rows: int, eyes: Eyes) -> None:
        self.content = payload.content
        self._payload, self._num_rows, self._eyes = payload, num_rows, eyes
        self._num_threads = torch.get_num_threads()
        self.call = SlicedCall(self._read)

    def _read(self) -> PictureRows:
        torch.set_num_threads(self._num_threads)  # it is set for each thread, as the device is
        self._eyes.device.make_current()
        return self._eyes.read(read_payload(self._payload), self._num_rows, self.call.pause)


class Pictures:
    """Pictures from the row's first step to its last."""

    def __init__(self, eyes: Eyes, num_cache_tokens: int, ranks: Ranks = ALONE) -> None:
        """Take in the ranks, of which the first encodes; the others get its rows in steps that need them."""
        self._eyes, self._ranks = eyes, ranks
        self._outputs = OutputCache(num_cache_tokens)
        self._seen: dict[SequenceId, _Seen] = {}
        self._under_way: _Reading | None = None

    def add(self, new: NewSequence) -> None:
        """Take in a sequence with its pictures. Raises SequenceRefused."""
        if not new.encoder_inputs:
            return
        payloads = {each.content: each for each in new.payloads}
        if missing := {item.content for item in new.encoder_inputs} - payloads.keys():
            raise SequenceRefused(f"{len(missing)} of its pictures came without bytes")
        positions = None
        if self._eyes.has_three_rows:
            grids = [self._grid(item, payloads[item.content]) for item in new.encoder_inputs]
            positions = PromptPositions(new.encoder_inputs, grids)
        places = tuple([self._places(item, new.token_ids) for item in new.encoder_inputs])
        self._seen[new.sequence_id] = _Seen(new.encoder_inputs, places, payloads, positions, set())

    def release(self, sequence_id: SequenceId) -> None:
        """Forget a sequence; what its pictures became is kept while there is room."""
        seen = self._seen.pop(sequence_id, None)
        for item in () if seen is None else seen.inputs:
            self._outputs.let_go(item.content, Hold(sequence_id, item.offset))
        if self._under_way is not None and not self._outputs.is_held(self._under_way.content):
            self._abandon()

    def encode(self, plan: SchedulerOutput, failures: dict[SequenceId, str]) -> Encoded:
        """Compute pictures that the plan names, in its slice of time, and note those that cannot be.

        Waits for the device where there is time: the steps before are not of the slice.
        """
        if self._ranks.rank:
            return Encoded({})
        if plan.encoder_slice_s:
            self._eyes.device.record().wait()
        begun_s = monotonic()
        until_s = begun_s + plan.encoder_slice_s
        done: dict[SequenceId, tuple[int, ...]] = {}
        is_over = not plan.encoder_slice_s
        num_computed = num_found = 0
        wanted = [
            (sequence_id, item, self._seen[sequence_id])
            for sequence_id, inputs in plan.encoder_inputs.items()
            if sequence_id in self._seen
            for item in inputs
        ]
        for sequence_id, item, _ in wanted:
            self._outputs.hold(item.content, Hold(sequence_id, item.offset))
        for sequence_id, item, seen in wanted:
            if sequence_id in failures:
                continue
            num_rows = len(seen.places[seen.inputs.index(item)])
            try:
                is_found = self._outputs.get(item.content, num_rows) is not None
                if not is_found:
                    is_over = is_over or not self._compute(seen.payloads[item.content], num_rows, until_s)
                    if is_over:  # those that are there wait for none that is not
                        continue
            except Exception as error:  # noqa: BLE001 - whatever a tower raises ends this sequence alone
                failures[sequence_id] = _reason(error)
                continue
            num_found += is_found and item.offset not in seen.reported
            num_computed += not is_found
            seen.reported.add(item.offset)
            done[sequence_id] = (*done.get(sequence_id, ()), item.offset)
        return Encoded(done, num_computed, num_found, monotonic() - begun_s)

    def place(self, inputs: StepInputs) -> StepInputs:
        """Put the rows of pictures, and positions behind them, into a step."""
        if not self._seen:
            return inputs
        placed, metadata = self._placed(inputs), inputs.metadata
        if placed is not None and self._eyes.seen_in_windows_only is not None:
            metadata = replace(metadata, pictures=self._seen_pictures(inputs))
        return replace(inputs, placed=placed, position_ids_T=self._positions(inputs), metadata=metadata)

    def place_behind(self, inputs: StepInputs) -> StepInputs:
        """Do the same for a pass that reads at each place the token behind it; rows that are gone are 0."""
        return replace(inputs, placed=self._placed(inputs, 1), position_ids_T=self._positions(inputs, 1))

    def _placed(self, inputs: StepInputs, num_ahead: int = 0) -> PlacedRows | None:
        places, rows = [], []
        for first, share, seen in self._shares(inputs.shares):
            begin = share.start + num_ahead
            for item, item_places in zip(seen.inputs, seen.places, strict=True):
                start, end = item_places.searchsorted((begin, begin + share.num_tokens))
                if start == end:
                    continue
                output = self._outputs.get(item.content, len(item_places))
                assert output or num_ahead or self._ranks.rank, "a plan computes a picture before it is there"
                output = output or self._eyes.no_rows(len(item_places))
                rows.append(output.between(start, end))
                places.append(item_places[start:end] - begin + first)
        if not places:
            return None
        joined = PictureRows.joined(rows)
        if self._ranks.size > 1:
            joined = PictureRows(self._shared(joined.embeds_PH), tuple(map(self._shared, joined.deep)))
        return PlacedRows(np.concatenate(places), *joined)

    def _shared(self, rows_PH: Tensor) -> Tensor:
        """Return the first rank's rows: the others add zeros."""
        sums_PH = rows_PH.float()
        self._ranks.reduce(sums_PH)
        return sums_PH.to(rows_PH.dtype)

    def note_computed(self, shares: list[ScheduledSequence]) -> None:
        """Let go of the pictures whose last places were computed."""
        for _, share, seen in self._shares(shares) if self._seen else ():
            for item in seen.inputs:
                if item.end <= share.start + share.num_tokens:
                    self._outputs.let_go(item.content, Hold(share.sequence_id, item.offset))

    def _shares(self, shares: list[ScheduledSequence]) -> Iterator[tuple[int, ScheduledSequence, _Seen]]:
        """Yield the shares of sequences with pictures, each with the place of its first token."""
        first = 0
        for share in shares:
            seen = self._seen.get(share.sequence_id)
            if seen is not None:
                yield first, share, seen
            first += share.num_tokens

    def _seen_pictures(self, inputs: StepInputs) -> SeenPictures:
        """Find the ends of the pictures in a step, of which each token sees all others."""
        ends_T = np.zeros(len(inputs.rows_T), dtype=np.int64)
        for first, share, seen in self._shares(inputs.shares):
            for item in seen.inputs:
                start, end = max(item.offset, share.start), min(item.end, share.start + share.num_tokens)
                if start < end:
                    ends_T[first + start - share.start : first + end - share.start] = item.end
        return SeenPictures(ends_T, bool(self._eyes.seen_in_windows_only))

    def _positions(self, inputs: StepInputs, num_ahead: int = 0) -> NDArray[np.int64]:
        """Return positions [T], or [3, T] in a step with places of pictures that have rows and columns."""
        positions = inputs.position_ids_T
        for first, share, seen in self._shares(inputs.shares):
            if seen.positions is not None:
                if positions.ndim == 1:
                    positions = np.tile(positions, (3, 1))
                start = share.start + num_ahead
                found = seen.positions.between(start, start + share.num_tokens)
                # Less what it is ahead: a prefix may come of text alone, whose positions are the places.
                positions[:, first : first + share.num_tokens] = found - num_ahead
        is_line = positions.ndim == 1 or (positions == positions[0]).all()  # as all of decodes
        return np.atleast_2d(positions)[0] if is_line else positions

    def _compute(self, payload: Payload, num_rows: int, until_s: float) -> bool:
        """Go on with a picture; False if it is not done in time. Raises whatever its tower raises."""
        if self._under_way is not None and self._under_way.content != payload.content:
            self._abandon()
        reading, self._under_way = self._under_way or _Reading(payload, num_rows, self._eyes), None
        rows = reading.call.go_on(until_s - monotonic())
        if rows is None:
            self._under_way = reading
            return False
        self._outputs.put(payload.content, rows)
        return True

    def _abandon(self) -> None:
        assert self._under_way is not None
        self._under_way.call.abandon()
        self._under_way = None

    def _places(self, item: EncoderInput, token_ids: tuple[int, ...]) -> NDArray[np.int64]:
        ids = np.array(token_ids[item.offset : item.end])
        return item.offset + np.flatnonzero(ids == self._eyes.image_token_id)

    def _grid(self, item: EncoderInput, payload: Payload) -> tuple[int, int, int]:
        """Return the frames, rows and columns of a picture's places. Raises SequenceRefused."""
        frames, rows, columns = payload.grid
        merge = self._eyes.merge_size
        if frames * (rows // merge) * (columns // merge) != item.num_tokens:
            raise SequenceRefused(f"a picture of {payload.grid} patches has {item.num_tokens} places")
        return frames, rows // merge, columns // merge


def _reason(error: Exception) -> str:
    if isinstance(error, SequenceRefused):
        return str(error)
    log.warning("a picture cannot be computed", exc_info=error)
    if is_out_of_memory(error):
        return "there is too little memory to compute a picture"
    return f"a picture cannot be computed ({type(error).__name__})"


def open_pictures(
    facts: ModelFacts, runner: ModelRunner, device: Device, ranks: Ranks
) -> tuple[ModelFacts, Pictures | None]:
    """Open the eyes of a model whose family's pictures come out right; None if it reads text alone."""
    is_divided = facts.num_stages > 1 or (facts.num_ranks > 1 and facts.runs_ahead)
    if is_divided or not has_eyes(runner.model):
        if hasattr(runner.model, "get_image_features"):
            where = ", so divided," if is_divided else ""
            log.info("%s%s reads text alone, and no pictures", facts.model_type, where)
        return facts, None
    runner.eyes = Eyes(runner.model, device)
    num_places = min(MOST_PLACES, facts.max_model_len)
    facts = replace(facts, vision=vision_facts(runner.eyes, facts.model_type, num_places))
    return facts, Pictures(runner.eyes, num_places, ranks)

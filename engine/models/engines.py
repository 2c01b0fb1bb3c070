"""The engines of all models of one server, as one.

Owns: their common queue, the order in which they are loaded, and that one which is given up ends no other.
Never: serves a request: each has the engine of its model.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

from engine.errors import EngineUnavailable
from engine.frontend.client import AsyncEngine
from engine.frontend.queue_limits import Desk
from engine.models.entries import ModelSpec
from engine.models.load_metrics import LoadMetrics
from engine.models.yard import ModelYard, YardPlace
from engine.processes.engine_processes import GaveUp
from engine.processes.supervisor import Spare
from engine.text.tokenizer import TokenizerError
from worker.checkpoint.checkpoint_files import file_stamps

log = logging.getLogger(__name__)


class ModelEngines:
    """One engine for each model, in the order of the models. For use from one event loop."""

    def __init__(self, models: Sequence[ModelSpec]) -> None:
        """Raises TokenizerError, OptionError."""
        config = models[0].engine
        desk = Desk(config)
        models, self.all = zip(*(_with_engine(each, desk) for each in models), strict=True)
        self.places: tuple[YardPlace, ...] = ()
        """The places of models that come and go; none where all stay."""
        self._yard: ModelYard | None = None
        if not all(each.keep.is_always_loaded for each in models):
            # A crowd before a model that is not loaded leaves room for requests to the others.
            self._yard = ModelYard(max_waiting=max(1, config.max_queued_requests // 4), spare=Spare())
            self.places = tuple(map(self._placed, models, self.all))
        self._starting: asyncio.Task[None] | None = None

    def _placed(self, spec: ModelSpec, engine: AsyncEngine) -> YardPlace:
        assert self._yard is not None
        assert spec.room is not None
        if not spec.keep.at_start:
            engine.sleep(spec.fault)
        place = self._yard.add(spec.names.served[0], engine, spec.keep, spec.room, spec.fault)
        files = file_stamps(spec.engine.model_path)
        place.has_changed = lambda: file_stamps(spec.engine.model_path) != files
        engine.metrics.registry.register(LoadMetrics(place))
        return place

    def start(self) -> None:
        """Start the first engine and return at once; each other one starts once the one before is loaded.

        So they are never loaded at the same time: a load takes more memory than what it leaves.
        """
        if self._yard is not None:
            self._yard.start()
            return
        self.all[0].start()
        self._starting = asyncio.create_task(self._start_others())

    async def _start_others(self) -> None:
        for earlier, engine in pairwise(self.all):
            with suppress(EngineUnavailable):  # given up
                await earlier.ready()
            engine.start()

    async def begun(self) -> None:
        """Wait until the first model's processes have been started, or could not be."""
        if self._yard is None:
            await self.all[0].begun()

    async def texts_are_tried(self) -> None:
        """Wait for the trials of all templates and tokenizers.

        Raises TokenizerError for a model that is loaded at the start, NoRenderer.
        """
        for place, engine in enumerate(self.all):
            try:
                await engine.texts_are_tried()
            except TokenizerError as error:
                if not self.places or self.places[place].rule.at_start:
                    raise
                self.places[place].give_up(f"{error.what}; {error.fix}")
                engine.sleep(self.places[place].fault)

    async def gave_up(self) -> GaveUp | None:
        """Wait until no engine of any model will run any more, and return why; None after `close`."""
        if self._yard is not None:  # whatever ends can be loaded again
            await asyncio.Event().wait()
        assert self._starting is not None, "start first"
        await asyncio.shield(self._starting)
        ends = await asyncio.gather(*map(self._end_of, self.all))
        return ends[-1]

    async def _end_of(self, engine: AsyncEngine) -> GaveUp | None:
        end = await engine.gave_up()
        if end is not None and len(self.all) > 1:
            log.critical("%s is given up: %s; %s", engine.names.served[0], end.what, end.fix)
        return end

    async def drain(self, *, timeout_s: float, delay_s: float = 0.0) -> bool:
        """Drain all engines at once; False if requests had to be cut off."""
        _, *drained = await asyncio.gather(
            self._close_yard(delay_s),
            *(each.drain(timeout_s=timeout_s, delay_s=delay_s) for each in self.all),
        )
        return all(drained)

    async def _close_yard(self, delay_s: float) -> None:
        """Load models for those that ask until the delay is over."""
        if self._yard is not None:
            await asyncio.sleep(delay_s)
            await self._yard.close()

    async def close(self) -> None:
        """End all engine processes, and every active request with an error."""
        if self._yard is not None:
            await self._yard.close()
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        await asyncio.gather(*(each.close() for each in self.all))


def _with_engine(spec: ModelSpec, desk: Desk) -> tuple[ModelSpec, AsyncEngine]:
    """Make the engine of a model. Raises TokenizerError if it is to be loaded at the start, OptionError."""
    try:
        return spec, AsyncEngine(spec.engine, desk)
    except TokenizerError as error:
        if spec.keep.at_start:
            raise
        spec = spec.failed(error.what, error.fix)
        return spec, AsyncEngine(spec.engine, desk)

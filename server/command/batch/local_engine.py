"""The application with its engine, in this process and without a port."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from fastapi import FastAPI

from engine.errors import EngineUnavailable
from engine.frontend.client import AsyncEngine
from engine.options.engine_config import EngineConfig, ServerConfig
from engine.text.chat_template import NoRenderer
from engine.text.tokenizer import TokenizerError
from server.app import build_app
from server.command.batch.command import CannotRun
from server.command.startup.banner import LoadingDisplay
from server.command.startup.template_notice import note_template

_BAD_MODEL = 78


@asynccontextmanager
async def local_app(engine_config: EngineConfig, server_config: ServerConfig) -> AsyncIterator[FastAPI]:
    """Ready when this yields; leaving ends the engine process. Raises CannotRun."""
    try:
        note_template(Path(engine_config.model_path), server_config)
        engine = AsyncEngine(engine_config)
    except TokenizerError as error:
        raise _unusable(error) from None
    engine.start()
    try:
        await _load(engine)
        async with while_it_lives(engine):
            # No other client can reach it, so that no key is needed.
            # A batch has a pace of its own: refusing its requests would only slow it down.
            edge = replace(server_config.edge, max_memory_use=1.0)
            yield build_app(engine, replace(server_config, api_keys=(), edge=edge))
    finally:
        await engine.close()


@asynccontextmanager
async def while_it_lives(engine: AsyncEngine) -> AsyncIterator[None]:
    """Cancel the body of the `with` when the engine is gone for good, and raise CannotRun instead."""
    owner = asyncio.current_task()
    assert owner is not None
    watching = asyncio.create_task(engine.gave_up())
    watching.add_done_callback(lambda done: done.cancelled() or owner.cancel())
    try:
        yield
    except asyncio.CancelledError:
        gave_up = watching.result() if watching.done() else None
        if gave_up is None:
            raise
        owner.uncancel()
        raise CannotRun(f"{gave_up.what}; {gave_up.fix}", gave_up.exit_code) from None
    finally:
        watching.cancel()


def _unusable(error: TokenizerError) -> CannotRun:
    return CannotRun(f"{error.what}; {error.fix}", _BAD_MODEL)


async def _load(engine: AsyncEngine) -> None:
    try:
        await engine.texts_are_tried()
        await LoadingDisplay(sys.stderr).follow(engine)
    except TokenizerError as error:
        raise _unusable(error) from None
    except NoRenderer as error:
        raise CannotRun(f"{error.what}; {error.fix}", error.exit_code) from None
    except EngineUnavailable:
        gave_up = await engine.gave_up()
        if gave_up is None:
            raise
        raise CannotRun(f"{gave_up.what}; {gave_up.fix}", gave_up.exit_code) from None

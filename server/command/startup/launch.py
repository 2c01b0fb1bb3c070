"""The run of a server from a checked configuration to the exit code: the engine first, HTTP while it loads.

Owns: the order of the start, and that the engine is closed at the end. The engine process takes seconds to
import a tensor library; this process imports the web framework meanwhile, on another core.
"""

import asyncio
import logging
from pathlib import Path

import uvloop

from engine.logs.lines import ProcessName
from engine.logs.setup import Logs
from engine.models.engines import ModelEngines
from engine.models.entries import ModelSpec
from engine.models.memory_shares import with_shares
from engine.options.declaration import OptionError
from engine.options.engine_config import ServerConfig
from engine.processes.garbage import only_imports
from engine.text.chat_template import NoRenderer
from engine.text.checkpoint_texts import check_files
from engine.text.tokenizer import TokenizerError
from server.command.startup.banner import Announcement
from server.command.startup.signals import EXIT_HTTP_ENDED, Signals
from server.command.startup.template_notice import note_template
from server.edge.http.listening import CannotListen, Listeners

log = logging.getLogger(__name__)

EXIT_BAD_MODEL = 78


def run(models: tuple[ModelSpec, ...], server_config: ServerConfig, listeners: Listeners) -> int:
    """Serve until a signal, or until there can be no engine; returns the exit code. Raises OptionError."""
    level = logging.getLevelNamesMapping()[server_config.log_level.upper()]
    with (
        Logs(models[0].engine.log_format, level=level, process=ProcessName.API) as logs,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        announcement = Announcement(logs)
        try:
            _check_state(server_config)
            models = with_shares(tuple(map(_checked, models)))
            return runner.run(_launch(models, server_config, listeners, announcement))
        except TokenizerError as error:
            return announcement.end(error.what, error.fix, EXIT_BAD_MODEL)
        except NoRenderer as error:
            return announcement.end(error.what, error.fix, error.exit_code)
        except (OptionError, CannotListen):
            raise
        except Exception:
            log.critical("the server ends by an unexpected error", exc_info=True)
            return EXIT_HTTP_ENDED


def _checked(spec: ModelSpec) -> ModelSpec:
    """Look at the files of a model. Raises TokenizerError if it is to be loaded at the start."""
    try:
        check_files(spec.engine.worker)
        note_template(Path(spec.engine.model_path), spec)
    except TokenizerError as error:
        if spec.keep.at_start:
            raise
        return spec.failed(error.what, error.fix)
    return spec


async def _launch(
    models: tuple[ModelSpec, ...],
    server_config: ServerConfig,
    listeners: Listeners,
    announcement: Announcement,
) -> int:
    engines, signals = ModelEngines(models), Signals()
    engines.start()
    try:
        await engines.begun()
        # Not at the top: a second of imports, while the engine process has its own.
        with only_imports():
            from server.command.startup.serving import serve
        if await _texts_are_tried(engines, signals):
            return await serve(engines, models, server_config, listeners, signals, announcement)
        log.info("stopping: nothing was served yet")
        return 0
    finally:
        await engines.close()
        signals.restore()


async def _texts_are_tried(engines: ModelEngines, signals: Signals) -> bool:
    """Wait for the trials of template and tokenizer; False if a signal came first.

    Raises TokenizerError, NoRenderer.
    The thread that waits for a trial ends with it, when the engine is closed.
    """
    tried = asyncio.create_task(engines.texts_are_tried())
    stopped = asyncio.create_task(signals.first.wait())
    await asyncio.wait([tried, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not tried.done():
        tried.cancel()
        return False
    await tried
    return True


def _check_state(config: ServerConfig) -> None:
    """Open the folder of files and batches once before there is an engine process. Raises OptionError."""
    if config.edge.state_folder is not None:
        from server.api.batches.store import open_store  # not at the top: few have one

        open_store(config.edge.state_folder, max_bytes=config.edge.state_max_bytes).close()

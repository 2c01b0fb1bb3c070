"""The run of a server from a checked configuration to the exit code: the engine first, HTTP while it loads.

Owns: the order of the start, and that the engine is closed at the end. The engine process takes seconds to
import a tensor library; this process imports the web framework meanwhile, on another core.
Never: options (cli.py), HTTP or the order of the end (serving.py).
"""

import asyncio
import logging
from pathlib import Path

import uvloop

from engine.frontend.client import AsyncEngine
from engine.logs.lines import ProcessName
from engine.logs.setup import Logs
from engine.options.declaration import OptionError
from engine.options.engine_config import EngineConfig, ServerConfig
from engine.processes.garbage import only_imports
from engine.text.chat_template import NoRenderer
from engine.text.checkpoint_texts import check_files
from engine.text.tokenizer import TokenizerError
from server.command.startup.banner import Announcement
from server.command.startup.launched import EXIT_HTTP_ENDED, Launched, Signals
from server.command.startup.template_notice import note_template
from server.edge.http.listening import CannotListen, Listeners

log = logging.getLogger(__name__)

EXIT_BAD_MODEL = 78


def run(engine_config: EngineConfig, server_config: ServerConfig, listeners: Listeners) -> int:
    """Serve until a signal, or until there can be no engine; returns the exit code. Raises OptionError."""
    level = logging.getLevelNamesMapping()[server_config.log_level.upper()]
    with (
        Logs(engine_config.log_format, level=level, process=ProcessName.API) as logs,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        announcement = Announcement(logs)
        try:
            _check_state(server_config)
            check_files(engine_config.worker)
            note_template(Path(engine_config.model_path), server_config)
            return runner.run(_launch(engine_config, server_config, listeners, announcement))
        except TokenizerError as error:
            return announcement.end(error.what, error.fix, EXIT_BAD_MODEL)
        except NoRenderer as error:
            return announcement.end(error.what, error.fix, error.exit_code)
        except (OptionError, CannotListen):
            raise
        except Exception:
            log.critical("the server ends: nobody expected this", exc_info=True)
            return EXIT_HTTP_ENDED


async def _launch(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    listeners: Listeners,
    announcement: Announcement,
) -> int:
    engine = AsyncEngine(engine_config)
    launched = Launched(
        engine=engine,
        signals=Signals(),
        engine_config=engine_config,
        server_config=server_config,
        listeners=listeners,
    )
    engine.start()
    try:
        await engine.begun()
        # Not at the top: a second of imports, while the engine process has its own.
        with only_imports():
            from server.command.startup.serving import serve
        if await _texts_are_tried(engine, launched.signals):
            return await serve(launched, announcement)
        log.info("stopping: nothing was served yet")
        return 0
    finally:
        await engine.close()
        launched.signals.restore()


async def _texts_are_tried(engine: AsyncEngine, signals: Signals) -> bool:
    """Wait for the trials of template and tokenizer; False if a signal came first.

    Raises TokenizerError, NoRenderer.
    The thread that waits for a trial ends with it, when the engine is closed.
    """
    tried = asyncio.create_task(engine.texts_are_tried())
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

"""The command `tokenyard`: serve a model, or measure a server.

Owns: subcommands, and the end after a mistake: one line on stderr and a code.
Never: imports a web framework or a tensor library before the options are known to be right and the
port is ours: --help and mistakes must answer at once.

Codes: 0 done, 2 a mistake on the command line, 98 the port is in use, 141 the reader of the output has left;
others come from the subcommand.
"""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module

from engine.models.entries import resolve_models
from engine.options.declaration import UnservableModel
from engine.options.edge_config import ADMIN_HOST
from engine.options.options import OptionError
from engine.options.sources import closest, merge, read_sources
from engine.version import VERSION
from server.command.command_line import MORE_MODELS, OptionParser, Several, failed
from server.command.config_command import rows_of
from server.command.manual import USAGE
from server.edge.http.listening import CannotListen, Listeners, PortInUse, listen, listen_unix

EXIT_USAGE = 2
EXIT_UNSERVABLE = 78
TOOLS = {
    "bench": "bench.load.command",
    "simulate": "bench.simulate.command",
    "trace": "bench.trace.command",
    "doctor": "server.command.doctor",
    "pull": "server.command.pull_command",
    "config": "server.command.config_command",
    "keys": "server.command.keys_command",
    "run-batch": "server.command.batch.command",
    "chat": "server.command.terminal.chat_command",
    "complete": "server.command.terminal.complete_command",
    "top": "server.command.terminal.top_command",
    "completion": "server.command.completion_command",
    "man": "server.command.manual",
}
EXIT_PORT_IN_USE = 98
EXIT_BROKEN_PIPE = 141
"""Code that a shell reports of a program which SIGPIPE ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be flushed
        return EXIT_BROKEN_PIPE
    except UnservableModel as error:
        return failed("tokenyard", error, EXIT_UNSERVABLE)
    except (OptionError, CannotListen) as error:
        return failed("tokenyard", error, EXIT_USAGE)
    except PortInUse as error:
        return failed("tokenyard", error, EXIT_PORT_IN_USE)
    return code


def _dispatch(words: list[str]) -> int:
    command, rest = (words[0], words[1:]) if words else ("serve", [])
    if command in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if command in ("-V", "--version", "version"):
        print(f"tokenyard {VERSION}")
        return 0
    if command == "serve":
        return _serve(rest)
    if command in TOOLS:
        return _run_tool(command, rest)
    if command.startswith("-"):
        return _serve(words)
    fix = closest(command, ("serve", *TOOLS)).replace("tokenyard serve", "tokenyard")
    raise OptionError(repr(command), "there is no such command", f"{fix} (a model goes after `serve`)")


def _serve(words: list[str]) -> int:
    flags = OptionParser(
        prog="tokenyard serve",
        description="Serve a model, or several, over HTTP, as OpenAI's API does.",
        takes_several=Several.TAKEN,
    ).read(words)
    more = flags.pop(MORE_MODELS, ())
    sources = read_sources(flags, os.environ)
    models, server_config = resolve_models(merge(sources), more)
    engine_config = models[0].engine
    if engine_config.cluster is not None and engine_config.cluster.node:
        from engine.nodes.agent import run_node

        return run_node(engine_config, server_config.log_level)
    server_config = replace(server_config, shown_options=rows_of(sources))
    with ExitStack() as stack:
        edge = server_config.edge
        if edge.uds is None:
            listener = stack.enter_context(listen(server_config.host, server_config.port))
        else:
            listener = stack.enter_context(listen_unix(edge.uds))
        probes = admin = None
        if server_config.health_port is not None:
            port = server_config.health_port
            probes = stack.enter_context(listen(server_config.host, port, flag="--health-port"))
        if edge.admin_port is not None:
            admin = stack.enter_context(listen(ADMIN_HOST, edge.admin_port, flag="--admin-port"))
        listeners = Listeners(main=listener, probes=probes, admin=admin)
        # Not at the top: this is where the seconds of imports begin.
        from server.command.startup import launch

        return launch.run(models, server_config, listeners)


def _run_tool(command: str, words: list[str]) -> int:
    # Imported here: each brings what the others do not need.
    main: Callable[[list[str]], int] = import_module(TOOLS[command]).main
    return main(words)

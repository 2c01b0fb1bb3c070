"""The command `tokenyard`: serve a model, or measure a server.

Owns: subcommands, and how each mistake ends: one line on stderr and a code.
Never: imports a web framework or a tensor library before the options are known to be right and the
port is ours: --help and mistakes must answer at once.

Codes: 0 done, 2 a mistake on the command line, 98 the port is in use; others come from what was run.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

from engine.config import resolve
from engine.option_sources import add_flags, closest, read_options
from engine.options import DECLARATIONS, OptionError
from server.listening import CannotListen, PortInUse, listen

EXIT_USAGE = 2
_TOOLS = {"bench": "bench.cli", "simulate": "bench.simulate.cli", "trace": "bench.trace"}
EXIT_PORT_IN_USE = 98

_USAGE = """\
usage: tokenyard serve [MODEL] [options]      serve a model over HTTP, as OpenAI's API does
       tokenyard bench ...                    send load to a server and measure it
       tokenyard simulate ...                 what would happen with other load, memory, policy
       tokenyard trace FILE                   show what --trace-steps has written
       tokenyard --version

Without any options a tiny built-in model is served. `tokenyard serve --help` lists all options.
"""

_EPILOG = """\
Each option is also an environment variable (--max-num-seqs: TOKENYARD_MAX_NUM_SEQS) and a key of the
--config file (max-num-seqs). Flags win over the environment, that over the file.
Numbers: 2K is 2048, 2k is 2000; 4GiB and 4G are 4 * 2**30 bytes, 4GB is 4 * 10**9.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatch(words)
    except (OptionError, CannotListen) as error:
        return _say(error, EXIT_USAGE)
    except PortInUse as error:
        return _say(error, EXIT_PORT_IN_USE)


def _say(error: Exception, code: int) -> int:
    print(f"tokenyard: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def _dispatch(words: list[str]) -> int:
    command, rest = (words[0], words[1:]) if words else ("serve", [])
    if command in ("-h", "--help", "help"):
        print(_USAGE, end="")
        return 0
    if command in ("-V", "--version", "version"):
        print(f"tokenyard {_version()}")
        return 0
    if command == "serve":
        return _serve(rest)
    if command in _TOOLS:
        return _run_tool(command, rest)
    if command.startswith("-"):
        return _serve(words)
    fix = closest(command, ("serve", *_TOOLS)).replace("tokenyard serve", "tokenyard")
    raise OptionError(repr(command), "there is no such command", f"{fix} (a model goes after `serve`)")


def _version() -> str:
    try:
        return version("tokenyard")
    except PackageNotFoundError:
        return "(not installed)"


def _serve(words: list[str]) -> int:
    parser = _Parser(
        prog="tokenyard serve",
        usage="tokenyard serve [MODEL] [options]",
        description="Serve a model over HTTP, as OpenAI's API does.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # an abbreviation breaks the day a second option begins alike
    )
    add_flags(parser)
    found, unknown = parser.parse_known_args(words)
    if unknown:
        raise _unknown_word(unknown)
    engine_config, server_config = resolve(read_options(vars(found), os.environ))
    with listen(server_config.host, server_config.port) as listener:
        # Not at the top: this is where the seconds of imports begin.
        from server import launch

        return launch.run(engine_config, server_config, listener)


def _run_tool(command: str, words: list[str]) -> int:
    # Imported here: each brings what the others do not need.
    main: Callable[[list[str]], int] = import_module(_TOOLS[command]).main
    return main(words)


def _unknown_word(words: list[str]) -> OptionError:
    """About the first unknown flag; a value is not repeated, since it may be a secret."""
    word = next((word for word in words if word.startswith("-")), "").split("=", maxsplit=1)[0]
    if not word:
        return OptionError(
            "tokenyard serve", "there is more than one MODEL", "give one, and quote values that hold spaces"
        )
    known = [f"--{name.replace('_', '-')}" for name in DECLARATIONS]
    known += ["--no-enable-prefix-caching", "--no-allow-unauthenticated", "--config"]
    return OptionError(word, "there is no such option", closest(word.replace("_", "-"), known))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise OptionError("tokenyard serve", message, "see `tokenyard serve --help`")

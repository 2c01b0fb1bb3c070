"""`tokenyard completion`: the words that a shell may complete.

Owns: the parser of the whole command, put together from those of its parts.
"""

import argparse
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from engine.options.options import DECLARATIONS, OptionError
from engine.options.values import Choice
from server.command.cli import TOOLS
from server.command.command_line import OptionParser

_SHELLS = ("bash", "zsh", "tcsh")
_USAGE = """\
usage: tokenyard completion bash|zsh|tcsh

Print a script that completes the words of this command. For the shell that runs now:

    eval "$(tokenyard completion bash)"

or write it where the shell looks: ~/.local/share/bash-completion/completions/tokenyard for bash, a file
_tokenyard in a folder of $fpath for zsh.
"""
_WITH_PARSERS = ("pull", "chat", "complete", "top", "run-batch", "bench", "simulate", "trace")
_WORDS = (
    ("keys", "Make an API key.", ("new",)),
    ("completion", "Print a script that completes words.", _SHELLS),
)


def main(words: Sequence[str]) -> int:
    """Print the script of a shell; returns the exit code. Raises OptionError."""
    if list(words) in (["-h"], ["--help"]):
        print(_USAGE, end="")
        return 0
    if len(words) != 1 or words[0] not in _SHELLS:
        raise OptionError("tokenyard completion", "it takes the name of a shell", f"use {', '.join(_SHELLS)}")
    # Not at the top: only this command needs it.
    import shtab

    print(shtab.complete(whole_parser(), shell=words[0]))
    return 0


def whole_parser() -> argparse.ArgumentParser:
    """Put the parsers of all commands under one."""
    root = argparse.ArgumentParser(prog="tokenyard")
    commands = root.add_subparsers(metavar="COMMAND")
    for name in _WITH_PARSERS:
        build: Callable[[], argparse.ArgumentParser] = import_module(TOOLS[name]).build_parser
        _add(commands, name, build())
    _add(commands, "serve", _options("serve", "Serve a model over HTTP, as OpenAI's API does."))
    _add(commands, "doctor", _options("doctor", "Check this machine and the model.", "--json"))
    config = commands.add_parser("config", help="Show the options.").add_subparsers(metavar="WORD")
    shown = _options("config show", "Show the value of every option.", "--json", "--changed")
    _add(config, "show", shown)
    config.add_parser("schema", help="Print the JSON schema of the file.")
    for name, text, choices in _WORDS:
        commands.add_parser(name, help=text).add_argument("word", choices=choices)
    commands.add_parser("man", help="Print the manual page.")
    return root


def _options(name: str, text: str, *switches: str) -> OptionParser:
    """Make a parser of all options of the server, with a few of a command's own."""
    parser = OptionParser(prog=f"tokenyard {name}", description=text)
    for switch in switches:
        parser.add_argument(switch, action="store_true")
    return parser


def _add(commands: Any, name: str, parent: argparse.ArgumentParser) -> None:
    text = (parent.description or "").partition(". ")[0].replace("%", "%%")
    # A help option of its own would contradict its parent's.
    parser = commands.add_parser(name, help=text, parents=[parent], add_help=False)
    for action in parser._actions:
        _add_values(action)


def _add_values(action: argparse.Action) -> None:
    """Set the values that a flag can have: one of a few words, a file, a folder."""
    import shtab

    declared = DECLARATIONS.get(action.dest)
    if declared is not None and isinstance(declared.kind, Choice):
        action.choices = declared.kind.words
    if action.metavar in ("FILE", "TRACE"):
        action.complete = shtab.FILE  # type: ignore[attr-defined]
    if action.metavar in ("FOLDER", "MODEL"):
        action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]

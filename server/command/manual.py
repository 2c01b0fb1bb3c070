"""The manual: the usage of the whole command, and `tokenyard man`, its page for man(1)."""

import sys
from collections.abc import Sequence

from engine.options.options import BY_KEY, COMMON, DECLARATIONS, FIELDS, Group, OptionError

USAGE = """\
usage: tokenyard serve [MODEL] [options]      serve a model over HTTP, as OpenAI's API does
       tokenyard pull ORG/NAME                fetch a model from a hub
       tokenyard chat                         talk to a running server
       tokenyard complete PROMPT              let a running server continue a text
       tokenyard top                          watch the requests, blocks and steps of a running server
       tokenyard run-batch -i FILE -o FILE    answer a file of requests in OpenAI's batch format
       tokenyard bench ...                    send load to a server and measure it
       tokenyard simulate ...                 what would happen with other load, memory, policy
       tokenyard trace FILE                   show what --trace-steps has written
       tokenyard doctor [MODEL] [options]     check this machine and the model before serving
       tokenyard config show [options]        the value of every option, and where it comes from
       tokenyard config schema                the JSON schema of the --config file
       tokenyard keys new NAME                make an API key and its entry for --api-keys-file
       tokenyard completion bash|zsh|tcsh     the script that lets a shell complete these words
       tokenyard man                          the manual page, for `man -l -`
       tokenyard --version

Without any options a tiny built-in model is served. `tokenyard serve --help` shows the options
that most need, --help=all all of them.
"""
_MAN_USAGE = "usage: tokenyard man | man -l -\n\nPrint the manual page.\n"
_EXIT_CODES = (
    ("0", "done, or ended by SIGTERM"),
    ("1", "doctor: serve would fail; others: the server or the hub refused, or a request failed"),
    ("2", "a mistake on the command line"),
    ("69", "chat, complete, top, run-batch, pull: no server, or no hub, answers"),
    ("70", "the engine or the HTTP server ended by itself, or there was no process to render chats in"),
    ("78", "the model cannot be served"),
    ("98", "the port is in use"),
)


def main(words: Sequence[str]) -> int:
    """Print the manual page; returns the exit code. Raises OptionError."""
    if words:
        if list(words) in (["-h"], ["--help"]):
            print(_MAN_USAGE, end="")
            return 0
        raise OptionError("tokenyard man", "it takes no words", "write `tokenyard man | man -l -`")
    sys.stdout.write(man_page())
    return 0


def man_page() -> str:
    """Write the manual page in the macros of man(7)."""
    lines = ['.TH TOKENYARD 1 "" Tokenyard "User commands"', ".SH NAME"]
    lines += ["tokenyard \\- serve language models over OpenAI's API", ".SH SYNOPSIS", ".nf"]
    lines += [_roff(line.removeprefix("usage:").strip()) for line in USAGE.partition("\n\n")[0].splitlines()]
    lines += [".fi", ".SH DESCRIPTION", _roff(USAGE.partition("\n\n")[2].strip()), ".SH OPTIONS"]
    lines += [
        "Each option of",
        ".B tokenyard serve",
        "is also a variable of the environment and a line of the",
        ".I --config",
        _roff("file, a YAML file: --max-num-seqs is TOKENYARD_MAX_NUM_SEQS and max-num-seqs."),
        "Those marked with * are what most need.",
    ]
    for group in Group:
        lines += [f'.SS "{group.value}"']
        for key, name in BY_KEY.items():
            if DECLARATIONS[name].group is group:
                lines += _man_option(key, name)
    lines += [".SH EXIT STATUS"]
    for code, text in _EXIT_CODES:
        lines += [".TP", f".B {code}", _roff(text)]
    return "\n".join(lines) + "\n"


def _man_option(key: str, name: str) -> list[str]:
    declaration = DECLARATIONS[name]
    default = declaration.open_default or declaration.kind.show(FIELDS[name].default)
    mark = " *" if name in COMMON else ""
    return [
        ".TP",
        f'.BI "{_roff(f"--{key}")} " "{_roff(declaration.kind.metavar)}" "{mark}"',
        _roff(f"{declaration.help} Default: {default}."),
    ]


def _roff(text: str) -> str:
    """Escape what roff would read as its own."""
    plain = text.replace("\\", "\\e").replace("-", "\\-").replace('"', "\\(dq")
    return f"\\&{plain}" if plain.startswith((".", "'")) else plain

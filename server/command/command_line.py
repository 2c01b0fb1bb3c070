"""The words after `serve`, `doctor` or `config show`: the options of the server, as text by name.

Owns: the parser that these commands share, and the words about an unknown flag.
Never: the meaning of a value (engine/options/values.py), or the order of sources
(engine/options/sources.py).
"""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from engine.options.options import COMMON, DECLARATIONS, Group, OptionError
from engine.options.sources import add_flags, closest
from engine.options.values import Switch
from server.command.other_names import advice_for

_HELP = "--help"
_EPILOG = """\
Each option is also an environment variable (--max-num-seqs: TOKENYARD_MAX_NUM_SEQS) and a key of the
--config file (max-num-seqs). Flags win over the environment, that over the file.
Numbers: 2K is 2048, 2k is 2000; 4GiB and 4G are 4 * 2**30 bytes, 4GB is 4 * 10**9.
"""


class OptionParser(argparse.ArgumentParser):
    """A parser of all options of the server. A mistake raises OptionError rather than ending the process."""

    def __init__(self, *, prog: str, description: str) -> None:
        super().__init__(
            prog=prog,
            usage=f"{prog} [MODEL] [options]",
            description=description,
            epilog=_EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # an abbreviation breaks the day a second option begins alike
            add_help=False,
        )
        self.add_argument(
            "-h",
            _HELP,
            action="store_true",
            default=argparse.SUPPRESS,
            help="Show the options that most need; --help=all shows all, --help=GROUP those of a group, "
            "--help=WORD those whose text has the word.",
        )
        self._flags = add_flags(self)

    def read(self, words: Sequence[str]) -> dict[str, Any]:
        """Parse to values by name, as option_sources.read_options takes them. Raises OptionError.

        Print help and raise SystemExit if the words ask for it.
        """
        self._answer_help(words)
        found, unknown = self.parse_known_args(words)
        if unknown:
            raise self._unknown_word(unknown)
        return vars(found)

    def _answer_help(self, words: Sequence[str]) -> None:
        asked = [word for word in words if word in ("-h", _HELP) or word.startswith(f"{_HELP}=")]
        if not asked:
            return
        topic = asked[0].partition("=")[2]
        chosen = _names_about(topic)
        for name, action in self._flags.items():
            if name not in chosen:
                action.help = argparse.SUPPRESS
        if not topic:
            groups = ", ".join(_slug(group) for group in Group)
            self.epilog = f"{len(chosen)} of {len(self._flags)} options; {_HELP}=all shows all of them, "
            self.epilog += f"{_HELP}=GROUP one group:\n{groups}; {_HELP}=WORD finds a word.\n\n{_EPILOG}"
        print(self.format_help(), end="")
        raise SystemExit(0)

    def error(self, message: str) -> NoReturn:
        raise OptionError(self.prog, message, f"see `{self.prog} --help`")

    def _unknown_word(self, words: list[str]) -> OptionError:
        """About the first unknown flag; a value is not repeated, since it may be a secret."""
        word = next((word for word in words if word.startswith("-")), "").split("=", maxsplit=1)[0]
        if not word:
            return OptionError(
                self.prog, "there is more than one MODEL", "give one, and quote values that hold spaces"
            )
        keys = {name: name.replace("_", "-") for name in DECLARATIONS}
        switches = [name for name in keys if isinstance(DECLARATIONS[name].kind, Switch)]
        known = [f"--{key}" for key in keys.values()]
        known += [*(f"--no-{keys[name]}" for name in switches), "--config"]
        flag = word.replace("_", "-")
        advice = advice_for(flag.lstrip("-"), frozenset(keys.values())) or closest(flag, known)
        return OptionError(word, "there is no such option", advice)


def _slug(group: Group) -> str:
    """Shorten a heading to a word for --help=GROUP: `Keys and TLS` is keys."""
    return group.value.partition(",")[0].partition(" and ")[0].lower().replace(" ", "-")


def _names_about(topic: str) -> frozenset[str]:
    """Choose options by `all`, a group, or a word in their names and texts. Raises OptionError."""
    if not topic:
        return frozenset(COMMON)
    if topic == "all":
        return frozenset(DECLARATIONS)
    word = topic.lower().strip("-")
    groups = [group for group in Group if word in (_slug(group), *_slug(group).split("-"))]
    if groups:
        return frozenset(name for name, each in DECLARATIONS.items() if each.group in groups)
    spaced = word.replace("-", "_")
    found = [name for name, each in DECLARATIONS.items() if spaced in name or word in each.help.lower()]
    if not found:
        known = ", ".join(_slug(group) for group in Group)
        raise OptionError(f"{_HELP}={topic}", "no option has this word", f"use all, or a group: {known}")
    return frozenset(found)

"""The words after `serve`, `doctor` or `config show`: the options of the server, as text by name.

Owns: the parser that these commands share, and the words about an unknown flag.
Never: the meaning of a value (engine/options/option_values.py), or the order of sources
(engine/options/option_sources.py).
"""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from engine.options.option_sources import add_flags, closest
from engine.options.option_values import Switch
from engine.options.options import DECLARATIONS, OptionError
from engine.options.other_names import advice_for

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
        )
        add_flags(self)

    def read(self, words: Sequence[str]) -> dict[str, Any]:
        """Parse to values by name, as option_sources.read_options takes them. Raises OptionError."""
        found, unknown = self.parse_known_args(words)
        if unknown:
            raise self._unknown_word(unknown)
        return vars(found)

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

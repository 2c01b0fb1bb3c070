"""Parser of the words behind `bench`, `simulate` and `trace`.

Owns: what is said of an option that does not exist.
"""

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any


class WordParser(argparse.ArgumentParser):
    """A parser that says which option may have been meant, with the usage of the very command."""

    def parse_known_args(  # type: ignore[override]  # it is overloaded by the type of the namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse; ends the program for a word that is not known."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            near = get_close_matches(name, self._option_string_actions, n=1)
            self.error(f"{name} is unknown" + (f"; did you mean {near[0]}?" if near else ""))
        return found, unknown

"""The worker's grammar library, where it is not installed: a name, so that all else can be loaded.

Owns: that no more than names is there. A grammar would fail, and nothing here asks for one.
Never: does anything where the library is installed.

Also a plugin of pytest (`-p campaigns.gpu.stand_ins`) for tests of the worker: importing it is enough.
"""

import importlib.util
import sys
from types import ModuleType
from unittest import SkipTest


class GrammarsMissing(SkipTest):
    """Somebody asked for a grammar. A test that does is skipped."""


class _Named:
    def __init__(self, *args: object, **_: object) -> None:
        """Made where the worker's module is loaded, with limits that nothing reads. Else GrammarsMissing."""
        if args:
            raise GrammarsMissing("llguidance is not installed")


def stand_in_for_grammars() -> None:
    """Before anything of the worker is imported."""
    if "llguidance" in sys.modules or importlib.util.find_spec("llguidance") is not None:
        return
    library, converter = ModuleType("llguidance"), ModuleType("llguidance.gbnf_to_lark")
    for name in ("LLExecutor", "LLMatcher", "LLParserLimits", "LLTokenizer"):
        setattr(library, name, type(name, (_Named,), {}))
    converter.any_to_lark = None  # type: ignore[attr-defined]
    sys.modules.update({"llguidance": library, "llguidance.gbnf_to_lark": converter})


stand_in_for_grammars()

"""The names of adapters."""

import re

MAX_ADAPTERS = 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")


def is_adapter_name(text: str) -> bool:
    """Tell whether an adapter may have this name."""
    return _NAME.fullmatch(text) is not None

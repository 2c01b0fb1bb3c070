"""Triton's interpreter beside a newer numpy than it was written for.

Owns: what must be mended in it, as long as a release that we support needs it.
Never: changes what a kernel computes.
"""

from functools import cache
from typing import Any

import triton
from triton.runtime import interpreter


@cache
def mend_interpreter() -> None:
    """Let a scalar of a kernel be the bound of a loop: of an array of one element numpy 2.5 makes no number.

    Triton 3.6 asks for that.
    """
    if not triton.__version__.startswith("3.6."):
        return
    patch = interpreter._patch_lang_tensor

    def patch_with_numbers(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_with_numbers

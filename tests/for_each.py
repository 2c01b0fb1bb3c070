"""One test for many things of a kind.

Owns: trying a check on each of them, and the name of each that fails it.
Never: the check.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest

Thing = TypeVar("Thing")


def for_each(
    things: Iterable[Thing], *, ids: Callable[[Thing], str] = str
) -> Callable[[Callable[[Thing], None]], Callable[[pytest.Subtests], None]]:
    """Decorator of a check: in place of a test for each thing, of which a hundred say no more than one."""

    def decorate(check: Callable[[Thing], None]) -> Callable[[pytest.Subtests], None]:
        def test(subtests: pytest.Subtests) -> None:
            for thing in things:
                with subtests.test(ids(thing)):
                    check(thing)

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return decorate

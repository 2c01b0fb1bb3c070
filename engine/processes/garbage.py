"""Settings of Python's garbage collector, which must not search modules that stay loaded.

Owns: the objects that the collector visits, and how often.
Never: turns it off for long: requests leave cycles behind (tasks, tracebacks).

A full collection visits every object. Modules, routes and schemas alone are 90,000 in the API
process and 350,000 in the engine process: 60 and 200 ms in which no token moves, again and again.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NUM_NEW_OBJECTS = 10_000
"""New objects that start a collection. Python's default of 700 come and go with a few requests."""


@contextmanager
def only_imports() -> Iterator[None]:
    """Turn the collector off during imports, which saves a tenth of their time; then exempt them."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def keep_what_is_loaded() -> None:
    """Exempt all present objects. Call once, after loading and before serving."""
    gc.collect()
    gc.freeze()
    _, *older = gc.get_threshold()
    gc.set_threshold(_NUM_NEW_OBJECTS, *older)

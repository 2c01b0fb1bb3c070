"""Python's search for cyclic garbage, kept away from what a process has loaded for good.

Owns: what the collector looks at, and how often.
Never: turns it off: requests leave cycles behind (tasks, tracebacks).

A full collection visits every object there is. Modules, routes and schemas alone are 90,000 in the API
process and 350,000 in the engine process: 60 and 200 ms in which no token moves, again and again.
"""

import gc

_NUM_NEW_OBJECTS = 10_000
"""More objects than before that make the collector look. Python's 700 come and go with a few requests."""


def keep_what_is_loaded() -> None:
    """Call once, when all is loaded and nothing is served yet."""
    gc.collect()
    gc.freeze()
    _, *older = gc.get_threshold()
    gc.set_threshold(_NUM_NEW_OBJECTS, *older)

"""Objects that the collector of cycles may skip, and those it must still find."""

import subprocess
import sys

from tests.e2e.serving import ROOT

_PROGRAM = """
import gc, weakref
from engine.processes.garbage import keep_what_is_loaded

class Node: pass

def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)

before = cycle()
keep_what_is_loaded()
assert before() is None, "garbage was kept for good"
assert gc.get_freeze_count() > 1000, "what is loaded is looked at again and again"
after = cycle()
gc.collect()
assert after() is None, "the garbage of requests is never found"
assert gc.isenabled() and gc.get_threshold()[0] > 700
"""


def test_what_is_loaded_is_never_visited_again_but_new_garbage_is_found() -> None:
    """In a process of its own: it is for good."""
    subprocess.run([sys.executable, "-c", _PROGRAM], cwd=ROOT, check=True, timeout=60)

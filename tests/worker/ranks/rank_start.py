"""A rank of tests as a process of its own: `python -m tests.worker.ranks.rank_start MODULE ARGUMENT...`.

Owns: the order of its imports, which is that of the product's ranks: what no CPU needs is put off, and that
is half of the seconds of a start.
"""

import runpy
import sys

from worker.devices.put_off import import_torch

if __name__ == "__main__":
    import_torch("cpu")
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)

"""The memory that ranks on one machine share.

Owns: its size and its allocation. It has no name: processes inherit it, and it ends with the last of them.
Never: needs torch, so that the ranks can be started before anything slow is imported.
"""

import os

PAGE_BYTES = 16 << 20
"""For the parts of all ranks, two of each; larger ones are exchanged in pieces."""


def make_page() -> int:
    """Allocate the memory; return its file descriptor. Raises OSError."""
    descriptor = os.memfd_create("tokenyard-ranks", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, PAGE_BYTES)
    return descriptor

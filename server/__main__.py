"""`python -m server` is the command `tokenyard`."""

import sys

from server.command.startup.allocator import allocate_from_heaps

if __name__ == "__main__":
    # Before the imports of the command, which would be made twice.
    allocate_from_heaps(sys.argv[1:])
    from server.command.cli import main

    sys.exit(main())

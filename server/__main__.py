"""`python -m server` is the command `tokenyard`."""

import sys

from server.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())

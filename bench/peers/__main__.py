"""`python -m bench.peers`."""

import sys

from bench.peers.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`python -m bench.api_throughput`."""

import sys

from bench.api_throughput.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`python -m campaigns.api_throughput`."""

import sys

from campaigns.api_throughput.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

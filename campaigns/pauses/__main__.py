"""`python -m campaigns.pauses`."""

import sys

from campaigns.pauses.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

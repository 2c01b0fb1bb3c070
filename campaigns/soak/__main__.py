"""`python -m campaigns.soak`."""

import sys

from campaigns.soak.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

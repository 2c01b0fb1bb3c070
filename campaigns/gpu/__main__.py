"""`python -m campaigns.gpu`."""

import sys

from campaigns.gpu.cli import main

sys.exit(main(sys.argv[1:]))

"""`python -m bench.gpu`."""

import sys

from bench.gpu.cli import main

sys.exit(main(sys.argv[1:]))

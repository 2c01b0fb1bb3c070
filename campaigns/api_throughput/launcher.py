"""`tokenyard serve`, with another program in place of the engine process.

    python launcher.py INTERPRETER serve --port 8000 …

The server starts its engine process with the interpreter that it runs under itself; it is told that this is
INTERPRETER, a script that starts the stand-in. Nothing else differs from the command.

Owns: this one substitution.
Never: what the script runs (cli.py writes it).
"""

import runpy
import sys

if __name__ == "__main__":
    sys.executable = sys.argv.pop(1)
    # By path: a tree of sources that is older than this program can be measured with it.
    runpy.run_module("server", run_name="__main__", alter_sys=True)

"""The one installed name: the command, and in the folder `inside` the packages of the server (commands).

Never: is a Python interface to the server. That is HTTP: docs/api.md.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("tokenyard")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "(not installed)"

"""The installed version of this server.

Never: fails in a checkout that was not installed.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("tokenyard")
except PackageNotFoundError:
    VERSION = "(not installed)"

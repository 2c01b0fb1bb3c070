"""The installed version of this server.

Never: fails in a checkout that was not installed. The same stands in tokenyard/__init__.py, which is there
before these packages are.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("tokenyard")
except PackageNotFoundError:
    VERSION = "(not installed)"

"""The key that a request was sent with, as the request's scope holds it."""

from starlette.types import Scope

from engine.options.api_keys import ApiKey

KEY_NAME = "tokenyard.key"
"""The scope's entry with the name of the key that was sent."""
OWNER_NAME = "tokenyard.owner"
"""The scope's entry with the name of the key for which this process itself calls; no socket can set it."""
_KEY = "tokenyard.api_key"


def keep_key(scope: Scope, key: ApiKey) -> None:
    scope[KEY_NAME] = key.name
    scope[_KEY] = key


def key_of(scope: Scope) -> ApiKey | None:
    """The key that was sent; None where none is needed."""
    key: ApiKey | None = scope.get(_KEY)
    return key

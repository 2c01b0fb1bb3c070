"""Names of routes, under which paths are counted and logged.

Owns: the names of routes, a fixed set: no client can make a new one, or have its own text repeated.
Never: routing; the router is not called, so that a request refused before it has a name as well.
"""

from collections.abc import Iterable

UNMATCHED = "unmatched"


class RouteNames:
    """Lookup of a path's name among the declared routes: `/v1/models/{model}`."""

    def __init__(self, routes: Iterable[str]) -> None:
        routes = tuple(routes)
        self._exact = frozenset(route for route in routes if "{" not in route)
        self._patterns = {_ends(route): route for route in routes if "{" in route}

    def of(self, path: str) -> str:
        """The route that serves a path."""
        if path in self._exact:
            return path
        fitting = [
            (len(suffix), route)
            for (prefix, suffix), route in self._patterns.items()
            if path.startswith(prefix) and path.endswith(suffix)
        ]
        return max(fitting, default=(0, UNMATCHED))[1]


def _ends(route: str) -> tuple[str, str]:
    """The text before the one parameter of a path, and the text after it."""
    prefix, _, rest = route.partition("{")
    return prefix, rest.partition("}")[2]

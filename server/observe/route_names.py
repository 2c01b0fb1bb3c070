"""What a path is called where paths are counted and written down.

Owns: the names of routes, a fixed set: no client can make a new one, or have its own words repeated.
Never: routing; the router is not asked, so that what is refused before it has a name as well.
"""

from collections.abc import Iterable

UNMATCHED = "unmatched"


class RouteNames:
    """From the routes of the application, as they are declared: `/v1/models/{model}`."""

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
    """What stands before the one parameter in a path, and what behind it."""
    prefix, _, rest = route.partition("{")
    return prefix, rest.partition("}")[2]

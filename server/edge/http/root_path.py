"""A prefix that a proxy puts before every path.

Owns: taking the prefix off, for proxies that leave it there.
Never: a prefix that the operator did not name: any other path is served as it came.
"""

from starlette.types import ASGIApp, Receive, Scope, Send

_TO_THE_PAGE = b"/"


class RootPath:
    """ASGI middleware, outside of all layers: they see the paths of this server."""

    def __init__(self, app: ASGIApp, *, prefix: str) -> None:
        """`prefix` begins with a slash and ends without one."""
        self._app = app
        self._prefix = prefix
        self._raw_prefix = prefix.encode("ascii")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == self._prefix:
            # Without the slash a browser would look for the page's files beside the prefix, not below it.
            location = (b"location", self._raw_prefix + _TO_THE_PAGE)
            await send(
                {
                    "type": "http.response.start",
                    "status": 308,
                    "headers": [location, (b"content-length", b"0")],
                }
            )
            await send({"type": "http.response.body", "body": b""})
            return
        if scope["type"] == "http" and scope["path"].startswith(f"{self._prefix}/"):
            raw = scope.get("raw_path") or scope["path"].encode()
            scope = {
                **scope,
                "path": scope["path"].removeprefix(self._prefix),
                "raw_path": raw.removeprefix(self._raw_prefix),
            }
        await self._app(scope, receive, send)

"""Origins of web pages that may use a server without keys, which any client on this machine may use.

Owns: the checks of the headers `origin` and `host`, and that cookies are not read.
Never: the replies that pages of other origins may read: the browser decides that, by CORS (app.py).

A page can make a browser send requests to this machine without asking first (a body without a type), and a
name that its author lets point to 127.0.0.1, or into your network, makes this server a part of the page's own
origin. Programs send no `Origin`; browsers do, except with a GET of what they take for the page's own server:
there the name in `Host` tells such a page from ours.
Source: RFC 6454; CVE-2024-28224, the same in another server.
"""

import re
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.options.edge_config import HostRule, OtherHosts
from server.edge.access.key_ring import KeyRing
from server.edge.error_replies import ForeignHost, ForeignPage

_ANY = "*"
_PRIVATE_TOPS = frozenset(
    {
        *("localhost", "test"),  # reserved: RFC 6761
        "local",  # reserved: RFC 6762, answered by machines of the same link; and Kubernetes' cluster.local
        "internal",  # kept for private use by ICANN's board, 2024
        *("home", "corp"),  # not delegated until further notice by ICANN's board, 2018
        "lan",  # neither reserved nor delegated; RFC 6762, appendix G, lists it with the two above
        "svc",  # neither reserved nor delegated; Kubernetes' names of services, cut short
    }
)
"""Last labels under which no name can be registered."""
_PRIVATE_HOME = ".home.arpa"  # reserved: RFC 8375
_SHOWN_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
"""Names that --allowed-host takes."""


class PageOrigins:
    """ASGI middleware. With keys it does nothing: no page has one that it was not given."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: KeyRing,
        origins: tuple[str, ...],
        hosts: HostRule,
        open_paths: frozenset[str],
    ) -> None:
        """`origins` come from --cors-origin.

        `open_paths` say nothing about requests, and probes ask them by names of their own.
        """
        self._app = app
        self._keys = keys
        self._origins = frozenset(origins)
        self._names_of_origins = frozenset(_name_in(origin.partition("://")[2]) for origin in origins)
        self._names = hosts.names
        self._others = hosts.others
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Each route would have them parsed, in quadratic time, and none uses them.
        scope["headers"] = [each for each in scope["headers"] if each[0] != b"cookie"]
        if not self._keys.is_locked:
            host = Headers(scope=scope).get("host", "")
            name = _name_in(host)
            if scope["path"] not in self._open_paths and not self._is_answered(name):
                raise ForeignHost(name if _SHOWN_NAME.fullmatch(name) else "NAME")
            for key, value in scope["headers"]:
                if key == b"origin" and not self._may_ask(value.decode("latin-1"), host):
                    raise ForeignPage
        await self._app(scope, receive, send)

    def _may_ask(self, origin: str, host: str) -> bool:
        if _ANY in self._origins or origin in self._origins or _is_ours(origin, host):
            return True
        name = _name_in(host)
        return bool(name) and origin.partition("://")[2] == host and self._is_own(name)

    def _is_answered(self, name: str) -> bool:
        if self._others is OtherHosts.ALL or not name:  # no browser leaves the header out
            return True
        is_trusted = name in self._names_of_origins  # the pages there may ask anyway
        return is_trusted or _is_local(name) or _address(name) is not None or self._is_own(name)

    def _is_own(self, name: str) -> bool:
        """True if no page but ours can be at this name."""
        is_private = self._others is not OtherHosts.LOCAL and _is_private(name)
        return is_private or name in self._names


def _name_in(host: str) -> str:
    """The name or address in `host`, without its port, in lower case; the whole text if there is none."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return host


def _is_local(name: str) -> bool:
    return name == "localhost" or name.endswith(".localhost")


def _is_private(name: str) -> bool:
    """True if no stranger can let the name point here: it has one label, or a private last one.

    The owner of a name of one label owns a top-level domain. These have no underscore, which the networks of
    Docker Compose have: service.project_default.
    """
    top = name.rpartition(".")[2]
    return "." not in name or top in _PRIVATE_TOPS or "_" in top or name.endswith(_PRIVATE_HOME)


def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None


def _is_ours(origin: str, host: str) -> bool:
    """True if the page came from this machine, or from the address that its request was sent to.

    A plain name as that address proves nothing: its owner may let it point to this machine. An address cannot
    be lent, nor a name that a certificate stands for.
    """
    try:
        url = urlsplit(origin)
        name = url.hostname or ""
    except ValueError:
        return False
    address = _address(name)
    if _is_local(name) or (address is not None and address.is_loopback):
        return True
    return url.netloc == host and (address is not None or url.scheme == "https")

"""The bytes of a picture, from a data URL or from a host that the operator has named.

Owns: the one reading of an address for check and fetch, which addresses of the network are asked, and the
limits on a fetch.
Never: follows a redirect, reads a file, or decodes a picture.
"""

import asyncio
import base64
import binascii
import ipaddress
import re
import socket
import ssl
from functools import cache
from typing import Final, NamedTuple

from engine.errors import RequestRejected
from engine.options.media_options import MediaConfig
from server.edge.http.reply_parser import ExchangeFailed, ReplyParser

MAX_FETCHED_BYTES: Final = 20 * 2**20
_TIMEOUT_S = 10.0
_READ_BYTES = 2**16
_DATA = re.compile(r"data:[^,;]{0,127}(?:;[^,;]{0,127})*;base64,", re.IGNORECASE)
_BREAKS = str.maketrans("", "", " \t\r\n")
"""Left out of base64: programs break its lines after 64 or 76 characters."""
_ADDRESS = re.compile(r"(https?)://([A-Za-z0-9.-]{1,253})(?::([0-9]{1,5}))?(/[!$-;=?-Z_a-z~]*)?", re.ASCII)
"""A host by name, a port, a path with a query: nothing that two readers could read differently."""
_MAX_ADDRESS_CHARS = 2048
_WORLD: Final = ipaddress.ip_network("2000::/3")
"""Addresses of IPv6 that are given out; many others stand for one of IPv4, or for one of a site."""
_RELAYS: Final = ipaddress.ip_network("192.88.99.0/24")
"""Addresses of IPv4 at which relays to IPv6 were."""
_KINDS: Final = ("image/png", "image/jpeg", "image/webp", "image/gif")


class _Address(NamedTuple):
    scheme: str
    host: str
    port: int
    path: str


def is_fetched(url: str) -> bool:
    """Tell whether a picture comes from a host, and not with its request."""
    return _DATA.match(url) is None


async def picture_bytes(url: str, config: MediaConfig, *, where: str) -> bytes:
    """Return the bytes of a picture. Raises RequestRejected, which names the field `where`."""
    head = _DATA.match(url)
    if head is not None:
        return await asyncio.to_thread(_decoded, url, head.end(), where)
    address = checked_address(url, config, where=where)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return await _fetched(address, where)
    except (OSError, ssl.SSLError, ExchangeFailed, TimeoutError):
        # The kind of failure would show which ports of which machines answer.
        raise _refused(where, f"it could not be fetched from {address.host}") from None


def checked_address(url: str, config: MediaConfig, *, where: str) -> _Address:
    """Read an address of a host that the operator has named. Raises RequestRejected."""
    found = _ADDRESS.fullmatch(url) if len(url) <= _MAX_ADDRESS_CHARS else None
    if found is None:
        raise _refused(where, "send it as a data URL in base64, or as https://host/path")
    scheme, host, path = found[1], found[2].lower(), found[4] or "/"
    port = int(found[3] or (443 if scheme == "https" else 80))
    if host not in config.domains or not 0 < port < 2**16:
        raise _refused(
            where, "this server fetches from no such host (--allowed-media-domains); send a data URL"
        )
    if scheme == "http" and host not in config.plain_domains:
        raise _refused(where, "this host is asked by https only")
    return _Address(scheme, host, port, path)


def is_public(address: str) -> bool:
    """Tell whether an address of the network may be asked: a global one, not one that stands for another."""
    found = ipaddress.ip_address(address)
    if isinstance(found, ipaddress.IPv6Address):
        if found not in _WORLD or (found.sixtofour or found.teredo) is not None:
            return False
    elif found in _RELAYS:
        return False
    return found.is_global and not found.is_multicast


async def _fetched(address: _Address, where: str) -> bytes:
    """Ask an address that was resolved once. Raises RequestRejected, OSError, ExchangeFailed."""
    infos = await asyncio.get_running_loop().getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    resolved = [str(info[4][0]) for info in infos]
    if not resolved or not all(map(is_public, resolved)):
        raise _refused(where, f"{address.host} is at an address that is not public")
    tls = _tls() if address.scheme == "https" else None
    reader, writer = await asyncio.open_connection(
        resolved[0], address.port, ssl=tls, server_hostname=address.host if tls else None
    )
    try:
        head = [
            f"GET {address.path} HTTP/1.1",
            f"Host: {address.host}" + ("" if address.port in (80, 443) else f":{address.port}"),
            *("User-Agent: tokenyard", f"Accept: {', '.join(_KINDS)}", "Connection: close"),
        ]
        writer.write("\r\n".join([*head, "\r\n"]).encode("ascii"))
        return await _body(reader, where)
    finally:
        writer.transport.abort()


async def _body(reader: asyncio.StreamReader, where: str) -> bytes:
    parser, body, num_received = ReplyParser(), bytearray(), 0
    while not parser.is_complete:
        received = await reader.read(_READ_BYTES)
        if not received:
            parser.end()
            break
        num_received += len(received)
        body += parser.feed(received)
        if parser.status and parser.status != 200:
            raise _refused(where, f"its host answers {parser.status}; redirects are not followed")
        kind = parser.headers.get("content-type", "").partition(";")[0].strip().lower()
        if parser.status and kind not in _KINDS:
            raise _refused(where, f"its host sends {kind[:64]!r}, which is no picture that is taken")
        if num_received > MAX_FETCHED_BYTES:
            raise _refused(where, f"it has more than {MAX_FETCHED_BYTES >> 20} MiB")
    return bytes(body)


def _decoded(url: str, start: int, where: str) -> bytes:
    try:
        return base64.b64decode(url[start:].translate(_BREAKS), validate=True)
    except (binascii.Error, ValueError):
        raise _refused(where, "its bytes are not in base64") from None


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _refused(where: str, reason: str) -> RequestRejected:
    return RequestRejected(f"{where}: the picture is not taken: {reason}", param=where)

"""GET /, /docs and /page/...: the files of the web page, and of the page about the API.

Owns: which files there are, and the headers that keep the page to itself.
Never: data: the page asks for it like any client, with the key that was typed into it.

The files are public: they hold nothing of this server. The policy allows scripts, styles and connections of
the page's own origin alone, none inline, and no frame around it.
"""

import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.edge.error_replies import RouteNotFound
from server.edge.http.endpoint import Endpoint

_FOLDER = Path(__file__).parent / "web"
_PAGES = {"/": "index.html", "/docs": "docs.html"}
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-cache",  # asked again each time, and answered by the tag
    "vary": "accept-encoding",
}


@dataclass(frozen=True, slots=True)
class _File:
    plain: bytes
    zipped: bytes
    tag: str
    media_type: str


def _read(path: Path) -> _File:
    plain = path.read_bytes()
    tag = f'"{hashlib.sha256(plain).hexdigest()[:20]}"'
    return _File(plain, gzip.compress(plain, mtime=0), tag, _TYPES[path.suffix])


FILES = {path.name: _read(path) for path in sorted(_FOLDER.rglob("*")) if path.suffix in _TYPES}

router = APIRouter()
ENDPOINT = Endpoint(
    router=router,
    keyless_paths=frozenset(_PAGES) | {f"/page/{name}" for name in FILES.keys() - _PAGES.values()},
)


@router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
@router.api_route("/docs", methods=["GET", "HEAD"], include_in_schema=False)
async def show_page(request: Request) -> Response:
    """Show the page with chat and yard, or the page that describes the API."""
    return _answer(request, _PAGES[request.scope["route"].path])


@router.api_route("/page/{name}", methods=["GET", "HEAD"], include_in_schema=False)
async def show_file(request: Request) -> Response:
    """Return a script, a style or a picture of the page."""
    name = request.path_params["name"]
    if name not in FILES or name in _PAGES.values():
        raise RouteNotFound(f"the page has no file {name[:64]!r}")
    return _answer(request, name)


def _answer(request: Request, name: str) -> Response:
    file = FILES[name]
    headers = {**_HEADERS, "etag": file.tag}
    if file.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    is_zipped = "gzip" in request.headers.get("accept-encoding", "")
    if is_zipped:
        headers["content-encoding"] = "gzip"
    return Response(file.zipped if is_zipped else file.plain, headers=headers, media_type=file.media_type)

"""The form of an upload: multipart/form-data, whole in memory.

Owns: the parts, their names and file names, and the faults of a form.
Source: RFC 7578; RFC 2046, section 5.1; RFC 9110, section 5.6.6, for parameters; RFC 8187 for encoded ones.
"""

import re
from dataclasses import dataclass
from urllib.parse import unquote

from engine.errors import RequestRejected
from server.edge.error_replies import UnsupportedMediaType

_MAX_PARTS = 16
_MAX_HEAD_BYTES = 4096
_MAX_BOUNDARY_CHARS = 70
_PARAMETER = re.compile(
    r"[ \t]*;[ \t]*(?P<name>[!#$%&'*+.^_`|~0-9A-Za-z-]+)[ \t]*=[ \t]*"
    r'(?:"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<plain>[^";\s]+))',
    re.DOTALL,
)
_ESCAPED = re.compile(r'\\(["\\])')


@dataclass(frozen=True, slots=True, kw_only=True)
class FormPart:
    filename: str | None
    content: bytes


def read_form(content_type: str, body: bytes) -> dict[str, FormPart]:
    """Return the fields by name. Raises RequestRejected, UnsupportedMediaType."""
    media_type, parameters = _parameters(content_type)
    boundary = parameters.get("boundary", "")
    if media_type != "multipart/form-data" or not 0 < len(boundary) <= _MAX_BOUNDARY_CHARS:
        raise UnsupportedMediaType("an upload must be multipart/form-data with a boundary")
    mark = b"\r\n--" + boundary.encode("latin-1", "replace")
    pieces = (b"\r\n" + body).split(mark, _MAX_PARTS + 2)
    if len(pieces) < 3 or len(pieces) > _MAX_PARTS + 2 or not pieces[-1].startswith(b"--"):
        raise _broken(f"it must have 1 to {_MAX_PARTS} parts and end with its boundary")
    fields: dict[str, FormPart] = {}
    for piece in pieces[1:-1]:
        name, part = _part(piece)
        if name in fields:
            raise _broken(f"the field {name[:64]!r} is there twice")
        fields[name] = part
    return fields


def _part(piece: bytes) -> tuple[str, FormPart]:
    head, blank_line, content = piece.removeprefix(b"\r\n").partition(b"\r\n\r\n")
    if not blank_line or len(head) > _MAX_HEAD_BYTES:
        raise _broken("a part has no head, or one that is too long")
    for line in head.decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            _, found = _parameters(value)
            if "name" in found:
                return found["name"], FormPart(filename=found.get("filename"), content=content)
    raise _broken("a part has no name")


def _parameters(header: str) -> tuple[str, dict[str, str]]:
    """Return what a header begins with, in lower case, and its parameters by name; none of a broken header.

    Linear time: each character is read a few times at most.
    """
    start, found = header.partition(";")[0], {}
    place = len(start)
    while parameter := _PARAMETER.match(header, place):
        name, quoted, plain = parameter.group("name", "quoted", "plain")
        found[name.lower()] = plain if quoted is None else _ESCAPED.sub(r"\1", quoted)
        place = parameter.end()
    if header[place:].strip("; \t"):
        found = {}
    for name in [each for each in found if each.endswith("*")]:
        charset, _, text = found.pop(name).partition("'")
        if charset.lower() == "utf-8":
            found[name[:-1]] = unquote(text.partition("'")[2])
    return start.strip().lower(), found


def _broken(reason: str) -> RequestRejected:
    return RequestRejected(f"the form cannot be read: {reason}", code="invalid_request")

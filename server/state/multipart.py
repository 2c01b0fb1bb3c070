"""The form of an upload: multipart/form-data, whole in memory.

Owns: the parts, their names and file names, and the faults of a form.
Never: the number of bytes (body_limit.py), or what a file means (file_routes.py).
Source: RFC 7578; RFC 2046, section 5.1.
"""

from dataclasses import dataclass
from email.message import Message

from engine.errors import RequestRejected
from server.error_replies import UnsupportedMediaType

_MAX_PARTS = 16
_MAX_HEAD_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class FormPart:
    """One field of a form."""

    filename: str | None
    content: bytes


def read_form(content_type: str, body: bytes) -> dict[str, FormPart]:
    """Return the fields by name. Raises RequestRejected, UnsupportedMediaType."""
    boundary = _parameters(content_type).get_param("boundary")
    if not content_type.lower().startswith("multipart/form-data") or not isinstance(boundary, str):
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
            found = _parameters(value.strip())
            field = found.get_param("name")
            if isinstance(field, str):
                return field, FormPart(filename=found.get_filename(), content=content)
    raise _broken("a part has no name")


def _parameters(value: str) -> Message:
    """Let the library read the parameters of a header, quoted or encoded."""
    message = Message()
    message["content-type"] = value
    message["content-disposition"] = value
    return message


def _broken(reason: str) -> RequestRejected:
    return RequestRejected(f"the form cannot be read: {reason}", code="invalid_request")

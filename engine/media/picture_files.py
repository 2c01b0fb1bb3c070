"""Kinds of picture files that are taken, by their first bytes.

Never: reads further: that is for the process that may be ended.
"""

_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8\xff"
_GIFS = (b"GIF87a", b"GIF89a")


def kind_of(content: bytes) -> str | None:
    """Return the kind by its usual name; None for any other file."""
    if content.startswith(_PNG):
        return "PNG"
    if content.startswith(_JPEG):
        return "JPEG"
    if content.startswith(_GIFS):
        return "GIF"
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "WEBP"
    return None

"""Pictures among the content parts of messages, and the texts that are refused with them.

Owns: the one reading of such parts. Other protocols make chat's parts of theirs.
Never: fetches or decodes a picture.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import BeforeValidator, Field, StringConstraints

from engine.errors import RequestRejected
from engine.media.messages import Detail
from engine.types import ModelInfo, ServedAdapter
from server.edge.refusals import required, unsupported
from server.edge.wire_model import WireModel
from server.reply.generate.protocol import Text

PICTURE: Final = "image_url"
_NOT_SERVED: Final = {
    **dict.fromkeys(("input_audio", "audio", "audio_url"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
    **dict.fromkeys(("file", "input_file"), "a file"),
}
_ROLES: Final = ("user", "tool")
"""Roles whose messages may have pictures."""


class ImageUrl(WireModel):
    """A picture: a data URL, or an address on one of the hosts that the server fetches from."""

    url: Text
    detail: Literal["auto", "low", "high", "original"] | None = None
    """`low` reads it with few tokens; the others as the checkpoint says."""


def _as_image_url(value: Any) -> Any:
    return {"url": value} if isinstance(value, str) else value


_Type = Annotated[str, StringConstraints(max_length=64)]


def _as_text_type(value: Any) -> Any:
    """The types of the Responses API, which some clients leave in a chat."""
    return "text" if value in ("input_text", "output_text") else value


class ContentPart(WireModel):
    type: Annotated[_Type, BeforeValidator(_as_text_type, json_schema_input_type=_Type)]
    """`text` or `image_url`; in assistant messages `refusal` and `thinking` as well."""
    text: Text | None = None
    thinking: Text | None = None
    refusal: Text | None = None
    image_url: (
        Annotated[ImageUrl, BeforeValidator(_as_image_url, json_schema_input_type=Text | ImageUrl)] | None
    ) = None
    cache_control: Annotated[dict[str, Any], Field(max_length=16)] | None = None
    """Later prompts go on behind this part, where a model cannot go on anywhere. Its keys have no effect."""


class PictureSource(NamedTuple):
    """A picture of a request."""

    where: str
    """The field that has it."""
    url: str
    detail: Detail


def picture_part(url: str, detail: str | None = None) -> dict[str, Any]:
    """Make chat's content part of a picture."""
    return {"type": PICTURE, PICTURE: {"url": url, "detail": detail}}


def data_url(media_type: str, base64: str) -> str:
    return f"data:{media_type};base64,{base64}"


def refuse_part(part: ContentPart, where: str) -> RequestRejected:
    """Return the refusal of a part that is neither text nor a picture."""
    noun = _NOT_SERVED.get(part.type)
    if noun is not None:
        return unsupported(
            f"{where}.type",
            f"{where}: {noun} is not served here; send text, or pictures to a model that takes them",
        )
    return unsupported(
        f"{where}.type", f"content parts of type {part.type!r} are not supported; use text or {PICTURE}"
    )


def pictures_of(
    messages: Iterable[tuple[str, Sequence[ContentPart]]], info: ModelInfo, adapter: ServedAdapter | None
) -> list[PictureSource]:
    """List the pictures of a conversation, role and parts of each message, in their order.

    Raises RequestRejected.
    """
    found: list[PictureSource] = []
    for index, (role, parts) in enumerate(messages):
        for place, part in enumerate(parts):
            if part.type == PICTURE:
                found.append(_source(part, role, f"messages[{index}].content[{place}]", info))
    if found and adapter is not None and adapter.is_of_tower:
        # Its base reads them, and the adapter has learned with another tower.
        message = f"the adapter {adapter.name!r} updates the part that reads pictures, which is not computed"
        raise unsupported(found[0].where, f"{found[0].where}: {message}; ask without pictures")
    return found


def _source(part: ContentPart, role: str, where: str, info: ModelInfo) -> PictureSource:
    if info.vision is None:
        raise unsupported(f"{where}.type", f"{where}: the model {info.served_names[0]!r} reads no pictures")
    if role not in _ROLES:
        raise unsupported(f"{where}.type", f"{where}: messages with the role {role} have no pictures")
    picture = required(part.image_url, f"{where}.{PICTURE}")
    detail = Detail.LOW if picture.detail == "low" else Detail.AUTO
    return PictureSource(f"{where}.{PICTURE}", picture.url, detail)

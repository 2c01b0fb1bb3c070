"""The prompt of a conversation with pictures: tokens, and the places of the pictures among them.

Owns: the order of the work: places are counted before any picture is decoded. No cut goes through a picture.
Never: how a family writes a picture (engine/media).
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from engine.errors import RequestRejected, TooManyPictures
from engine.media.messages import Detail
from engine.media.pictures import TokenIds, place, refuse_marks, refused_places
from engine.media.segments import PictureLease, StoredPicture
from engine.options.media_options import MediaConfig
from engine.text.template_messages import Chat
from engine.types import EncoderInput, Payload, VisionFacts
from server.edge.http.edge import Engine
from server.reply.pictures.fetching import is_fetched, picture_bytes
from server.reply.pictures.media_parts import PictureSource


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureHold:
    """The way in which the pictures of a call are held."""

    salt: str = ""
    """Pictures are shared with requests of the same salt only, as prefixes are."""
    tenant: str = ""
    keeper: PictureLease | None = None
    """A lease beyond that of one prompt: prompts of several lengths are tried."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt as tokens, and its pictures, which `lease` holds."""

    token_ids: TokenIds
    pictures: tuple[EncoderInput, ...] = ()
    stored: tuple[StoredPicture, ...] = ()
    lease: PictureLease | None = None

    @property
    def payloads(self) -> tuple[Payload, ...]:
        """Prepared bytes of the pictures, each content once."""
        contents = {each.content for each in self.pictures}
        found = {each.payload.content: each.payload for each in self.stored}
        return tuple(payload for content, payload in found.items() if content in contents)

    def cut_to(self, num_tokens: int, *, keeps_end: bool) -> "ChatPrompt":
        """Keep the last tokens, or the first; a picture that a cut goes through is left out as a whole."""
        num_all = len(self.token_ids)
        if num_tokens >= num_all:
            return self
        start, stop = (num_all - num_tokens, num_all) if keeps_end else (0, num_tokens)
        for each in self.pictures:
            if each.offset < start < each.end:
                start = each.end
            if each.offset < stop < each.end:
                stop = each.offset
        kept = [each for each in self.pictures if each.offset >= start and each.end <= stop]
        moved = tuple(each._replace(offset=each.offset - start) for each in kept)
        return replace(self, token_ids=self.token_ids[start:stop], pictures=moved)

    def check_end(self) -> None:
        """Raise RequestRejected if nothing follows the last picture: an answer begins behind a token."""
        if self.pictures and self.pictures[-1].end >= len(self.token_ids):
            raise RequestRejected("the prompt ends with a picture; put text behind it", param="messages")

    def release(self) -> None:
        """Let the pictures go."""
        if self.lease is not None:
            self.lease.release()


def check_num_pictures(num: int, config: MediaConfig, *, param: str) -> None:
    """Raise TooManyPictures for more than the server takes in a request."""
    if num > config.max_pictures:
        raise TooManyPictures(
            f"{param}: {num} pictures; this server takes at most {config.max_pictures} in a request",
            param=param,
        )


async def encode_with_pictures(
    engine: Engine,
    chat: Chat,
    sources: Sequence[PictureSource],
    hold: PictureHold,
) -> ChatPrompt:
    """Render and encode a conversation, and prepare its pictures.

    Raises RequestRejected, Overloaded, EngineUnavailable.
    """
    vision = engine.info.vision
    assert vision is not None, "pictures_of refuses pictures of other models"
    marks = engine.pictures.marks(vision)
    if marks is None:
        raise RequestRejected(
            "pictures are not taken: the checkpoint's tokenizer does not name the tokens that are put around"
            " those of this family",
            param=sources[0].where,
            code="unsupported_parameter",
        )
    check_num_pictures(len(sources), engine.pictures.config, param="messages")
    refuse_marks(marks, chat.messages, "messages")
    refuse_marks(marks, chat.tools, "tools")
    refuse_marks(marks, [chat.kwargs, chat.hints], "chat_template_kwargs")
    rendered = await engine.encode_chat(chat, (marks.mark, marks.frame))
    num_places = rendered.count(vision.image_token_id)
    if num_places != len(sources):
        raise refused_places(num_places, len(sources))
    lease = engine.pictures.new_lease(hold.salt, hold.tenant)
    try:
        known: dict[tuple[str, Detail], StoredPicture] = {}
        for source in sources:
            asked = (source.url, source.detail)
            if asked not in known:
                known[asked] = await _prepared(engine, source, vision, lease)
                if hold.keeper is not None:
                    hold.keeper.take(known[asked].payload.content)
        stored = [known[source.url, source.detail] for source in sources]
        token_ids, pictures = await _placed(engine, rendered, vision, stored)
    except BaseException:
        lease.release()
        raise
    return ChatPrompt(token_ids, pictures, tuple(stored), lease)


async def encode_beginning(engine: Engine, chat: Chat, stored: Sequence[StoredPicture]) -> TokenIds:
    """Encode the first messages of a conversation again, whose pictures are prepared."""
    vision = engine.info.vision
    if not stored or vision is None or (marks := engine.pictures.marks(vision)) is None:
        return await engine.encode_chat(chat)
    rendered = await engine.encode_chat(chat, (marks.mark, marks.frame))
    num_places = rendered.count(vision.image_token_id)
    return (await _placed(engine, rendered, vision, stored[:num_places]))[0]


async def _placed(
    engine: Engine, rendered: TokenIds, vision: VisionFacts, stored: Sequence[StoredPicture]
) -> tuple[TokenIds, tuple[EncoderInput, ...]]:
    texts = {piece for each in stored for piece in each.pieces if isinstance(piece, str)}
    ids_of = {text: await engine.encode_plain(text) for text in texts}
    return place(rendered, vision.image_token_id, stored, ids_of.__getitem__)


async def _prepared(
    engine: Engine, source: PictureSource, vision: VisionFacts, lease: PictureLease
) -> StoredPicture:
    """Read a picture and have it prepared. Raises RequestRejected, Overloaded, EngineUnavailable."""
    pictures = engine.pictures
    async with pictures.room_for_file(lease.key) if is_fetched(source.url) else nullcontext():
        picture = await picture_bytes(source.url, pictures.config, where=source.where)
        return await pictures.prepare(picture, source.detail, vision, lease, param=source.where)

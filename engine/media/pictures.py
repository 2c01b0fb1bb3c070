"""Pictures of requests, prepared for the model's tower, and their places in a prompt.

Owns: the process that prepares them, its time limit and the line before it; names by content.
Never: decodes a picture in this process, or fetches one (server/reply/pictures).
"""

import asyncio
import hashlib
import importlib.util
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import orjson

from engine.errors import EngineUnavailable, Overloaded, OverloadReason, RequestRejected
from engine.media.families import FAMILIES
from engine.media.messages import Detail, PictureOrder, Preparation, PreparedPicture, most_seconds
from engine.media.picture_files import kind_of
from engine.media.segments import PictureLease, Segments, StoredPicture
from engine.options.media_options import MediaConfig
from engine.processes.framed_child import ChildEnded, FramedChild
from engine.processes.turns import TurnsByKey
from engine.types import EncoderInput, VisionFacts

_START_TIMEOUT_S = 60.0
_CLOCK = 3
"""Time by the clock for each second of the processor: the machine may be busy."""
_MAX_WAITING = 64
_MAX_FETCHED = 8
_SETTINGS = ("preprocessor_config.json", "processor_config.json")
_EXTRA = "Pillow is not installed here: install the extra `images`"

TokenIds = tuple[int, ...]


class PictureMarks(NamedTuple):
    """The texts by which a chat template's pictures become those of the model."""

    mark: str
    """Text that the template puts for a picture."""
    frame: str
    """Text that takes its place, with one image token."""
    image_token: str


class PicturePreparer:
    """Prepares one picture at a time. The process starts with the first one, and again after a failure."""

    def __init__(
        self,
        folder: str,
        config: MediaConfig,
        named_tokens: Mapping[str, str],
        token_string: Callable[[int], str],
    ) -> None:
        """Take the checkpoint's folder; `named_tokens` and `token_string` are its tokenizer's."""
        self.config = config
        self._named_tokens = named_tokens
        self._token_string = token_string
        self._folder = folder
        self._child = FramedChild("engine.media.process", OMP_NUM_THREADS="1", TRANSFORMERS_VERBOSITY="error")
        self._segments: Segments | None = None
        self._turns = TurnsByKey(1, _MAX_WAITING, OverloadReason.PICTURES)
        self._files = TurnsByKey(_MAX_FETCHED, _MAX_WAITING, OverloadReason.PICTURES)
        self.counting_refusals: Callable[[], AbstractContextManager[None]] = nullcontext
        """A context that counts an Overloaded which is raised inside."""
        self.count: Callable[..., None] = lambda *_, **__: None
        """See EngineMetrics."""
        self._refuses_all = ""
        self._way = b""
        """Everything but the picture on which its prepared bytes depend."""

    def marks(self, vision: VisionFacts) -> PictureMarks | None:
        """Return the marks of a family; None without a rule for it, or a token that the rule names."""
        rule = FAMILIES.get(vision.family)
        if rule is None:
            return None
        image_token = self._token_string(vision.image_token_id)
        names = {**self._named_tokens, "image": image_token}
        try:
            return PictureMarks(rule.mark.format(**names), rule.frame.format(**names), image_token)
        except KeyError:
            return None

    @property
    def takes_any(self) -> bool:
        return is_installed() and self.config.max_pictures > 0

    def new_lease(self, salt: str = "", key: str = "") -> PictureLease:
        """Make a lease without pictures. Raises EngineUnavailable without shared memory."""
        if self._segments is None:
            try:
                self._segments = Segments()
            except OSError:
                raise EngineUnavailable("this server has no shared memory for pictures") from None
        return PictureLease(self._segments, salt, key)

    @asynccontextmanager
    async def room_for_file(self, key: str) -> AsyncIterator[None]:
        """Hold room for a file that is fetched, until it is prepared: it may be large. Raises Overloaded."""
        with self.counting_refusals():
            await self._files.acquire(key)
        try:
            yield
        finally:
            self._files.release()

    async def prepare(
        self, picture: bytes, detail: Detail, vision: VisionFacts, lease: PictureLease, *, param: str
    ) -> StoredPicture:
        """Prepare a picture's file, or find it prepared for another request; `lease` holds it.

        `param` names the request field that has it. Raises RequestRejected, Overloaded, EngineUnavailable.
        """
        try:
            if kind_of(picture) is None:
                raise _refused(param, "it is no PNG, JPEG, WebP or GIF file")
            content = await asyncio.to_thread(self._name_of, picture, detail, vision, lease.salt)
            stored = lease.take(content)
            if stored is not None:
                self.count("pictures", "found")
                return stored
            with self.counting_refusals():
                return await self._prepare_anew(picture, detail, vision, lease, content, param)
        except RequestRejected:
            self.count("pictures", "refused")
            raise

    async def _prepare_anew(
        self,
        picture: bytes,
        detail: Detail,
        vision: VisionFacts,
        lease: PictureLease,
        content: str,
        param: str,
    ) -> StoredPicture:
        order = PictureOrder(content=picture, detail=detail, segment="", max_bytes=0)
        begun_s = time.monotonic()

        async def work() -> tuple[StoredPicture, PictureLease]:
            self.count("picture_seconds", "wait", num=time.monotonic() - begun_s)
            return await self._prepare_in_turn(content, order, vision, param, lease.num_bytes)

        prepared, keeper = await self._turns.run(lease.key, work)
        lease.take(content)
        keeper.release()
        return prepared

    async def close(self) -> None:
        """End the process, and remove all shared memory."""
        await self._child.kill()
        if self._segments is not None:
            self._segments.close()

    async def _prepare_in_turn(
        self, content: str, order: PictureOrder, vision: VisionFacts, param: str, num_held: int
    ) -> tuple[StoredPicture, PictureLease]:
        """Return the picture with a lease of its own, which ends by itself if no request waits any more.

        `num_held` are the bytes that its request has in shared memory.
        """
        keeper = self.new_lease()
        stored = keeper.take(content)  # the one prepared just before may have been the same
        if stored is None:
            await self._prepare(content, order, vision, param, num_held)
            stored = keeper.take(content)
            assert stored is not None
        return stored, keeper

    async def _prepare(
        self, content: str, order: PictureOrder, vision: VisionFacts, param: str, num_held: int
    ) -> None:
        """Have the process write the picture, and note it."""
        assert self._segments is not None
        segment = self._segments.new_name()
        timeout_s = _CLOCK * most_seconds(self.config.max_pixels)
        try:
            await self._start(vision, param)
            order = msgspec.structs.replace(order, segment=segment, max_bytes=self._segments.num_free_bytes)
            begun_s = time.monotonic()
            prepared = await self._child.ask(order, PreparedPicture, timeout_s)
            self.count("picture_seconds", "process", num=time.monotonic() - begun_s)
            if prepared.num_bytes > self._segments.num_bytes_at_most:
                raise _refused(param, "prepared, it is larger than the shared memory of this server")
            if prepared.num_bytes + num_held > self._segments.num_bytes_at_most:
                raise _refused(
                    param,
                    "with those before it, it is larger than the shared memory of this server",
                )
            if prepared.lacks_room:
                raise Overloaded(
                    "the pictures of other requests fill the shared memory; try again later",
                    retry_after_s=1.0,
                    reason=OverloadReason.PICTURES,
                )
            if prepared.refusal:
                raise _refused(param, prepared.refusal)
            self._segments.add(content, segment, prepared)
            self.count("pictures", "prepared")
        except BaseException as error:
            self._segments.forget(segment)
            if isinstance(error, TimeoutError):
                raise _refused(param, f"preparing it takes more than {timeout_s:g} s") from None
            if isinstance(error, ChildEnded):
                raise _refused(param, "decoding it takes too much time or memory, or fails") from None
            raise

    async def _start(self, vision: VisionFacts, param: str) -> None:
        """Start the process unless it runs. Raises RequestRejected, EngineUnavailable."""
        if self._child.pid is not None and not self._refuses_all:
            return
        if not self._refuses_all:
            self._refuses_all = await self._introduce(vision) if is_installed() else _EXTRA
        if self._refuses_all:
            raise RequestRejected(f"{param}: {self._refuses_all}", param=param, code="unsupported_parameter")

    async def _introduce(self, vision: VisionFacts) -> str:
        """Start the process; return why it can prepare no pictures of this model."""
        assert self._segments is not None
        preparation = Preparation(
            folder=self._folder,
            family=vision.family,
            processor_kwargs=dict(self.config.processor_kwargs),
            max_pixels=self.config.max_pixels,
            prefix=self._segments.prefix,
        )
        try:
            await self._child.start()
            return (await self._child.ask(preparation, PreparedPicture, _START_TIMEOUT_S)).refusal
        except (TimeoutError, OSError, ChildEnded):
            raise EngineUnavailable("the process that prepares pictures does not start") from None

    def _name_of(self, picture: bytes, detail: Detail, vision: VisionFacts, salt: str) -> str:
        """Return a digest of the file, of all that decides what is made of it, and of the salt."""
        if not self._way:
            files = [Path(self._folder, each) for each in _SETTINGS]
            texts = [each.read_bytes() if each.is_file() else b"" for each in files]
            options = [dict(self.config.processor_kwargs), vision.family]
            self._way = hashlib.sha256(b"\0".join([*texts, orjson.dumps(options)])).digest()
        salted = hashlib.sha256(salt.encode()).digest()
        return hashlib.sha256(self._way + salted + detail.encode() + b"\0" + picture).hexdigest()


def is_installed() -> bool:
    """Tell whether pictures can be decoded here, without loading what does."""
    return importlib.util.find_spec("PIL") is not None


def refuse_marks(marks: PictureMarks, texts: Any, where: str) -> None:
    """Raise RequestRejected for a text with a mark in it, however deep: it would be taken for a picture."""
    if isinstance(texts, str):
        found = next((each for each in (marks.mark, marks.image_token) if each in texts), None)
        if found is not None:
            raise RequestRejected(
                f"{where}: a text has {found!r}, which this model reads as a picture's place; leave it out"
                " where there are pictures",
                param=where,
            )
    elif isinstance(texts, Mapping):
        refuse_marks(marks, [*texts.keys(), *texts.values()], where)
    elif isinstance(texts, Sequence):
        for each in texts:
            refuse_marks(marks, each, where)


def place(
    prompt_ids: TokenIds,
    image_token_id: int,
    pictures: Sequence[StoredPicture],
    encode: Callable[[str], Sequence[int]],
) -> tuple[TokenIds, tuple[EncoderInput, ...]]:
    """Put the tokens of each picture in place of its image token.

    An input reaches from the first of a picture's image tokens to its last; the tokens of rows and tiles
    between them keep their own embeddings. Raises RequestRejected unless there are as many places.
    """
    places = [index for index, token_id in enumerate(prompt_ids) if token_id == image_token_id]
    if len(places) != len(pictures):
        raise refused_places(len(places), len(pictures))
    placed: list[int] = []
    inputs: list[EncoderInput] = []
    start = 0
    for index, picture in zip(places, pictures, strict=True):
        placed += prompt_ids[start:index]
        start = index + 1
        first = end = 0
        for piece in picture.pieces:
            if isinstance(piece, str):
                placed += encode(piece)
            else:
                first = first if end else len(placed)
                placed += [image_token_id] * piece
                end = len(placed)
        inputs.append(EncoderInput(first, end - first, picture.payload.content))
    return (*placed, *prompt_ids[start:]), tuple(inputs)


def refused_places(num_places: int, num_pictures: int) -> RequestRejected:
    return RequestRejected(
        f"the model's chat template has {num_places} places for {num_pictures} pictures: it takes none in"
        " some of these messages",
        param="messages",
    )


def _refused(param: str, reason: str) -> RequestRejected:
    return RequestRejected(f"{param}: the picture is not taken: {reason}", param=param)

"""A conversation made ready to be answered: the engine request, and how its reply is read.

Owns: the prompt, and the positions in it behind which later ones go on.
"""

from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from msgspec import structs
from starlette.requests import Request
from starlette.types import Receive

from engine.errors import ContextLengthExceeded, EngineUnavailable, Overloaded, RequestRejected
from engine.media.pictures import TokenIds
from engine.text.template_messages import FinalMessage
from engine.types import GenerationRequest
from server.api.chat.message_reader import Reading
from server.api.chat.plan import ReadingPlan, Turn, model_reading, plan_reading
from server.api.chat.protocol import ChatCompletionRequest
from server.api.chat.template_input import template_input
from server.edge.http.disconnect import while_connected
from server.edge.http.edge import Edge, Engine, edge_of
from server.edge.http.ignored import note_ignored
from server.reply.generate.calls import Note, Origin
from server.reply.generate.engine_requests import engine_requests, kept_prompt
from server.reply.pictures.media_parts import pictures_of
from server.reply.pictures.placing import ChatPrompt, PictureHold, encode_beginning, encode_with_pictures

if TYPE_CHECKING:  # the name alone
    from engine.media.segments import PictureLease

_MOST_MARKS = 4
"""Number of blocks with `cache_control`, as in Anthropic's API."""


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """Everything that is known before the first token."""

    prompt_ids: TokenIds
    request: GenerationRequest
    reading: Reading
    is_marked: bool
    """Whether the client marked where later prompts go on."""


async def prepare_turn(
    edge: Edge, body: ChatCompletionRequest, origin: Origin, keeper: "PictureLease | None" = None
) -> ChatTurn:
    """Render, tokenize, and build the engine request. Raises RequestRejected, Overloaded.

    `keeper` holds its pictures as well.
    """
    plan = plan_reading(body, model_reading(edge.parsers, edge.engine.info))
    hold = PictureHold(salt=origin.terms.cache_salt, tenant=origin.terms.tenant, keeper=keeper)
    is_marked = _check_marks(body)
    prompt, turn, num_suffix_tokens = await _prompt_and_turn(
        edge.engine, plan, hold, origin.receive, origin.note
    )
    try:
        prompt.check_end()
        prompts = {origin.reply_id: prompt.token_ids}
        (made,) = await engine_requests(edge.engine, body, prompts, turn.wanted, origin)
        points = await _restore_points(edge.engine, plan, prompt, num_suffix_tokens, origin.receive)
    except BaseException:
        prompt.release()
        raise
    request = replace(
        made,
        restore_at=points,
        encoder_inputs=prompt.pictures,
        payloads=prompt.payloads,
        at_end=prompt.release,
    )
    return ChatTurn(prompt.token_ids, request, turn.reading, is_marked)


async def prepare_fitting(edge: Edge, body: ChatCompletionRequest, origin: Origin) -> ChatTurn:
    """Prepare a turn whose limit of tokens says "at most", as Anthropic's and Ollama's clients mean it.

    Raises RequestRejected if there is no room at all, Overloaded.
    """
    try:
        return await prepare_turn(edge, body, origin)
    except ContextLengthExceeded as error:
        if error.param != "max_completion_tokens":
            raise
    return await prepare_turn(edge, body.model_copy(update={"max_completion_tokens": None}), origin)


async def prompt_of(request: Request, chat: ChatCompletionRequest) -> ChatPrompt:
    """Make the prompt that an answer would have, and nothing more. Raises RequestRejected, Overloaded."""
    edge = edge_of(request)
    plan = plan_reading(chat, model_reading(edge.parsers, edge.engine.info))
    _check_marks(chat)
    note = partial(note_ignored, request)
    prompt, _, _ = await _prompt_and_turn(edge.engine, plan, PictureHold(), request.receive, note)
    prompt.release()
    return prompt


async def _prompt_and_turn(
    engine: Engine, plan: ReadingPlan, hold: PictureHold, receive: Receive, note: Note
) -> tuple[ChatPrompt, Turn, int]:
    """Make the prompt, and count the tokens of the suffix that the reading puts behind it."""
    body, info = plan.body, engine.info
    note(plan.in_vain)
    limit = body.max_completion_tokens or body.max_tokens or 1
    num_behind = limit + len(await _suffix_ids(engine, plan.possible_suffix))
    parts = ((message.role, message.content or ()) for message in body.messages)
    if pictures := pictures_of(parts, info, info.adapter_named(body.model)):
        work = encode_with_pictures(engine, plan.chat, pictures, hold)
        rendered = await while_connected(receive, work)
    else:
        rendered = ChatPrompt(await engine.encode_chat(plan.chat))
    cut = kept_prompt(body, rendered.token_ids, info, max_tokens=num_behind)
    kept = rendered.cut_to(len(cut), keeps_end=body.truncation_side != "right")
    turn = plan.behind(lambda num: raw_text(engine, kept.token_ids[-num:]), len(kept.token_ids))
    if turn.ignores_budget:
        note([body.as_written("thinking_token_budget")])
    suffix_ids = await _suffix_ids(engine, turn.suffix)
    return replace(kept, token_ids=(*kept.token_ids, *suffix_ids)), turn, len(suffix_ids)


def _check_marks(body: ChatCompletionRequest) -> bool:
    """Tell whether any block is marked. Raises RequestRejected if too many are."""
    num_marks = len(_marked(body))
    if num_marks > _MOST_MARKS:
        raise RequestRejected(
            f"{num_marks} blocks have cache_control; at most {_MOST_MARKS} may", param="messages"
        )
    return num_marks > 0


async def _restore_points(
    engine: Engine, plan: ReadingPlan, prompt: ChatPrompt, num_suffix_tokens: int, receive: Receive
) -> tuple[int, ...]:
    """Tokens before the answer begins, and before the end of each marked block.

    Where marks alone are known, the end of the last block is found as theirs are. For several choices, also
    those before the token that each computes: the last of the prompt, whose suffix the template has not
    written. None where a model can go on anywhere.
    """
    if not engine.info.has_points:
        return ()
    found = set()
    num_tokens, blocks = len(prompt.token_ids), set(_marked(plan.body))
    last = (len(plan.body.messages) - 1, len(plan.body.messages[-1].content or ()) - 1)
    if num_answer_tokens := await _if_found(engine.num_answer_tokens(plan.chat)):
        found.add(max(num_tokens - num_suffix_tokens - num_answer_tokens, 0))
        blocks -= {last}
    elif blocks:
        blocks |= {last}
    if found and (plan.body.n or 1) > 1:
        found.add(num_tokens - 1)
    for index, place in blocks:
        end = _if_found(_end_of_block(engine, plan, prompt, index, place))
        found.add(await while_connected(receive, end))
    return tuple(sorted(found - {0}))


async def _if_found(counting: Coroutine[Any, Any, int]) -> int:
    """Count, or return 0: templates may refuse an end other than a user's message, and lines be full."""
    try:
        return await counting
    except (RequestRejected, Overloaded, EngineUnavailable):
        return 0


def _marked(body: ChatCompletionRequest) -> list[tuple[int, int]]:
    """Messages and their parts that are marked."""
    return [
        (index, place)
        for index, message in enumerate(body.messages)
        for place, part in enumerate(message.content or ())
        if part.cache_control is not None
    ]


async def _end_of_block(engine: Engine, plan: ReadingPlan, prompt: ChatPrompt, index: int, place: int) -> int:
    """Count the tokens that the prompt has in common with that of a conversation that ends here."""
    messages = plan.body.messages[: index + 1]
    messages[-1] = messages[-1].model_copy(update={"content": (messages[-1].content or [])[: place + 1]})
    body = plan.body.model_copy(update={"messages": messages})
    chat = template_input(body, plan.model.info, plan.tools)
    beginning = structs.replace(chat, final=FinalMessage.NOTHING)
    token_ids = await encode_beginning(engine, beginning, prompt.stored)
    pairs = zip(token_ids, prompt.token_ids, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


async def _suffix_ids(engine: Engine, text: str) -> TokenIds:
    """Tokens of marks behind the prompt."""
    known = engine.info.added_tokens.get(text)
    if known is not None:
        return (known,)
    return await engine.encode_plain(text) if text else ()


def raw_text(engine: Engine, token_ids: Sequence[int]) -> str:
    """The text of token ids, with all their marks."""
    return b"".join(engine.token_text(token_id).token_bytes for token_id in token_ids).decode(
        errors="replace"
    )

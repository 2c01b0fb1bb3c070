"""A conversation made ready to be answered: the engine request, and how its reply is read.

Owns: the prompt.
Never: the choices (plan.py), the shape of a reply (replies.py, responses/replies.py), or HTTP.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from starlette.types import Receive

from engine.errors import ContextLengthExceeded
from engine.media.pictures import TokenIds
from engine.media.segments import PictureLease
from engine.types import GenerationRequest
from server.api.chat.message_reader import Reading
from server.api.chat.plan import ReadingPlan, Turn, model_reading, plan_reading
from server.api.chat.protocol import ChatCompletionRequest
from server.api.chat.restore_points import check_marks, restore_points
from server.edge.http.disconnect import while_connected
from server.edge.http.edge import Edge, Engine
from server.reply.generate.calls import Origin
from server.reply.generate.engine_requests import engine_requests, kept_prompt
from server.reply.pictures.media_parts import pictures_of
from server.reply.pictures.placing import ChatPrompt, PictureHold, encode_with_pictures


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    """Everything that is known before the first token."""

    prompt_ids: TokenIds
    request: GenerationRequest
    reading: Reading
    ignores_budget: bool
    """Whether a budget of thoughts has no effect: there are none, or their end is of several tokens."""
    is_marked: bool
    """Whether the client marked where later prompts go on."""


async def prepare_turn(
    edge: Edge, body: ChatCompletionRequest, origin: Origin, keeper: PictureLease | None = None
) -> ChatTurn:
    """Render, tokenize, and build the engine request. Raises RequestRejected, Overloaded.

    `keeper` holds its pictures as well.
    """
    plan = plan_reading(body, model_reading(edge.parsers, edge.engine.info))
    hold = PictureHold(salt=origin.terms.cache_salt, tenant=origin.terms.tenant, keeper=keeper)
    is_marked = check_marks(body)
    prompt, turn, num_suffix_tokens = await _prompt_and_turn(edge.engine, plan, origin.receive, hold)
    try:
        prompt.check_end()
        prompts = {origin.reply_id: prompt.token_ids}
        (request,) = await engine_requests(edge.engine, body, prompts, turn.wanted, origin)
        points = await restore_points(edge.engine, plan, prompt.token_ids, num_suffix_tokens)
    except BaseException:
        prompt.release()
        raise
    request = replace(
        request,
        encoder_inputs=prompt.pictures,
        payloads=prompt.payloads,
        at_end=prompt.release,
        restore_at=points,
    )
    return ChatTurn(
        prompt_ids=prompt.token_ids,
        request=request,
        reading=turn.reading,
        ignores_budget=body.thinking_token_budget is not None
        and (turn.wanted.answer is None or not turn.wanted.answer.has_known_marks),
        is_marked=is_marked,
    )


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


async def prompt_of(edge: Edge, chat: ChatCompletionRequest, receive: Receive) -> ChatPrompt:
    """Make the prompt that an answer would have, and nothing more. Raises RequestRejected, Overloaded."""
    plan = plan_reading(chat, model_reading(edge.parsers, edge.engine.info))
    prompt, _, _ = await _prompt_and_turn(edge.engine, plan, receive, PictureHold())
    prompt.release()
    return prompt


async def _prompt_and_turn(
    engine: Engine, plan: ReadingPlan, receive: Receive, hold: PictureHold
) -> tuple[ChatPrompt, Turn, int]:
    """Make the prompt, and count the tokens of the suffix that the reading puts behind it."""
    body, info = plan.body, engine.info
    limit = body.max_completion_tokens or body.max_tokens or 1
    num_behind = limit + len(await _suffix_ids(engine, plan.possible_suffix))
    parts = ((message.role, message.content or ()) for message in body.messages)
    if pictures := pictures_of(parts, info):
        work = encode_with_pictures(engine, plan.messages, plan.options, pictures, hold)
        rendered = await while_connected(receive, work)
    else:
        rendered = ChatPrompt(await engine.encode_chat(plan.messages, plan.options))
    cut = kept_prompt(body, rendered.token_ids, info, max_tokens=num_behind)
    kept = rendered.cut_to(len(cut), keeps_end=body.truncation_side != "right")
    turn = plan.behind(lambda num: raw_text(engine, kept.token_ids[-num:]), len(kept.token_ids))
    suffix_ids = await _suffix_ids(engine, turn.suffix)
    return replace(kept, token_ids=(*kept.token_ids, *suffix_ids)), turn, len(suffix_ids)


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

"""A conversation, made ready to be answered: what the engine is to generate, and how the reply is read.

Owns: how tools, reasoning and grammars go together.
Never: the shape of a reply (chat_replies.py, responses_replies.py), or HTTP.

A grammar holds from the first token of the answer on. Where the model reasons first, it must not hold
before: so the block of reasoning is opened in the prompt, and the token that ends it begins the grammar.
"""

from dataclasses import dataclass, replace

from engine.errors import RequestRejected
from engine.types import ChatOptions, GenerationRequest, ModelInfo
from server.chat.message_reader import Reading, ShownReasoning
from server.chat.reasoning import BEGIN, END, ReasoningStart
from server.chat.tool_use import ToolUse, tool_use_of
from server.generate.prompts import encode_bad_words
from server.generate.protocol import ChatCompletionRequest
from server.generate.structured_output import WantedGrammar, check_can_end, wanted_grammar, with_grammar
from server.generate.translate import (
    Origin,
    chat_messages,
    chat_options,
    chat_request,
    kept_prompt,
    turns_reasoning_off,
)
from server.http.edge import Edge, Engine
from server.tool_calls.dialects import find_dialect

_NUM_TAIL_TOKENS = 12
"""Enough for a mark that is no single token, and the white space behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    """What is known before the first token."""

    prompt_ids: tuple[int, ...]
    request: GenerationRequest
    reading: Reading


async def prepare_turn(edge: Edge, body: ChatCompletionRequest, origin: Origin) -> ChatTurn:
    """Render, tokenize, and settle what the reply may be. Raises RequestRejected, Overloaded."""
    engine, info = edge.engine, edge.engine.info
    tool_use = tool_use_of(body, find_dialect(edge.parsers.tool_calls, info.chat_template))
    wanted = _wanted_grammar(body, tool_use)
    if wanted is not None:
        check_can_end(body, info, param=wanted.param)
    options = replace(chat_options(body), tools=tool_use.definitions)
    rendered = await engine.encode_chat(chat_messages(body, info), options)
    limit = body.max_completion_tokens or body.max_tokens or 1
    prompt_ids = kept_prompt(body, rendered, info, max_tokens=limit)
    start = _reasoning_start(edge, body, prompt_ids)
    end_id = info.added_tokens.get(END)
    if wanted is not None:
        prompt_ids, start = _before_grammar(options, info, prompt_ids, start)
    bad_words = await encode_bad_words(engine, body)
    request = chat_request(body, prompt_ids, info, origin, bad_words=bad_words)
    if wanted is not None:
        begins_after = end_id if start is ReasoningStart.OPEN else None
        grammar = replace(wanted.grammar, begins_after=begins_after)
        compiled = await engine.compile_grammar(grammar, param=wanted.param, num_choices=request.n)
        request = with_grammar(request, compiled)
    marks = (*tool_use.marks, *((BEGIN, END) if start is not ReasoningStart.NONE else ()))
    shown = frozenset(info.added_tokens[mark] for mark in marks if mark in info.added_tokens)
    return ChatTurn(
        prompt_ids=prompt_ids,
        request=replace(request, shown_special_ids=shown),
        reading=Reading(
            reasoning=start,
            shown_reasoning=ShownReasoning.COUNT if body.include_reasoning is False else ShownReasoning.ALL,
            reasoning_end_id=end_id,
            reports_reasoning=reasons(edge.parsers.reasoning, info),
            new_parser=tool_use.new_parser,
            max_calls=tool_use.max_calls,
            new_call_id=tool_use.new_call_id,
            finish_reason_of_calls=tool_use.finish_reason,
        ),
    )


def reasons(option: str, info: ModelInfo) -> bool:
    """What --reasoning-parser says, for this model: whether its reasoning is told apart."""
    if option == "auto":
        return END in info.chat_template or END in info.added_tokens
    return option == "think"


def _wanted_grammar(body: ChatCompletionRequest, tool_use: ToolUse) -> WantedGrammar | None:
    wanted = wanted_grammar(body)
    of_calls = tool_use.grammar
    if wanted is not None and tool_use.offered:
        raise RequestRejected(
            f"{wanted.param} and tools exclude each other: a reply that must match it cannot call tools;"
            " use tool_choice none",
            param=wanted.param,
        )
    return wanted if of_calls is None else WantedGrammar(grammar=of_calls, param="tools")


def _reasoning_start(edge: Edge, body: ChatCompletionRequest, prompt_ids: tuple[int, ...]) -> ReasoningStart:
    if not reasons(edge.parsers.reasoning, edge.engine.info):
        return ReasoningStart.NONE
    if body.continue_final_message:
        begun = _last_text(body)
        is_open = begun.rfind(BEGIN) > begun.rfind(END)
        return ReasoningStart.OPEN if is_open else ReasoningStart.NONE
    end = _text(edge.engine, prompt_ids[-_NUM_TAIL_TOKENS:]).rstrip()
    if end.endswith(BEGIN):
        return ReasoningStart.OPEN
    return ReasoningStart.NONE if end.endswith(END) else ReasoningStart.POSSIBLE


def _before_grammar(
    options: ChatOptions, info: ModelInfo, prompt_ids: tuple[int, ...], start: ReasoningStart
) -> tuple[tuple[int, ...], ReasoningStart]:
    """Settle whether the model reasons before its answer: a grammar cannot leave that open."""
    begin_id, end_id = info.added_tokens.get(BEGIN), info.added_tokens.get(END)
    if end_id is None:
        return prompt_ids, ReasoningStart.NONE
    is_off = turns_reasoning_off(options)
    if start is ReasoningStart.POSSIBLE and BEGIN in info.chat_template and begin_id and not is_off:
        return (*prompt_ids, begin_id), ReasoningStart.OPEN
    return prompt_ids, ReasoningStart.OPEN if start is ReasoningStart.OPEN else ReasoningStart.NONE


def _last_text(body: ChatCompletionRequest) -> str:
    return "".join(part.text or "" for part in body.messages[-1].content or ())


def _text(engine: Engine, token_ids: tuple[int, ...]) -> str:
    return b"".join(engine.token_text(token_id).token_bytes for token_id in token_ids).decode(
        errors="replace"
    )

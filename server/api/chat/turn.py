"""A conversation made ready to be answered: the engine request, and how its reply is read.

Owns: how tools, reasoning and grammars go together.
Never: the shape of a reply (replies.py, responses/replies.py), or HTTP.

A grammar holds from the first token of the answer on. Where the model reasons first, it must not hold
before: so the block of reasoning is opened in the prompt, and the token that ends it begins the grammar.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.errors import RequestRejected
from engine.types import ChatOptions, GenerationRequest, ModelInfo
from server.api.chat.message_reader import Reading, ShownReasoning, no_calls
from server.api.chat.protocol import ChatCompletionRequest
from server.api.chat.reasoning import ReasoningStart
from server.api.chat.reasoning_styles import THINK, ReasoningStyle, TemplateSplitter, find_style, style_of
from server.api.chat.template_input import template_input, turns_reasoning_off
from server.api.chat.tool_protocol import ToolChoiceObject
from server.api.chat.tool_use import ToolUse, tool_use_of
from server.edge.http.edge import Edge, Engine
from server.reply.generate.calls import Origin
from server.reply.generate.engine_requests import (
    FieldNames,
    TokenIds,
    Wanted,
    check_num_chars,
    check_num_prompt_logprobs,
    engine_requests,
    kept_prompt,
)
from server.reply.generate.structured_output import (
    WantedGrammar,
    answer_schema,
    check_can_end,
    wanted_grammar,
)
from server.reply.response_templates.searches import MAX_PROMPT_STEPS, SearchSteps
from server.reply.response_templates.template import ResponseTemplate, Role
from server.reply.response_templates.template_choice import find_template
from server.reply.response_templates.template_reader import TemplateReader
from server.reply.tool_calls.dialects import Dialect, find_dialect

_NUM_TAIL_TOKENS = 12
"""Enough for a mark that is no single token, and the white space behind it."""
_NUM_ANCHOR_TOKENS = (64, 512, 4096)
"""Tokens at the end of a prompt in which the anchor of a response template is looked for: more if need be."""
_NAMES = FieldNames("messages", "max_completion_tokens")
_OLDER_NAMES = FieldNames("messages", "max_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    """Everything that is known before the first token."""

    prompt_ids: TokenIds
    request: GenerationRequest
    reading: Reading


async def prepare_turn(edge: Edge, body: ChatCompletionRequest, origin: Origin) -> ChatTurn:
    """Render, tokenize, and build the engine request. Raises RequestRejected, Overloaded."""
    engine, info = edge.engine, edge.engine.info
    template = find_template(edge.parsers, info)
    tool_use = tool_use_of(body, _dialect(edge, body, template))
    grammar = _wanted_grammar(body, tool_use, info)
    messages, options = template_input(body, info, tool_use)
    rendered = await engine.encode_chat(messages, options)
    limit = body.max_completion_tokens or body.max_tokens or 1
    prompt_ids = kept_prompt(body, rendered, info, max_tokens=limit)
    if tool_use.offered:
        tool_use = tool_use.opened_by(raw_text(engine, prompt_ids[-_NUM_TAIL_TOKENS:]))
        grammar = _wanted_grammar(body, tool_use, info)
    style = _style(edge, template, grammar)
    start = _reasoning_start(edge.engine, style, body, prompt_ids)
    if grammar is not None and style is not None:
        added, start = await _before_grammar(edge.engine, style, options, start)
        # Where the prompt is cut to what fits, what is added has to fit too.
        prompt_ids = (*kept_prompt(body, rendered, info, max_tokens=limit + len(added)), *added)
        grammar = _after_reasoning(grammar, info, style, start)
    shown_ids = _shown_special_ids(tool_use, info, style if start is not ReasoningStart.NONE else None)
    reading = _reading(body, info, tool_use, style, start)
    if template is not None and grammar is None:
        shown_ids |= {token_id for token, token_id in info.added_tokens.items() if template.names(token)}
        reading = _by_template(reading, template, tool_use, _end_of_prompt(engine, prompt_ids, template))
    check_num_prompt_logprobs(body.prompt_logprobs, len(prompt_ids), param="prompt_logprobs")
    wanted = _wanted(body, grammar, shown_ids)
    (request,) = await engine_requests(engine, body, {origin.reply_id: prompt_ids}, wanted, origin)
    prediction = await _prediction(engine, body, max_tokens=request.params.max_tokens)
    return ChatTurn(
        prompt_ids=prompt_ids,
        request=replace(request, prediction=prediction) if prediction else request,
        reading=reading,
    )


def _reading(
    body: ChatCompletionRequest,
    info: ModelInfo,
    tool_use: ToolUse,
    style: ReasoningStyle | None,
    start: ReasoningStart,
) -> Reading:
    return Reading(
        reasoning=start,
        shown_reasoning=ShownReasoning.COUNT if body.include_reasoning is False else ShownReasoning.ALL,
        style=style or THINK,
        reasoning_end_id=None if style is None else info.added_tokens.get(style.end),
        reports_reasoning=style is not None,
        new_parser=tool_use.new_parser,
        max_calls=tool_use.max_calls,
        new_call_id=tool_use.new_call_id,
        finish_reason_of_calls=tool_use.finish_reason,
    )


def _style(
    edge: Edge, template: ResponseTemplate | None, grammar: WantedGrammar | None
) -> ReasoningStyle | None:
    """Marks of the reasoning. A grammar must know its end: the table has it where a template has none."""
    style = None if template is None else style_of(template)
    if style is None and (template is None or grammar is not None):
        return find_style(edge.parsers.reasoning, edge.engine.info)
    return style


def _by_template(
    reading: Reading, template: ResponseTemplate, tool_use: ToolUse, end_of_prompt: str
) -> Reading:
    """Read the reply by the checkpoint's template, which has begun to read in the prompt."""
    schemas = tool_use.schemas if tool_use.offered else None

    def new_splitter(_: ReasoningStart) -> TemplateSplitter:
        reader = TemplateReader(template, schemas)
        reader.begin_behind(end_of_prompt)
        return TemplateSplitter(reader)

    return replace(
        reading,
        reasoning=ReasoningStart.POSSIBLE,
        style=replace(reading.style, new_splitter=new_splitter),
        reports_reasoning=template.field_of(Role.REASONING) is not None,
        new_parser=no_calls if template.field_of(Role.CALLS) is not None else reading.new_parser,
    )


def _end_of_prompt(engine: Engine, prompt_ids: TokenIds, template: ResponseTemplate) -> str:
    """Text of the prompt behind the last anchor; empty if there is none near its end."""
    steps = SearchSteps(MAX_PROMPT_STEPS)
    for num_tokens in _NUM_ANCHOR_TOKENS:
        end = template.behind_anchor(raw_text(engine, prompt_ids[-num_tokens:]), steps)
        if end is not None:
            return end
    return ""


def _dialect(edge: Edge, body: ChatCompletionRequest, template: ResponseTemplate | None) -> Dialect | None:
    """The dialect of the model. One that its own template reads was trained, though no row knows it."""
    dialect = find_dialect(edge.parsers.tool_calls, edge.engine.info.chat_template)
    has_calls = template is not None and template.field_of(Role.CALLS) is not None
    if dialect is None or not has_calls or wanted_grammar(body) is not None:
        return dialect
    return replace(dialect, is_trained=True)


async def prompt_of(edge: Edge, chat: ChatCompletionRequest) -> TokenIds:
    """The prompt that a request would have, for counting its tokens. Raises RequestRejected, Overloaded."""
    info = edge.engine.info
    dialect = _dialect(edge, chat, find_template(edge.parsers, info))
    if chat.tools and dialect is None:
        # Where calls are not read, a choice that needs no reader has the same prompt.
        chat = chat.model_copy(update={"tool_choice": ToolChoiceObject(type="required")})
    messages, options = template_input(chat, info, tool_use_of(chat, dialect))
    return await edge.engine.encode_chat(messages, options)


async def _prediction(engine: Engine, body: ChatCompletionRequest, *, max_tokens: int) -> TokenIds:
    """Encode the text that the client expects, as far as the reply may be long. Raises RequestRejected."""
    if body.prediction is None:
        return ()
    if not engine.info.max_drafts:
        raise RequestRejected(
            "prediction is not supported by this server: its steps verify no drafts (in pipelines, and for"
            " models without a paged KV cache); leave it out",
            param="prediction",
            code="unsupported_parameter",
        )
    for part in body.prediction.content:
        if part.type != "text" or part.text is None:
            raise RequestRejected("the parts of prediction.content must be text", param="prediction.content")
    text = "".join(part.text or "" for part in body.prediction.content)
    check_num_chars(len(text), engine.info, param="prediction.content")
    return (await engine.encode_plain(text))[:max_tokens] if text else ()


def _wanted(
    body: ChatCompletionRequest, grammar: WantedGrammar | None, shown_special_ids: frozenset[int]
) -> Wanted:
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if body.max_tokens is not None and body.max_tokens != asked:
        raise RequestRejected(
            "max_tokens and max_completion_tokens contradict each other", param="max_tokens"
        )
    return Wanted(
        names=_NAMES if body.max_tokens is None else _OLDER_NAMES,
        max_tokens=asked,
        num_choices=body.n or 1,
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        num_prompt_logprobs=body.prompt_logprobs,
        grammar=grammar,
        shown_special_ids=shown_special_ids,
    )


def _shown_special_ids(tool_use: ToolUse, info: ModelInfo, style: ReasoningStyle | None) -> frozenset[int]:
    """Marks that the readers of the reply must see in its text, as far as they are tokens."""
    marks = (*tool_use.marks, *(() if style is None else style.marks))
    return frozenset(info.added_tokens[mark] for mark in marks if mark in info.added_tokens)


def _wanted_grammar(body: ChatCompletionRequest, tool_use: ToolUse, info: ModelInfo) -> WantedGrammar | None:
    """The grammar of the reply, whether fields or tools ask for it. Raises RequestRejected."""
    wanted = wanted_grammar(body)
    of_calls = tool_use.grammar
    if wanted is not None and tool_use.offered:
        answer = None if body.response_format is None else answer_schema(body.response_format)
        of_calls = None if answer is None else tool_use.grammar_beside(answer)
        if of_calls is None:
            raise RequestRejected(
                f"{wanted.param} and tools exclude each other here: a reply that must match it could not call"
                " tools; use tool_choice none",
                param=wanted.param,
            )
    if of_calls is not None:
        wanted = WantedGrammar(grammar=of_calls, param="tools")
    if wanted is not None:
        check_can_end(body, info, param=wanted.param)
    return wanted


def _reasoning_start(
    engine: Engine, style: ReasoningStyle | None, body: ChatCompletionRequest, prompt_ids: TokenIds
) -> ReasoningStart:
    if style is None:
        return ReasoningStart.NONE
    if body.continue_final_message:
        begun = _last_text(body)
        is_open = begun.rfind(style.begin) > begun.rfind(style.end)
        return ReasoningStart.OPEN if is_open else ReasoningStart.NONE
    end = raw_text(engine, prompt_ids[-_NUM_TAIL_TOKENS:]).rstrip()
    if end.endswith(style.begin):
        return ReasoningStart.OPEN
    return ReasoningStart.NONE if end.endswith(style.end) else ReasoningStart.POSSIBLE


async def _before_grammar(
    engine: Engine, style: ReasoningStyle, options: ChatOptions, start: ReasoningStart
) -> tuple[TokenIds, ReasoningStart]:
    """Open the block of reasoning in the prompt, or leave it out: a grammar cannot leave that open.

    Returns the tokens to add to the prompt.
    """
    info = engine.info
    if style.answer and start is ReasoningStart.POSSIBLE:
        return await engine.encode_plain(style.answer), ReasoningStart.NONE
    begin_id, end_id = info.added_tokens.get(style.begin), info.added_tokens.get(style.end)
    if end_id is None:
        return (), ReasoningStart.NONE
    is_off = turns_reasoning_off(options)
    if start is ReasoningStart.POSSIBLE and style.begin in info.chat_template and begin_id and not is_off:
        return (begin_id,), ReasoningStart.OPEN
    return (), ReasoningStart.OPEN if start is ReasoningStart.OPEN else ReasoningStart.NONE


def _after_reasoning(
    grammar: WantedGrammar, info: ModelInfo, style: ReasoningStyle, start: ReasoningStart
) -> WantedGrammar:
    """Let the grammar begin with the token that ends an open block of reasoning."""
    if start is not ReasoningStart.OPEN:
        return grammar
    begun_later = replace(grammar.grammar, begins_after=info.added_tokens.get(style.end))
    return replace(grammar, grammar=begun_later)


def _last_text(body: ChatCompletionRequest) -> str:
    return "".join(part.text or "" for part in body.messages[-1].content or ())


def raw_text(engine: Engine, token_ids: Sequence[int]) -> str:
    """The text of token ids, with all their marks."""
    return b"".join(engine.token_text(token_id).token_bytes for token_id in token_ids).decode(
        errors="replace"
    )

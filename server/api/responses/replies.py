"""The response object, made of the request and of the generated text.

Pure: fed with deltas of chat completions, read as dicts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from engine.types import SamplingParams
from server.api.responses.protocol import ResponsesRequest
from server.api.responses.tools import InputText, Toolbox, WireTool
from server.reply.generate.wire_logprobs import GrowingLists

_INCOMPLETE: Final = {"length": "max_output_tokens", "timeout": "timeout"}
"""Finish reasons of a response that is not complete; the second is ours: OpenAI has no time limits."""
TextKind = Literal["output_text", "reasoning_text"]
_FUNCTION: Final = {"parameters": None, "strict": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsePlan:
    """Everything that is known about a response before its first token."""

    id: str
    created_s: int
    model: str
    body: ResponsesRequest
    params: SamplingParams
    """Resolved parameters, for the fields that the request left open."""
    is_stored: bool
    tools: Toolbox
    prompt_ids: tuple[int, ...] = ()
    raw_text: Callable[[Sequence[int]], str] | None = None
    """Text of token ids with all their marks, if the response shall have its messages; else None."""

    def item_id(self, prefix: str, place: int) -> str:
        return f"{prefix}_{self.id.partition('_')[2]}{place:02x}"


@dataclass(slots=True)
class TextItem:
    """Text for the caller, or the model's reasoning."""

    id: str
    kind: TextKind = "output_text"
    text: list[str] = field(default_factory=list)
    logprobs: GrowingLists = field(default_factory=lambda: GrowingLists("logprobs"))

    def part(self) -> dict[str, Any]:
        said = {} if self.kind == "reasoning_text" else {"annotations": [], **self.logprobs.json()}
        return {"type": self.kind, **said, "text": "".join(self.text)}

    def body(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self.part()]
        if self.kind == "reasoning_text":
            return {"id": self.id, "type": "reasoning", "summary": [], "content": content, "status": status}
        return {"id": self.id, "type": "message", "status": status, "content": content, "role": "assistant"}


@dataclass(slots=True)
class CallItem:
    """A tool that the caller shall run."""

    id: str
    call_id: str
    tool: WireTool
    arguments: list[str] = field(default_factory=list)
    text: InputText = field(default_factory=InputText)
    """The text of a custom tool, as it is streamed."""

    def body(self, status: str) -> dict[str, Any]:
        head = {"id": self.id, "type": self.tool.form.value, "status": status, "call_id": self.call_id}
        return {**head, **self.tool.said("".join(self.arguments))}


OutputItem = TextItem | CallItem


def ended(
    plan: ResponsePlan, output: list[dict[str, Any]], *, finish_reason: str, usage: dict[str, Any], now_s: int
) -> dict[str, Any]:
    """The response object with all its output; `usage` is that of a chat completion."""
    response = response_of(plan, status=status_of(finish_reason))
    response["output"] = output
    response["usage"] = _usage(usage)
    if finish_reason in _INCOMPLETE:
        response["incomplete_details"] = {"reason": _INCOMPLETE[finish_reason]}
    else:
        response["completed_at"] = now_s
    return response


def raw_messages(plan: ResponsePlan, output_ids: list[int]) -> dict[str, Any]:
    """Prompt and output as the model has them; empty if they are not asked for."""
    if plan.raw_text is None:
        return {}
    sides = (("input_messages", list(plan.prompt_ids)), ("output_messages", output_ids))
    return {
        name: [{"type": "raw_message_tokens", "message": plan.raw_text(ids), "tokens": ids}]
        for name, ids in sides
    }


def status_of(finish_reason: str) -> str:
    return "incomplete" if finish_reason in _INCOMPLETE else "completed"


def response_of(plan: ResponsePlan, *, status: str) -> dict[str, Any]:
    """The response object without output, error and usage."""
    body, params = plan.body, plan.params
    return {
        "id": plan.id,
        "object": "response",
        "created_at": plan.created_s,
        "completed_at": None,
        "status": status,
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": plan.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "service_tier": "default",
        "store": plan.is_stored,
        "temperature": params.temperature,
        "text": {"format": _text_format(body), "verbosity": "medium"},
        "tool_choice": _tool_choice(body),
        "tools": [
            {**(_FUNCTION if tool.type == "function" else {}), **tool.model_dump(exclude_none=True)}
            for tool in body.tools or ()
        ],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


def _text_format(body: ResponsesRequest) -> dict[str, Any]:
    if body.text is None or body.text.format is None:
        return {"type": "text"}
    return body.text.format.model_dump(by_alias=True, exclude_none=True)


def _tool_choice(body: ResponsesRequest) -> Any:
    written = {"type": "auto"} if body.tool_choice is None else body.tool_choice.model_dump(exclude_none=True)
    return written if len(written) > 1 else written["type"]


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """OpenAI gives the same numbers other names here."""
    details = usage.get("completion_tokens_details") or {}
    num_cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": details.get("reasoning_tokens") or 0},
        "total_tokens": usage["total_tokens"],
    }

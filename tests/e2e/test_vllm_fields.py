"""The table of docs/vllm.md is what a server does with each field of vLLM's requests."""

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.serving import RunningServer

PAGE = Path(__file__).parents[2] / "docs/vllm.md"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

# Names and sample values of vLLM 0.33's request models.
SAMPLING: dict[str, Any] = {
    **{"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "n": 2, "stop": ["zz"]},
    **{"presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1, "max_tokens": 3},
    **{"stop_token_ids": [3], "include_stop_str_in_output": True, "ignore_eos": True, "min_tokens": 1},
    **{"skip_special_tokens": False, "spaces_between_special_tokens": True, "allowed_token_ids": [5, 6]},
    **{"bad_words": ["bad"], "logit_bias": {"5": 1}, "prompt_logprobs": 1, "priority": 0, "user": "ann"},
    **{"truncate_prompt_tokens": 5, "truncation_side": "left", "use_beam_search": True, "length_penalty": 2},
    **{"add_special_tokens": True, "stream": True, "stream_options": {"include_usage": True}},
    **{"response_format": {"type": "json_object"}, "structured_outputs": {"choice": ["yes", "no"]}},
    **{"return_token_ids": True, "return_tokens_as_token_ids": True, "return_token_offsets": True},
    **{"cache_salt": "s", "request_id": "r", "session_id": "s", "kv_transfer_params": {}, "vllm_xargs": {}},
    **{"ec_transfer_params": {}, "repetition_detection": {}, "stream_interval": 2, "watermarking": True},
    **{"thinking_token_budget": 9, "return_mm_kwargs": False, "routed_experts_prompt_start": 1},
    **{"include_metrics": True, "logits_processors": ["x"], "logprob_token_ids": [4], "echo": True},
}
COMPLETIONS = {**SAMPLING, "suffix": "", "best_of": 2, "logprobs": 2, "prompt_embeds": "AA=="}
CHAT = {
    **SAMPLING,
    **{
        "logprobs": True,
        "top_logprobs": 2,
        "max_completion_tokens": 2,
        "tools": [TOOL],
        "tool_choice": "none",
    },
    **{"parallel_tool_calls": False, "include_reasoning": True, "reasoning_effort": "low"},
    **{"add_generation_prompt": True, "continue_final_message": False, "chat_template": "{{ 1 }}"},
    **{"chat_template_kwargs": {}, "documents": [{"text": "x"}], "mm_processor_kwargs": {}},
    **{"media_io_kwargs": {}, "return_prompt_text": True},
}
RESPONSES = {
    **{"instructions": "x", "max_output_tokens": 3, "max_tool_calls": 1, "metadata": {}, "store": False},
    **{"parallel_tool_calls": False, "previous_response_id": "resp_1", "prompt": {"id": "p"}, "stream": True},
    **{
        "reasoning": {"effort": "low"},
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "user": "ann",
        "seed": 3,
    },
    **{"text": {"format": {"type": "text"}}, "truncation": "auto", "top_logprobs": 1, "background": False},
    **{"include": ["message.output_text.logprobs"], "tools": [], "tool_choice": "auto", "priority": 0},
    **{"skip_special_tokens": False, "include_stop_str_in_output": True, "mm_processor_kwargs": {}},
    **{"request_id": "r", "cache_salt": "s", "enable_response_messages": True, "vllm_xargs": {}},
    **{"previous_input_messages": [{}], "structured_outputs": {"choice": ["yes"]}, "ignore_eos": True},
    **{"repetition_penalty": 1.1, "stop": "zz", "logit_bias": {"5": 1}, "prompt_cache_key": "k"},
    **{"service_tier": "auto", "previous_response": {}},
}
ENDPOINTS = {
    "completions": ("/v1/completions", {"prompt": "Once upon", "max_tokens": 2}, COMPLETIONS),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
        CHAT,
    ),
    "responses": ("/v1/responses", {"input": "hi", "max_output_tokens": 2}, RESPONSES),
}
BESIDE: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "logprob_token_ids": {"logprobs": True},
    "tool_choice": {"tools": [TOOL]},
    "parallel_tool_calls": {"tools": [TOOL], "tool_choice": "none"},
    "tools": {"tool_choice": "none"},
}
"""Fields without which another means nothing."""
AS_IN_OPENAIS = frozenset({"metadata", "prompt_cache_key", "service_tier"})


def table() -> dict[str, list[str]]:
    """The second and the third cell of each row, by the name of the field."""
    part = PAGE.read_text().split("## Request parameters")[1].split("\n## ")[0]
    rows: dict[str, list[str]] = {}
    for line in part.splitlines():
        if line.startswith("| `"):
            first, *cells = (cell.strip() for cell in line.strip("| ").split(" | "))
            rows |= {name: cells for name in re.findall(r"`([a-z_]+)`", first)}
    return rows


def expected(name: str, endpoint: str, rows: dict[str, list[str]]) -> int:
    if name not in rows:
        return 200
    here, *more = rows[name]
    is_refused = here.startswith("refused") or f"{endpoint}: refused" in " ".join(more)
    return 400 if is_refused else 200


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_each_field_of_vllm_is_taken_or_refused_as_the_page_says(
    crowded_server: RunningServer, endpoint: str
) -> None:
    path, body, fields = ENDPOINTS[endpoint]
    rows = table()
    assert fields.keys() - rows.keys() <= AS_IN_OPENAIS, "each has a row"
    wrong = []
    with httpx.Client(base_url=crowded_server.url, timeout=60) as client:
        for name, value in fields.items():
            beside = {} if endpoint == "responses" else BESIDE.get(name, {})
            if endpoint == "completions" and "logprobs" in beside:
                beside = {"logprobs": 1}
            reply = client.post(path, json={**body, **beside, name: value})
            if name == "previous_response_id":
                assert (reply.status_code, reply.json()["error"]["param"]) == (400, name), "no such response"
                continue
            wanted = expected(name, endpoint, rows)
            if reply.status_code != wanted:
                wrong.append(f"{name}: {reply.status_code}, not {wanted}: {reply.text[:200]}")
            elif wanted == 400:
                assert reply.json()["error"]["param"] == name
    assert not wrong, "\n".join(wrong)

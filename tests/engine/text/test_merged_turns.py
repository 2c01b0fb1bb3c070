"""Conversations that a template refuses or shortens reach the model all the same."""

import pytest

from engine.errors import RequestRejected
from engine.frontend.metrics import EngineMetrics
from engine.text.chat_template import ChatTemplate
from engine.text.template_language import Templates
from engine.text.template_messages import Chat, MergeReason, Program

LOOP = "{% for m in messages %}{% set before = messages[loop.index0 - 1] if not loop.first else none %}"
WRITE = "[{{ m.role }}:{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}]"
END = "{% endfor %}"
STRICT = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}"
DROP = "{% if m.role != 'system' or loop.first %}" + WRITE + "{% endif %}"
ALTERNATE = "{% if before and before.role == m.role %}{{ raise_exception('in turn') }}{% endif %}"
LAST_OF_ROLE = "{% if loop.last or messages[loop.index0 + 1].role != m.role %}" + WRITE + "{% endif %}"
NO_SYSTEM = "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"


def say(*turns: str) -> list[dict]:
    """Messages, each as `role text`."""
    return [dict(zip(("role", "content"), turn.split(" ", 1), strict=True)) for turn in turns]


@pytest.mark.parametrize(
    ("body", "turns", "prompt"),
    [
        (WRITE, ("system a", "user b", "system c", "user d"), "[system:a][user:b][system:c][user:d]"),
        (STRICT + WRITE, ("system a", "user b", "system c", "user d"), "[system:a\n\nc][user:b\n\nd]"),
        (STRICT + WRITE, ("user b", "system c"), "[system:c][user:b]"),
        (DROP, ("system a", "user b", "system c", "assistant d"), "[system:a\n\nc][user:b][assistant:d]"),
        (ALTERNATE + WRITE, ("user a", "user b", "assistant c"), "[user:a\n\nb][assistant:c]"),
        (ALTERNATE + WRITE, ("user a", "assistant b", "user c"), "[user:a][assistant:b][user:c]"),
        (NO_SYSTEM + WRITE, ("system a", "user b", "system c"), "[user:a\n\nc\n\nb]"),
        ("{% if m.role == 'user' %}" + WRITE + "{% endif %}", ("system a1", "user b"), "[user:a1\n\nb]"),
        (
            LAST_OF_ROLE,
            ("user a", "assistant b1", "assistant c", "user d"),
            "[user:a][assistant:b1\n\nc][user:d]",
        ),
        (LAST_OF_ROLE, ("user a", "assistant b1", "user d"), "[user:a][assistant:b1][user:d]"),
    ],
)
def test_turns_are_merged_where_the_template_needs_it_and_only_there(body, turns, prompt) -> None:
    templates = Templates(Program(templates={"default": LOOP + body + END}))
    assert templates.render(Chat(messages=say(*turns))) == prompt


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (WRITE, None),
        (STRICT + WRITE, "refused"),
        (DROP, "left_out"),
        ("{% if m.role != 'system' %}<{{ m.role }}>{% endif %}{{ m.content }}", "welded"),
        ("{{ m.content }}", None),
    ],
)
def test_the_reason_for_merged_turns_is_known(body, reason) -> None:
    templates = Templates(Program(templates={"default": LOOP + body + END}))
    text = templates.render(Chat(messages=say("user 1", "system 2", "user 3")))
    assert templates.merged_for == reason
    assert (text.index("2") < text.index("1")) == (reason is not None)
    templates.render(Chat(messages=say("user 1")))
    assert templates.merged_for is None


@pytest.mark.parametrize("switch", ["/no_think", "/think"])
def test_a_switch_that_the_template_takes_out_of_a_text_is_none_that_it_left_out(switch: str) -> None:
    write = "[{{ m.role }}:{{ m.content | replace('/no_think', '') | replace('/think', '') | trim }}]"
    templates = Templates(Program(templates={"default": LOOP + write + END}))
    turns = say(f"system Be terse. {switch}", "user a", "assistant b", f"user What is it? {switch}")
    assert (
        templates.render(Chat(messages=turns)) == "[system:Be terse.][user:a][assistant:b][user:What is it?]"
    )


def test_calls_and_thoughts_of_one_role_stay_together() -> None:
    templates = Templates(
        Program(templates={"default": LOOP + ALTERNATE + WRITE + "{{ m.tool_calls | length }}" + END})
    )
    call = {"function": {"name": "f", "arguments": "{}"}}
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "reasoning_content": "why"},
        {"role": "assistant", "content": "b", "reasoning_content": "how", "tool_calls": [call]},
        {"role": "assistant", "tool_calls": [call]},
    ]
    assert templates.render(Chat(messages=turns)) == "[user:a]0[assistant:(why\n\nhow)b]2"


def test_a_text_that_no_merging_brings_into_the_prompt_is_an_error() -> None:
    last_only = Templates(Program(templates={"default": "{{ messages[-1].content }}"}))
    with pytest.raises(RequestRejected, match=r"leaves messages\[0\] out"):
        last_only.render(Chat(messages=say("user one", "assistant two", "user three")))


@pytest.mark.parametrize("text", ['say "hi"\nnow', "  spaced\t\n"])
def test_texts_that_a_template_trims_or_quotes_are_found(text) -> None:
    for shown in ("{{ m.content | tojson }}", "{{ m.content | trim }}"):
        templates = Templates(Program(templates={"default": LOOP + shown + END}))
        chat = [{"role": "user", "content": "first"}, {"role": "user", "content": text}]
        assert "first" in templates.render(Chat(messages=chat))


def test_chats_with_merged_turns_are_counted_by_their_reason() -> None:
    metrics = EngineMetrics("model")
    template = ChatTemplate({"default": LOOP + STRICT + WRITE + END}, special_tokens={})
    template.on_merged = metrics.turns_merged
    try:
        template.render(Chat(messages=say("system a", "user b")))
        template.render(Chat(messages=say("user b", "system c")))
    finally:
        template.close()
    found = {
        reason: metrics.registry.get_sample_value("tokenyard:merged_turns_total", {"reason": reason})
        for reason in MergeReason
    }
    assert found == {"refused": 1, "left_out": 0, "welded": 0}

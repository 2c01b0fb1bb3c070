"""Rendered chats equal those of transformers, and every failure has an owner."""

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from engine.errors import RequestRejected
from engine.text.template_language import BrokenTemplate, Templates
from engine.text.template_messages import Chat, FinalMessage, Program
from tests.engine import small_tokenizers

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

LLAMA_3 = """\
{% set loop_messages = messages %}
{% for message in loop_messages %}
    {% set header = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' %}
    {% set content = header + message['content'] | trim + '<|eot_id|>' %}
    {% if loop.index0 == 0 %}
        {% set content = bos_token + content %}
    {% endif %}
{{ content }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{% endif %}
"""

MISTRAL = """\
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- bos_token }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant/user/assistant') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {%- if loop.last and system is defined %}
            {{- '[INST] ' + system + '\\n\\n' + message.content + ' [/INST]' }}
        {%- else %}
            {{- '[INST] ' + message.content + ' [/INST]' }}
        {%- endif %}
    {%- else %}
        {{- ' ' + message.content | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""

GEMMA = """\
{{ bos_token }}
{%- macro body(content) -%}
    {%- if content is string -%}
        {{ content | trim }}
    {%- else -%}
        {%- for part in content if part.type == 'text' -%}{{ part.text | trim }}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(turns=0) -%}
{%- for message in messages -%}
    {%- if message.role == 'system' %}{% continue %}{% endif -%}
    {%- set role = 'model' if message.role == 'assistant' else message.role -%}
    {%- set ns.turns = ns.turns + 1 -%}
    {{ '<start_of_turn>' + role + '\n' }}{{ body(message.content) }}{{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\n' }}
{%- endif -%}
"""

IN_PARTS = """\
{%- for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content | trim }}{% else %}\
{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"""
SHOWS_LISTS = "{% for m in messages %}{{ m.role }} {{ m.content | tojson }} {{ m.content }}{% endfor %}"
FIRST_PART = "{% for m in messages %}{{ m.content[0].text or m.content }}{% endfor %}"

TEMPLATES = {"chatml": CHATML, "llama_3": LLAMA_3, "mistral": MISTRAL, "gemma": GEMMA}

QUESTION = {"role": "user", "content": "What is <b>2 & 2</b>? 日本 😀 "}
ANSWER = {"role": "assistant", "content": "It is four. \n"}
CHATS = [
    [QUESTION],
    [QUESTION, ANSWER],
    [{"role": "system", "content": "Be brief."}, QUESTION, ANSWER, {"role": "user", "content": "Why?\n\n"}],
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "Sieh <hier> & da", "parameters": {"type": "object"}},
    }
]


def ours(source: str) -> Templates:
    return Templates(Program(templates={"default": source}, special_tokens=SPECIAL_TOKENS))


def theirs(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    backend = small_tokenizers.byte_level_backend()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=source, **SPECIAL_TOKENS)
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


_EFFORT = "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}"


@pytest.mark.parametrize(
    ("source", "options", "rendered"),
    [
        ("plain", {"hints": {"reasoning_effort": "low", "thinking": False}}, "plain"),
        (_EFFORT + "{{ reasoning_effort }}", {}, "medium"),
        (_EFFORT + "{{ reasoning_effort }}", {"hints": {"reasoning_effort": "low"}}, "low"),
        (
            "{{ reasoning_effort }}",
            {"hints": {"reasoning_effort": "low"}, "kwargs": {"reasoning_effort": "high"}},
            "high",
        ),
    ],
)
def test_a_hint_is_for_a_template_that_reads_it(source, options, rendered) -> None:
    assert ours(source).render(Chat(messages=[QUESTION], **options)) == rendered


def test_a_hint_cannot_set_what_is_ours() -> None:
    assert (
        ours("{{ tools }}").render(Chat(messages=[QUESTION], hints={"tools": "x", "messages": "y"})) == "None"
    )


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize("chat", CHATS, ids=["question", "answered", "with_system"])
def test_a_chat_renders_as_transformers_renders_it(name, chat) -> None:
    source = TEMPLATES[name]
    kept = chat
    if name == "gemma" and chat[0]["role"] == "system":  # it has no such role, and would leave the text out
        kept = [{**chat[1], "content": f"{chat[0]['content']}\n\n{chat[1]['content']}"}, *chat[2:]]
    assert ours(source).render(Chat(messages=chat)) == theirs(source, kept, add_generation_prompt=True)
    assert ours(source).render(Chat(messages=chat, final=FinalMessage.NOTHING)) == theirs(source, kept)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize("content", ["It is", "It is ", "  It", "It\n\n", "<|im_end|> is"])
def test_a_message_to_continue_is_left_open_as_transformers_leaves_it(name, content) -> None:
    chat = [QUESTION, {"role": "assistant", "content": content}]
    rendered = ours(TEMPLATES[name]).render(Chat(messages=chat, final=FinalMessage.CONTINUE))
    assert rendered == theirs(TEMPLATES[name], chat, continue_final_message=True)
    assert rendered.endswith((content, content.strip()))
    assert chat[1]["content"] == content


def test_content_in_parts_is_continued_after_its_last_text() -> None:
    parts = [{"type": "text", "text": "One,"}, {"type": "text", "text": "two,"}, {"type": "image"}]
    chat = [QUESTION, {"role": "assistant", "content": parts}]
    rendered = ours(GEMMA).render(Chat(messages=chat, final=FinalMessage.CONTINUE))
    assert rendered == theirs(GEMMA, chat, continue_final_message=True)
    assert rendered.endswith("One,two,")


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_texts_of_a_message_are_given_as_parts_to_a_template_that_walks_through_them(role: str) -> None:
    parts = [{"type": "text", "text": text} for text in ("one", " two")]
    chat = [*([QUESTION] if role == "assistant" else []), {"role": role, "content": parts}, QUESTION]
    assert ours(IN_PARTS).render(Chat(messages=chat)) == theirs(IN_PARTS, chat, add_generation_prompt=True)
    for source in (CHATML, LLAMA_3, SHOWS_LISTS, FIRST_PART):
        joined = [
            message | {"content": "one\n two"} if message["content"] is parts else message for message in chat
        ]
        assert ours(source).render(Chat(messages=chat)) == ours(source).render(Chat(messages=joined))


@pytest.mark.parametrize(
    ("source", "chat"),
    [
        (CHATML, []),
        (CHATML, [{"role": "assistant", "content": None}]),
        (GEMMA, [{"role": "assistant", "content": [{"type": "image"}]}]),
        ("{{ messages[0].role }}", [ANSWER]),
    ],
)
def test_a_message_that_cannot_be_continued_is_the_callers_fault(source, chat) -> None:
    with pytest.raises(RequestRejected, match="continue_final_message") as caught:
        ours(source).render(Chat(messages=chat, final=FinalMessage.CONTINUE))
    assert caught.value.param == "continue_final_message"


def test_tools_render_as_plain_json_and_choose_their_own_template() -> None:
    rendered = ours(CHATML).render(Chat(messages=[QUESTION], tools=TOOLS))
    assert rendered == theirs(CHATML, [QUESTION], tools=TOOLS, add_generation_prompt=True)
    assert "Sieh <hier> & da" in rendered
    both = Templates(Program(templates={"default": "plain", "tool_use": "with tools"}))
    assert [both.render(Chat(messages=[QUESTION])), both.render(Chat(messages=[QUESTION], tools=TOOLS))] == [
        "plain",
        "with tools",
    ]


def test_tojson_indents_and_sorts_as_templates_ask() -> None:
    source = "{{ messages | tojson(indent=2) }}{{ messages | tojson(sort_keys=true, separators=(',', ':')) }}"
    assert ours(source).render(Chat(messages=[QUESTION])) == theirs(source, [QUESTION])


HERMES_CALLS = """\
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {%- set body = {'name': call.function.name, 'arguments': call.function.arguments} %}
            {{- '<tool_call>' }}{{ body | tojson }}
        {%- endfor %}
    {%- else %}
        {{- message.content }}
    {%- endif %}
{%- endfor %}
"""
QWEN_3_CALLS = """\
{%- for call in messages[1].tool_calls %}
    {%- if call.function.arguments is string %}
        {{- call.function.arguments }}
    {%- else %}
        {{- call.function.arguments | tojson }}
    {%- endif %}
    {%- for key, value in call.function.arguments.items() %}{{ key }}={{ value }};{% endfor %}
{%- endfor %}
"""


def call_messages(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "look", "arguments": arguments}
    call = {"id": "call_1", "type": "function", "function": function}
    return [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]


@pytest.mark.parametrize(
    "source",
    [HERMES_CALLS, QWEN_3_CALLS, MISTRAL.replace("message.content | trim", "message.tool_calls | tojson")],
)
def test_arguments_of_calls_are_objects_to_a_template_that_asks_for_objects(source) -> None:
    rendered = ours(source).render(Chat(messages=call_messages('{"wo": "Köln", "n": [1, 2]}')))
    assert rendered == theirs(source, call_messages({"wo": "Köln", "n": [1, 2]}))
    assert "Köln" in rendered


@pytest.mark.parametrize(
    "expression",
    [
        "{{ arguments }}",
        "{{ arguments | string }}",
        "{{ '' ~ arguments }}",
        "{{ '' + arguments + '' }}",
        "{{ arguments + '' }}",
    ],
)
def test_arguments_of_calls_are_text_to_a_template_that_asks_for_text(expression) -> None:
    source = "{% set arguments = messages[1].tool_calls[0].function.arguments %}" + expression
    for arguments in ('{ "a":1 }', "{}", "not an object", "[1]"):
        assert ours(source).render(Chat(messages=call_messages(arguments))) == arguments


def test_a_key_that_is_none_counts_as_absent() -> None:
    source = "{% if messages[0].tool_calls is defined %}calls{% else %}none{% endif %}"
    assert ours(source).render(Chat(messages=[{**QUESTION, "tool_calls": None}])) == "none"


def test_strftime_now_gives_this_year() -> None:
    assert ours("{{ strftime_now('%Y') }}").render(Chat(messages=[QUESTION])).startswith("20")


def test_a_template_argument_reaches_the_template() -> None:
    rendered = ours(CHATML).render(Chat(messages=[QUESTION], kwargs={"enable_thinking": False}))
    assert rendered == theirs(CHATML, [QUESTION], add_generation_prompt=True, enable_thinking=False)
    assert rendered.endswith("</think>\n\n")


@pytest.mark.parametrize(
    "name",
    [
        "messages",
        "tools",
        "add_generation_prompt",
        "bos_token",
        "raise_exception",
        "range",
        "unheard_of",
        "__class__",
    ],
)
def test_a_template_argument_never_replaces_our_own(name) -> None:
    templates = ours(CHATML + LLAMA_3 + "{{ range(1) }}")
    plain = templates.render(Chat(messages=[QUESTION]))
    assert templates.render(Chat(messages=[QUESTION], kwargs={name: "x"})) == plain
    assert name not in templates.variables
    assert "enable_thinking" in templates.variables


def test_the_servers_values_give_way_to_the_requests() -> None:
    templates = Templates(Program(templates={"default": "{{ b }}{{ c }}{{ d is defined }}{% set d = 1 %}"}))
    rendered = templates.render(Chat(messages=[QUESTION], hints={"b": 2, "c": 2}, kwargs={"c": 3}))
    assert rendered == "23False"


def test_the_templates_own_refusal_reaches_the_caller() -> None:
    with pytest.raises(RequestRejected, match="roles must alternate") as caught:
        ours(MISTRAL).render(Chat(messages=[ANSWER]))
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' + messages[0].content[0] }}{{ 1 // 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].content }}",
        "{{ nothing.at.all }}",
        "{{ messages[0].pop('content') }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{% include '/etc/passwd' %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{% for i in range(10000000000) %}{% endfor %}",
    ],
)
def test_a_template_that_fails_or_steps_out_of_its_sandbox_fails_the_request_alone(source) -> None:
    with pytest.raises(RequestRejected) as caught:
        ours(source).render(Chat(messages=[QUESTION]))
    assert caught.value.param == "messages"
    assert len(str(caught.value)) < 700


def test_a_rendered_chat_is_bounded() -> None:
    with pytest.raises(RequestRejected, match="characters"):
        ours("{% for i in range(40000) %}{{ messages[0].content }}{% endfor %}").render(
            Chat(messages=[{"role": "user", "content": "x" * 1000}])
        )


def test_operations_on_texts_and_lists_are_those_of_the_language() -> None:
    source = (
        "{{ 'a' ~ 1 ~ none }}|{{ [1, 2] | join(', ') }}|{{ messages | join('-', attribute='role') }}|"
        "{{ 'x-y'.replace('-', '+') }}|{{ 'x-y' | replace('-', '') }}|{{ '-'.join(['a', 'b']) }}|"
        "{{ 'a'.center(3) }}|{{ '%05.2f' % 3.14159 }}|{{ '%s!' | format('b') }}|{{ '{:>4}'.format(7) }}|"
        "{{ [1] + [2] }}|{{ 1 + 2 }}|{{ 7 % 4 }}"
    )
    assert (
        ours(source).render(Chat(messages=[QUESTION]))
        == "a1None|1, 2|user|x+y|xy|a-b| a |03.14|b!|   7|[1, 2]|3|3"
    )


def test_a_broken_template_says_where() -> None:
    with pytest.raises(BrokenTemplate, match="'default' is broken at line 2"):
        ours("text\n{% for %}")

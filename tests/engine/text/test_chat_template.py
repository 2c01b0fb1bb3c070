"""A chat is rendered in a process that may be ended: no template takes the server's memory or time."""

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine.errors import EngineUnavailable, NoChatTemplate, RequestRejected
from engine.processes import child_process
from engine.text import chat_template, renderers
from engine.text.chat_template import MAX_TEMPLATE_BYTES, ChatTemplate, NoRenderer
from engine.text.template_messages import MAX_MEMORY_BYTES, Chat, FinalMessage
from engine.text.tokenizer import TokenizerError

QUESTION = {"role": "user", "content": "hi"}
ALL_OF_IT = "{% for message in messages %}{{ message.content }}{% endfor %}"
STUCK = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
STUCK_ON_REQUEST = "{% if messages[0].content == 'stuck' %}" + STUCK + "{% endif %}" + ALL_OF_IT

Make = Callable[..., ChatTemplate]


def pids_of(template: ChatTemplate) -> list[int]:
    return [each._process.pid for each in template._renderers._living]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes a template of a source or of several; afterwards no process is left."""
    made: list[ChatTemplate] = []

    def make(sources: str | dict[str, str], **special_tokens: str) -> ChatTemplate:
        named = {"default": sources} if isinstance(sources, str) else sources
        made.append(ChatTemplate(named, special_tokens=special_tokens))
        return made[-1]

    yield make
    for each in made:
        pids = pids_of(each)
        each.close()
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_all_that_a_chat_brings_reaches_the_template(make: Make) -> None:
    arguments = '{"wo": "\\ud83d\\ude00", "n": 12345678901234567890123}'
    call = {"function": {"name": "look", "arguments": arguments}}
    messages = [{**QUESTION, "name": None}, {"role": "assistant", "content": "It", "tool_calls": [call]}]
    source = (
        "{{ bos_token }}{{ messages[0].name is defined }}|{{ messages[1].tool_calls | tojson }}|"
        "{{ tools | tojson }}|{{ add_generation_prompt }}|{{ effort }}|{{ level }}|{{ messages[1].content }}"
    )
    rendered = make(source, bos_token="<s>").render(
        Chat(
            messages=messages,
            tools=[{"type": "function", "most": 2**64 - 1, "least": -0.5}],
            final=FinalMessage.CONTINUE,
            kwargs={"effort": ["low", None]},
            hints={"level": True},
        )
    )
    assert rendered == (
        '<s>False|[{"function": {"name": "look", "arguments": {"wo": "😀", "n": 12345678901234567890123}}}]|'
        '[{"type": "function", "most": 18446744073709551615, "least": -0.5}]|False|[\'low\', None]|True|It'
    )


def test_requests_with_tools_have_their_own_template(make: Make) -> None:
    both = make({"default": "plain", "tool_use": "with tools"})
    assert [
        both.render(Chat(messages=[QUESTION])),
        both.render(Chat(messages=[QUESTION], tools=[{"type": "function"}])),
    ] == [
        "plain",
        "with tools",
    ]


def test_a_refusal_names_the_parameter_and_the_process_goes_on(make: Make) -> None:
    template = make("{{ raise_exception('roles must alternate') if messages | length > 1 }}{{ mood }}")
    with pytest.raises(RequestRejected, match="roles must alternate") as caught:
        template.render(Chat(messages=[QUESTION, {"role": "assistant", "content": "a"}]))
    assert caught.value.param == "messages"
    (pid,) = pids_of(template)
    assert template.render(Chat(messages=[QUESTION], kwargs={"mood": "good"})) == "good"
    assert pids_of(template) == [pid]


def test_half_a_surrogate_pair_is_left_to_the_tokenizer_to_refuse(make: Make) -> None:
    call = {"function": {"name": "look", "arguments": '{"a": "\\ud800"}'}}
    template = make("{{ messages[0].tool_calls[0].function.arguments.a }}")
    assert template.render(Chat(messages=[{"role": "assistant", "tool_calls": [call]}])) == "\ud800"
    (pid,) = pids_of(template)
    with pytest.raises(RequestRejected, match="half of a surrogate pair"):
        template.render(Chat(messages=[{"role": "user", "content": "\ud800"}]))
    assert pids_of(template) == [pid]


def test_a_refusal_may_hold_half_a_surrogate_pair_and_the_process_goes_on(make: Make) -> None:
    call = {"function": {"name": "look", "arguments": '{"a": "\\ud800"}'}}
    template = make("{{ raise_exception('no ' ~ messages[0].tool_calls[0].function.arguments.a) }}")
    for _ in range(2):
        with pytest.raises(RequestRejected, match=r"no \?$"):
            template.render(Chat(messages=[{"role": "assistant", "tool_calls": [call]}]))
    assert len(pids_of(template)) == 1


_DOUBLED = "{% set ns = namespace(x='aaaaaaaa', n=9) %}{% for i in range(34) %}STEP{% endfor %}"
_WHERE_ASKED = "{% if messages[0].content == 'NUMBER' %}" + _DOUBLED + "{% endif %}"
_GROWING = [
    "{% set ns.x = ns.x + ns.x %}",
    "{% set ns.x = [ns.x, ns.x] | join %}",
    "{% set ns.x = ns.x.replace('aaaa', 'aaaaaaaa') %}",
    "{% set ns.x = ns.x | center(ns.x | length * 2) %}",
    "{% set ns.x = '%999999999d' % 1 %}",
    "{% set ns.x = '{:999999999}'.format(1) %}",
    "{% set ns.x = 'x' * 10000000000 %}",
    "{% set ns.x = [0] * 10000000000 %}",
    "{% set ns.x = ns.x | indent(999999999, true) %}",
    "{% set ns.x = ('a ' * 9999) | wordwrap(1, wrapstring='x' * 9999999) %}",
    "{% set ns.x = [1] | tojson(indent=999999999) %}",
    "{% set ns.x = [1] | batch(10000000000, 'x') | list %}",
    "{% set ns.x = [[ns.x], [ns.x]] | sum(start=[]) * 999999999 %}",
    "{% set ns.x = [[0] * 99999 * 999, [0] * 99999 * 999] | sum(start=[]) %}",
    "{% set ns.x = [ns.x, i ~ 'a' * 29999999] %}",
    "{% set ns.x = ns.x.encode().center(9999999999) %}",
    "{% set ns.x = ns.n.to_bytes(9999999999, 'big') %}",
]


@pytest.mark.night
def test_no_operation_takes_more_memory_than_a_rendering_may(
    make: Make, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    """Each time another process takes the place of the one that had too little."""
    monkeypatch.setattr(chat_template, "MAX_RENDERING_S", 60.0)
    parts = [
        _WHERE_ASKED.replace("NUMBER", str(number)).replace("STEP", growing)
        for number, growing in enumerate(_GROWING)
    ]
    template = make("".join(parts) + ALL_OF_IT)
    assert template.render(Chat(messages=[QUESTION])) == "hi"
    before = resident_kib()
    for number, growing in enumerate(_GROWING):
        with subtests.test(growing):
            with pytest.raises(RequestRejected, match="takes more than 512 MiB of memory") as caught:
                template.render(Chat(messages=[{"role": "user", "content": str(number)}]))
            assert caught.value.param == "messages"
    assert resident_kib() - before < 32 * 1024
    assert template.render(Chat(messages=[QUESTION])) == "hi"


def resident_kib() -> int:
    """Memory of this process as it is now, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def test_the_kernel_holds_the_process_to_its_memory(make: Make) -> None:
    template = make(ALL_OF_IT)
    template.judge()
    (pid,) = pids_of(template)
    assert resource.prlimit(pid, resource.RLIMIT_DATA) == (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES)


@pytest.mark.parametrize(
    "endless",
    [
        STUCK,
        "{% macro two(n) %}{% if n %}{{ two(n - 1) }}{{ two(n - 1) }}{% endif %}{% endmacro %}{{ two(99) }}",
        "{{ lipsum(100000000) | length }}",
        "{{ [1] | slice(9999999999) | list | length }}",
        "{{ 10000000000 ** 10000000000 }}",
        "{% set ns = namespace(x=1) %}{% for i in range(40) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}"
        "{{ {ns.x: 1} | length }}",
    ],
)
def test_a_template_without_end_is_ended(make: Make, monkeypatch: pytest.MonkeyPatch, endless: str) -> None:
    template = make("{% if messages[0].content != 'hi' %}" + endless + "{% endif %}" + ALL_OF_IT)
    template.judge()
    monkeypatch.setattr(chat_template, "MAX_RENDERING_S", 0.3)
    with pytest.raises(RequestRejected, match=r"takes longer than 0\.3 seconds") as caught:
        template.render(Chat(messages=[{"role": "user", "content": "stuck"}]))
    assert caught.value.param == "messages"
    assert pids_of(template) == []


def test_the_longest_prompt_that_may_be_rendered_fits_its_memory(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERING_S", 60.0)
    message = {"role": "user", "content": "😀" * (1 << 20)}
    template = make(ALL_OF_IT)
    assert len(template.render(Chat(messages=[message] * 16))) == 16 << 20
    with pytest.raises(RequestRejected, match="characters"):
        template.render(Chat(messages=[message] * 16 + [QUESTION]))


def test_chats_do_not_wait_for_one_that_takes_long(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    template = make(STUCK_ON_REQUEST)
    template.judge()
    monkeypatch.setattr(chat_template, "MAX_RENDERING_S", 60.0)
    with ThreadPoolExecutor(3) as threads:
        slow = threads.submit(template.render, Chat(messages=[{"role": "user", "content": "stuck"}]))
        while template._renderers._idle.qsize():  # until it has taken the process
            time.sleep(0.001)
        others = [threads.submit(template.render, Chat(messages=[QUESTION])) for _ in range(20)]
        assert [each.result(30) for each in others] == ["hi"] * 20
        assert not slow.done()
        assert 2 <= len(pids_of(template)) <= 3
        template.close()
        with pytest.raises(EngineUnavailable):
            slow.result(30)


def test_usual_chats_share_one_process(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderers, "_PATIENCE_S", 60.0)
    template = make(ALL_OF_IT)
    template.judge()
    together = threading.Barrier(3)

    def render(number: int) -> list[str]:
        together.wait()
        return [
            template.render(Chat(messages=[{"role": "user", "content": f"{number} {turn}"}]))
            for turn in range(20)
        ]

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(render, range(3)))
    assert found == [[f"{number} {turn}" for turn in range(20)] for number in range(3)]
    assert len(pids_of(template)) == 1


def test_processes_beyond_one_are_kept_for_a_while_after_their_last_use(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERING_S", 60.0)
    template = make(STUCK_ON_REQUEST)
    template.judge()
    (first,) = pids_of(template)
    with ThreadPoolExecutor(1) as threads:
        os.kill(first, signal.SIGSTOP)  # a chat that takes long, until it may go on
        slow = threads.submit(template.render, Chat(messages=[QUESTION]))
        while template._renderers._idle.qsize():
            time.sleep(0.001)
        assert template.render(Chat(messages=[QUESTION])) == "hi"
        os.kill(first, signal.SIGCONT)
        assert slow.result(60) == "hi"
    assert template.render(Chat(messages=[QUESTION])) == "hi"
    assert len(pids_of(template)) == 2, "there may soon be two chats again"
    monkeypatch.setattr(renderers, "_KEPT_S", 0.0)
    for _ in range(2):
        assert template.render(Chat(messages=[QUESTION])) == "hi"
        assert len(pids_of(template)) == 1


def test_the_log_says_how_often_and_why_processes_end_and_nothing_of_the_chats(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(renderers._ended, "_clock", lambda: now_s[0])
    monkeypatch.setattr(renderers._ended, "_next_s", 0.0)
    monkeypatch.setattr(renderers._ended, "_num", 0)
    growing = "{% set x = 'x' * 10000000000 %}"
    template = make("{% if messages[0].content == 'grow' %}" + growing + "{% endif %}" + STUCK_ON_REQUEST)
    with caplog.at_level(logging.WARNING, logger="engine"):
        for _ in range(2):
            with pytest.raises(RequestRejected):
                template.render(Chat(messages=[{"role": "user", "content": "grow"}]))
        monkeypatch.setattr(chat_template, "MAX_RENDERING_S", 0.3)
        now_s[0] = 10.0
        with pytest.raises(RequestRejected):
            template.render(Chat(messages=[{"role": "user", "content": "stuck"}]))
    begin = "processes that render chats ended before their time: "
    assert caplog.messages == [
        begin + "1; the last one ended with code 3: more than 512 MiB of memory were asked for",
        begin + "2; the last one was killed by signal SIGKILL: it had no answer after 0.3 s",
    ]


def test_a_process_that_is_killed_between_chats_is_replaced_unseen(make: Make) -> None:
    template = make(ALL_OF_IT)
    template.judge()
    (pid,) = pids_of(template)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert template.render(Chat(messages=[QUESTION])) == "hi"
    assert pids_of(template) != [pid]


def test_a_process_that_is_killed_over_a_chat_is_not_the_chats_fault(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = make(STUCK_ON_REQUEST)
    template.judge()
    (pid,) = pids_of(template)
    os.kill(pid, signal.SIGSTOP)  # so that it has no answer before it is killed
    ask, is_asked = renderers._Renderer.ask, threading.Event()

    def noted(renderer: renderers._Renderer, framed: bytes, timeout_s: float) -> Any:
        is_asked.set()  # it was seen alive: killed before that, another would take its place
        return ask(renderer, framed, timeout_s)

    monkeypatch.setattr(renderers._Renderer, "ask", noted)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(template.render, Chat(messages=[QUESTION]))
        assert is_asked.wait(30)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineUnavailable, match="may be sent again"):
            asked.result(30)


@pytest.mark.parametrize("cause", ["killed", "late"])
def test_a_start_without_a_process_is_tried_twice_and_is_not_the_templates_fault(
    make: Make, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    template = make(ALL_OF_IT)
    kept, num_started = template._renderers._start, [0]
    num_spoilt = 1

    def start():  # type: ignore[no-untyped-def]
        renderer = kept()
        num_started[0] += 1
        if num_started[0] <= num_spoilt:
            os.kill(renderer._process.pid, signal.SIGKILL if cause == "killed" else signal.SIGSTOP)
            monkeypatch.setattr(renderers, "_START_TIMEOUT_S", 60.0 if cause == "killed" else 0.1)
        else:
            monkeypatch.setattr(renderers, "_START_TIMEOUT_S", 60.0)
        return renderer

    monkeypatch.setattr(template._renderers, "_start", start)
    template.judge()
    assert (num_started, template.render(Chat(messages=[QUESTION]))) == ([2], "hi")
    num_spoilt = 99
    with pytest.raises(NoRenderer) as caught:
        template.judge()
    assert num_started == [4]
    assert "process" in caught.value.what
    assert "template" not in caught.value.what + caught.value.fix
    assert caught.value.exit_code != child_process.EXIT_START_FAILED, "which nobody would start again"


def test_a_process_without_a_server_ends_even_in_the_midst_of_a_chat(tmp_path: Path) -> None:
    script = f"""
import os, threading
from engine.text import chat_template
template = chat_template.ChatTemplate({{"default": {STUCK!r}}}, special_tokens={{}})
template.judge()
print(*(each._process.pid for each in template._renderers._living), flush=True)
chat_template.MAX_RENDERING_S = 60.0
threading.Timer(0.3, os._exit, (0,)).start()
template.render([{QUESTION!r}])
"""
    # In the process that renders, its own time limit is 1 s with the grace for its parent.
    (tmp_path / "sitecustomize.py").write_text(
        "import engine.text.template_messages as messages\nmessages.MAX_RENDERING_S = -4.0\n"
    )
    paths = os.pathsep.join((str(tmp_path), str(Path(__file__).parents[3])))
    found = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    pid = int(found.stdout)
    for _ in range(600):
        if not runs(pid):
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("it still runs")


def runs(pid: int) -> bool:
    """False for a process that has ended, whether somebody has taken note or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_without_a_template_chats_are_refused_by_name_and_nothing_is_started(tmp_path: Path) -> None:
    template = ChatTemplate.load(tmp_path, special_tokens={})
    template.judge()
    assert not template.is_present
    with pytest.raises(NoChatTemplate):
        template.render(Chat(messages=[QUESTION]))
    assert pids_of(template) == []


def test_the_template_file_comes_before_the_one_in_the_configuration(tmp_path: Path) -> None:
    def load() -> str:
        return ChatTemplate.load(tmp_path, special_tokens={}).source_with_tools

    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "the processor's"}))
    assert load() == "the processor's"
    config = tmp_path / "tokenizer_config.json"
    named = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "named"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert load() == "named"
    config.write_text(json.dumps({"chat_template": {"rag": "rag", "default": "named too"}}))
    assert load() == "named too"
    config.write_text(json.dumps({"chat_template": "configured"}))
    assert load() == "configured"
    (tmp_path / "chat_template.jinja").write_text("filed", encoding="utf-8")
    assert load() == "filed"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("for tools", encoding="utf-8")
    assert load() == "for tools"


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ("{% for %}", "broken at line 1"),
        ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", "nested too deeply"),
        ("x" * (MAX_TEMPLATE_BYTES + 1), "bytes"),
        ([{"name": "rag", "template": "x"}], "none named default"),
        ([1], "neither"),
        ({"default": 5}, "neither"),
        ([{"name": "default", "template": ["x"]}], "neither"),
    ],
)
def test_an_unusable_template_stops_the_start_with_a_reason(tmp_path: Path, found: Any, words: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": found}))
    with pytest.raises(TokenizerError, match=words):
        ChatTemplate.load(tmp_path, special_tokens={}).judge()


@pytest.mark.parametrize(
    "expensive", ["{{ 'a' | indent(999999999, true) }}", "{{ 9999999999 ** 9999999999 }}"]
)
def test_nothing_is_computed_before_a_chat_asks_for_it(make: Make, expensive: str) -> None:
    template = make("{% if messages[0].content != 'hi' %}" + expensive + "{% endif %}" + ALL_OF_IT)
    template.judge()
    assert template.render(Chat(messages=[QUESTION])) == "hi"


def test_the_variables_that_requests_may_set_are_known_from_the_start(make: Make) -> None:
    template = make({"default": "{{ mood }}{{ bos_token }}{{ messages }}", "tool_use": "{{ effort }}"})
    assert template.variables == frozenset()
    template.judge()
    assert template.variables == {"mood", "effort"}

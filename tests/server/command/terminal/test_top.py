"""`tokenyard top`: a view as text, refusals in one line, and no character that commands the terminal."""

import asyncio
import io
from typing import Any

import pytest
from rich.console import Console

from server.command.cli import main
from server.command.terminal import top_command
from server.command.terminal.top_screen import Recent, screen


def report(number: int, state: str = "running", **changes: Any) -> dict[str, Any]:
    facts = {"request_id": f"req_{number:032x}", "sequence_id": number, "state": state, "priority": 0}
    counts = dict.fromkeys(("num_output_tokens", "num_blocks", "num_preemptions"), 3)
    prompt = {"num_prompt_tokens": 5, "num_computed_tokens": 8, "age_s": 1.5, "wait_reason": "blocks"}
    prompt["expected_start_s"] = 2.0
    return {**facts, "tenant": "acme", **counts, **prompt, **changes}


def view(number: int, **changes: Any) -> dict[str, Any]:
    stats = dict.fromkeys(("num_swapped", "num_recomputed_tokens"), 0)
    stats |= {"num_running": 1, "num_waiting": 1, "num_used_blocks": 3, "num_blocks": 6, "num_preemptions": 1}
    step = {"time_s": 9.5, "num_tokens": 4, "num_decodes": 2, "execute_s": 0.02, "requests": []}
    step["preemptions"] = [{"sequence_id": 2, "beneficiary": 1, "num_freed_blocks": 3, "cause": "displaced"}]
    base = {"view": number, "time_s": 10.0, "policy": "priority", "max_num_seqs": 8, "stats": stats}
    lines = {"running": [report(1)], "waiting": [report(2, "waiting")], "steps": [step]}
    return {**base, **lines, **changes}


def shown(*views: dict[str, Any]) -> str:
    recent = Recent()
    for each in views:
        recent.take(each)
    console = Console(file=io.StringIO(), width=110, color_system=None)
    console.print(screen(recent, "http://h:1", max_rows=5))
    return console.file.getvalue()


def test_a_view_shows_both_lines_the_blocks_and_who_gave_way() -> None:
    text = shown(view(1))
    assert "running 1 of 8" in text
    assert "50% of 6 blocks" in text
    assert "preempted; too few free KV blocks" in text
    assert "in 2.0 s" in text
    assert "gave 3 blocks to" in text
    assert "(displaced)" in text


def test_a_tenant_cannot_move_the_cursor() -> None:
    assert "\x1b" not in shown(view(1, running=[report(1, tenant="\x1b[2J[bold]x")]))


def test_a_new_engine_begins_anew() -> None:
    assert "gave 3 blocks" not in shown(view(5), view(1, steps=[]))


def test_models_that_come_and_go_are_shown_with_how_far_they_are() -> None:
    recent = Recent()
    recent.take(view(1))
    states = {"chat": {"value": "loaded"}, "law": {"value": "loading", "progress": 0.4}}
    states["old"] = {"value": "failed", "reason": "no \x1bweights"}
    recent.models = [{"id": name, "status": status} for name, status in states.items()]
    console = Console(file=io.StringIO(), width=110, color_system=None)
    console.print(screen(recent, "http://h:1", max_rows=5))
    found = console.file.getvalue()
    assert "chat loaded   law loading 40%   old failed (no " in found
    assert "\x1b" not in found


def test_no_server_is_told_with_its_own_code(
    capsys: pytest.CaptureFixture[str], unused_tcp_port: int
) -> None:
    assert main(["top", "--base-url", f"http://127.0.0.1:{unused_tcp_port}", "--once"]) == 69
    assert "Start a server" in capsys.readouterr().err


async def test_a_model_that_is_not_loaded_has_no_view_and_once_ends_all_the_same(
    engine, url, monkeypatch, capsys
) -> None:
    async def watch():
        while True:
            yield b""
            await asyncio.sleep(0.01)

    monkeypatch.setattr(engine, "watch", watch)
    monkeypatch.setattr(top_command, "_SILENCE_S", 0.5)
    assert await asyncio.to_thread(main, ["top", "--base-url", url, "--once"]) == 1
    assert "is the model loaded?" in capsys.readouterr().err


def test_an_unknown_option_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--speed", "3"]) == 2
    assert "tokenyard top" in capsys.readouterr().err

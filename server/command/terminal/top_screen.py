"""One view of a running server as a screen of text."""

from collections import deque
from math import inf
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from server.command.terminal.client import harmless

_WINDOW_S = 2.0
_MAX_STEPS = 4096
_STRIP_STEPS = 80
_MAX_EVENTS = 4
_LEVELS = "▁▂▃▄▅▆▇█"
_BAR_WIDTH = 20
_REASONS = {
    "step": "the next step looks at it",
    "places": "all places are taken",
    "blocks": "too few free KV blocks",
    "tokens": "the step's tokens are spent",
    "preemption": "a preemption comes first",
    "adapter": "too many adapters are in use",
    "encoder": "the encoder has no room",
    "grammar": "other grammars are compiled first",
    "order": "one before it waits",
    "engine": "no engine can begin it soon",
}


class Recent:
    """The last view, and the steps and preemptions before it."""

    def __init__(self) -> None:
        self.view: dict[str, Any] = {}
        self.steps: deque[dict[str, Any]] = deque(maxlen=_MAX_STEPS)
        self.preemptions: deque[tuple[float, dict[str, Any]]] = deque(maxlen=_MAX_EVENTS)
        self.names: dict[int, str] = {}
        self.models: list[dict[str, Any]] = []
        """Models that come and go, as the server lists them."""
        self.listed_s = -inf

    def take(self, view: dict[str, Any]) -> None:
        """Take a view in; one of another engine process begins anew."""
        if self.view and view["view"] <= self.view["view"]:
            self.steps.clear()
            self.preemptions.clear()
        self.view = view
        self.steps.extend(view["steps"])
        for step in view["steps"]:
            self.names |= {number: request for number, request, _ in step["requests"]}
            self.preemptions.extend((step["time_s"], each) for each in step["preemptions"])
        live = {each["sequence_id"]: each["request_id"] for each in (*view["running"], *view["waiting"])}
        if len(self.names) > _MAX_STEPS:
            self.names = {}
        self.names |= live

    def name(self, sequence_id: int) -> str:
        name = self.names.get(sequence_id, "").removeprefix("req_")[:12]
        return harmless(name) if name else f"sequence {sequence_id}"

    def per_second(self, field: str) -> float:
        """Sum of a field of the last steps, for each second."""
        since_s = self.view["time_s"] - _WINDOW_S
        return float(sum(step[field] for step in self.steps if step["time_s"] > since_s)) / _WINDOW_S


def screen(recent: Recent, url: str, *, max_rows: int) -> RenderableType:
    """Draw the last view."""
    if not recent.view:
        return Text("The server has ended the stream.")
    lines = (_running(recent, max_rows), _waiting(recent, max_rows))
    models = (_models(recent.models),) if recent.models else ()
    return Group(_head(recent, url), *models, _strip(recent), *lines, _preemptions(recent))


def _head(recent: Recent, url: str) -> RenderableType:
    view, stats = recent.view, recent.view["stats"]
    used = stats["num_used_blocks"] / max(stats["num_blocks"], 1)
    decodes = recent.per_second("num_decodes")
    prefill = recent.per_second("num_tokens") - decodes
    filled = round(used * _BAR_WIDTH)
    head = Text.assemble(
        ("tokenyard top", "bold cyan"),
        f"  {url}  policy {view['policy']}\n",
        ("running ", "dim"),
        f"{stats['num_running']} of {view['max_num_seqs']}   ",
        ("waiting ", "dim"),
        f"{stats['num_waiting']}   ",
        ("swapped ", "dim"),
        f"{stats['num_swapped']}   ",
        ("KV ", "dim"),
        ("█" * filled, "cyan"),
        ("░" * (_BAR_WIDTH - filled), "dim"),
        f" {used:.0%} of {stats['num_blocks']:,} blocks\n",
        ("decode ", "dim"),
        f"{decodes:,.0f} tokens/s   ",
        ("prefill ", "dim"),
        f"{prefill:,.0f} tokens/s   ",
        ("busy ", "dim"),
        f"{min(recent.per_second('execute_s') / view.get('num_engines', 1), 1.0):.0%}   ",
        ("preemptions ", "dim"),
        f"{stats['num_preemptions']:,}   ",
        ("computed again ", "dim"),
        f"{stats['num_recomputed_tokens']:,} tokens",
    )
    return head


def _models(models: list[dict[str, Any]]) -> Text:
    """Say of each model how far it is loaded, or why it is not."""
    text = Text()
    for each in models:
        status = each["status"]
        state = (
            f"loading {status.get('progress') or 0.0:.0%}"
            if status["value"] == "loading"
            else status["value"]
        )
        reason = f" ({status['reason']})" if status.get("reason") else ""
        text.append(f"{harmless(each['id'])} ", style="dim").append(harmless(f"{state}{reason}   "))
    return text


def _strip(recent: Recent) -> Text:
    """The last steps: height is time, blue has prompts, green decodes only, orange preempted."""
    steps = list(recent.steps)[-_STRIP_STEPS:]
    strip = Text()
    if not steps:
        return Text("no steps yet", style="dim")
    most_s = max(max(step["execute_s"] for step in steps), 1e-6)
    for step in steps:
        has_prompts = step["num_tokens"] > step["num_decodes"]
        style = "orange1" if step["preemptions"] else "blue" if has_prompts else "green"
        level = min(int(step["execute_s"] / most_s * len(_LEVELS)), len(_LEVELS) - 1)
        strip.append(_LEVELS[level], style=style)
    strip.append(f"  to {most_s * 1000:,.1f} ms", style="dim")
    return strip


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, expand=True)
    for column in columns:
        is_number = column in ("place", "priority", "tokens", "blocks", "age", "start")
        table.add_column(column, justify="right" if is_number else "left", no_wrap=True)
    return table


def _running(recent: Recent, max_rows: int) -> RenderableType:
    rows = recent.view["running"]
    if not rows:
        return Text("Running: nothing\n", style="dim")
    most = max(row["num_blocks"] for row in rows) or 1
    table = _table("Running, in rank order", "request", "tenant", "priority", "tokens", "blocks", "")
    for row in rows[:max_rows]:
        left = row["num_prompt_tokens"] - row["num_computed_tokens"]
        tokens = f"{left:,} of the prompt left" if left > 0 else f"{row['num_output_tokens']:,}"
        bar = Text("█" * max(round(row["num_blocks"] / most * _BAR_WIDTH), 1), style="cyan")
        table.add_row(*_names(recent, row), tokens, f"{row['num_blocks']:,}", bar)
    return table


def _waiting(recent: Recent, max_rows: int) -> RenderableType:
    rows, stats = recent.view["waiting"], recent.view["stats"]
    if not rows:
        return Text("Waiting: nothing\n", style="dim")
    num = stats["num_waiting"] + stats["num_swapped"]
    table = _table(f"Waiting: {num:,}, by rank", "request", "tenant", "priority", "age", "start", "why")
    for row in rows[:max_rows]:
        why = _REASONS.get(row["wait_reason"], harmless(row["wait_reason"]))
        away = "preempted; " if row["num_preemptions"] else ""
        if row["state"] == "swapped":
            away = "swapped out; "
        table.add_row(*_names(recent, row), f"{row['age_s']:.1f} s", _start(row), Text(away + why))
    return table


def _start(row: dict[str, Any]) -> str:
    """Time until it starts, as the server expects."""
    expected_s = row["expected_start_s"]
    return "" if expected_s is None else f"in {expected_s:.1f} s"


def _names(recent: Recent, row: dict[str, Any]) -> tuple[Text, Text, str]:
    return Text(recent.name(row["sequence_id"])), Text(harmless(row["tenant"])), str(row["priority"])


def _preemptions(recent: Recent) -> Text:
    text = Text()
    for time_s, each in reversed(recent.preemptions):
        ago_s = recent.view["time_s"] - time_s
        text.append(f"{ago_s:6.1f} s ago  ", style="dim")
        victim, beneficiary = recent.name(each["sequence_id"]), recent.name(each["beneficiary"])
        whom = "itself" if each["sequence_id"] == each["beneficiary"] else beneficiary
        text.append(f"{victim} gave {each['num_freed_blocks']} blocks to {whom} ({each['cause']})\n")
    return text

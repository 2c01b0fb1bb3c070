"""Anthropic's own tools: those that the caller runs as functions, and those of others' work.

Owns: the parameters that Anthropic publishes for each kind; a model of another family is shown them.
Source: Anthropic's references of the bash, text editor, memory and computer use tools.
"""

from typing import Any, Final

_TEXT, _WHOLE = {"type": "string"}, {"type": "integer"}
_POINT: Final = {"type": "array", "items": _WHOLE, "minItems": 2, "maxItems": 2}
_FILE_FIELDS: Final = {
    "path": _TEXT,
    "view_range": _POINT,
    "file_text": _TEXT,
    "old_str": _TEXT,
    "new_str": _TEXT,
    "insert_line": _WHOLE,
    "insert_text": _TEXT,
}
_FILE_COMMANDS: Final = ("view", "create", "str_replace", "insert")
_ACTIONS: Final = (
    *("key", "type", "mouse_move", "left_click", "left_click_drag", "right_click", "middle_click"),
    *("double_click", "triple_click", "left_mouse_down", "left_mouse_up", "screenshot", "cursor_position"),
    *("scroll", "hold_key", "wait", "zoom"),
)


def _parameters(required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [required]}


_RUN_BY_THE_CALLER: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "bash_": (
        "Run a command in a shell that keeps its state; restart begins a new one.",
        {"type": "object", "properties": {"command": _TEXT, "restart": {"type": "boolean"}}},
    ),
    "text_editor_": (
        "View, create and edit text files.",
        _parameters("command", command={"enum": [*_FILE_COMMANDS, "undo_edit"]}, **_FILE_FIELDS),
    ),
    "memory_": (
        "Keep notes in files below /memories. Look there before a task, and write down what may be needed.",
        _parameters(
            "command",
            command={"enum": [*_FILE_COMMANDS, "delete", "rename"]},
            **_FILE_FIELDS,
            old_path=_TEXT,
            new_path=_TEXT,
        ),
    ),
    "computer_": (
        "Use the screen, the mouse and the keyboard of a computer.",
        _parameters(
            "action",
            action={"enum": list(_ACTIONS)},
            coordinate=_POINT,
            start_coordinate=_POINT,
            text=_TEXT,
            scroll_direction={"enum": ["up", "down", "left", "right"]},
            scroll_amount=_WHOLE,
            duration={"type": "number"},
            region={"type": "array", "items": _WHOLE, "minItems": 4, "maxItems": 4},
        ),
    ),
}
"""Description and parameters, by the beginning of the type, behind which a date stands."""
_RUN_BY_OTHERS: Final = (
    *("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "advisor_", "mcp_toolset"),
)


def described(kind: str) -> dict[str, Any] | None:
    """Description and parameters of a tool that the caller runs; None for any other type."""
    for beginning, (description, parameters) in _RUN_BY_THE_CALLER.items():
        if kind.startswith(beginning):
            return {"description": description, "parameters": parameters}
    return None


def is_run_by_others(kind: str) -> bool:
    """True for a tool that Anthropic would run."""
    return kind.startswith(_RUN_BY_OTHERS)


def is_others_work(kind: str) -> bool:
    """True for a block of such a tool, and for thoughts that only their author can read."""
    is_result = kind.endswith("_tool_result")
    return is_result or kind in ("server_tool_use", "mcp_tool_use", "redacted_thinking")

"""Marks of reasoning, by name or by model: a row of the table for each family of marks.

Owns: the names of --reasoning-parser, the marks that must be in the text, and the guess of `auto`.
Never: finds the marks in a text (reasoning.py, harmony.py).
Source: the chat templates of DeepSeek R1, Qwen 3, Magistral, Seed-OSS, Gemma 4 and gpt-oss, which name them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from engine.types import ModelInfo
from server.chat import harmony
from server.chat.harmony import HarmonySplitter
from server.chat.reasoning import ReasoningSplitter, ReasoningStart, Splitter


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningStyle:
    """One way to tell reasoning and answer apart."""

    name: str
    begin: str
    end: str
    marks: tuple[str, ...] = ()
    """Special tokens that the splitter must see in the text."""
    answer: str = ""
    """Text that an answer without reasoning begins with, if it needs one."""
    sign: str
    """Text of chat templates or added token by which `auto` finds it."""
    new_splitter: Callable[[ReasoningStart], Splitter]


def _block(name: str, begin: str, end: str, *, begin_token: str = "") -> ReasoningStyle:
    """A block at the beginning of the reply. Its first mark may be a token and a word."""
    return ReasoningStyle(
        name=name,
        begin=begin,
        end=end,
        marks=(begin_token or begin, end),
        sign=end,
        new_splitter=lambda start: ReasoningSplitter(start, begin=begin, end=end),
    )


THINK = _block("think", "<think>", "</think>")
STYLES = (
    THINK,
    _block("mistral", "[THINK]", "[/THINK]"),
    _block("seed_oss", "<seed:think>", "</seed:think>"),
    _block("gemma4", "<|channel>thought", "<channel|>", begin_token="<|channel>"),
    ReasoningStyle(
        name="harmony",
        begin=f"{harmony.CHANNEL}analysis{harmony.MESSAGE}",
        end=harmony.END,
        marks=harmony.MARKS,
        answer=f"{harmony.CHANNEL}final{harmony.MESSAGE}",
        sign=harmony.CHANNEL,
        new_splitter=HarmonySplitter,
    ),
)
_BY_NAME = {style.name: style for style in STYLES}


def find_style(option: str, info: ModelInfo) -> ReasoningStyle | None:
    """Resolve --reasoning-parser. None: all that this model writes is the answer."""
    if option != "auto":
        return _BY_NAME.get(option)
    signs = (info.chat_template, info.added_tokens)
    return next((style for style in STYLES if any(style.sign in place for place in signs)), None)

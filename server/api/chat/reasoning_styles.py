"""Marks of reasoning, by name or by model: a row of the table for each family of marks.

Owns: the names of --reasoning-parser, the marks that must be in the text, the guess of `auto`, and the row
that a checkpoint's response template makes.
Never: finds the marks in a text (reasoning.py, harmony.py, response_templates/).
Source: the chat templates of DeepSeek R1, Qwen 3, Magistral, Seed-OSS, Gemma 4 and gpt-oss, which name them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.types import ModelInfo
from server.api.chat import harmony
from server.api.chat.harmony import HarmonySplitter
from server.api.chat.reasoning import Phase, Pieces, ReasoningSplitter, ReasoningStart, Splitter
from server.reply.response_templates.template import ResponseTemplate, Role
from server.reply.response_templates.template_reader import TemplateReader


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


def style_of(template: ResponseTemplate) -> ReasoningStyle | None:
    """Return the row that a template makes; None if it has no reasoning between two fixed texts.

    Replies to a grammar are read by it: there the block is opened in the prompt, and all else is the answer.
    """
    field, content = template.field_of(Role.REASONING), template.field_of(Role.CONTENT)
    if field is None or field.opening is None or field.closing is None:
        return None
    if not field.opening.literals or not field.closing.literals:
        return None
    answer = content.opening.literals[:1] if content is not None and content.opening is not None else ()
    row = _block("template", field.opening.literals[0].strip(), field.closing.literals[0].strip())
    return replace(row, answer="".join(answer))


class TemplateSplitter(Splitter):
    """The reader of a response template, in the place of a row's. It reads calls too."""

    def __init__(self, reader: TemplateReader) -> None:
        super().__init__(ReasoningStart.POSSIBLE)
        self._reader = reader
        self._note()

    @property
    def is_inside_call(self) -> bool:
        return self._reader.is_inside_call

    def feed(self, text: str) -> Sequence[Pieces]:
        events = self._reader.feed(text)
        self._note()
        return events

    def finish(self) -> Sequence[Pieces]:
        return self._reader.finish(is_cut_off=self.is_cut_off)

    def _note(self) -> None:
        reader = self._reader
        self.has_block = reader.has_reasoned
        if reader.is_reasoning:
            self.phase = Phase.REASONING
        elif reader.has_reasoned or reader.has_answered or reader.is_inside_call:
            self.phase = Phase.ANSWER

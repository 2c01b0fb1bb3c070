"""The byte-level BPE tokenizer and the chat template.

Owns: vocabulary, special tokens, template, and how a document becomes ids and labels.
Never: what documents say.
"""

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from documents import Chat, Document, documents
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 2560
BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
SPECIALS = (BEGIN, END, PAD, "<|system|>", "<|user|>", "<|assistant|>")
IGNORED_LABEL = -100

# A digit is a token of its own (with the space before it), so that 37 and 73 are made of the same parts.
_SPLIT = r"""'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message['role'] not in ['system', 'user', 'assistant'] -%}
        {{- raise_exception("unknown role '" ~ message['role'] ~ "': use system, user or assistant") -}}
    {%- endif -%}
    {{- '<|' ~ message['role'] ~ '|>' ~ (message['content'] or '') | trim ~ eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}
"""


@dataclass(frozen=True, slots=True)
class Example:
    """Ids and labels of one document, equally long; a label is the id itself or IGNORED_LABEL."""

    token_ids: list[int]
    labels: list[int]


def train_tokenizer(*, seed: int, num_documents: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    source = islice(documents(seed, excluded=frozenset()), num_documents)
    tokenizer.train_from_iterator((_text_of(document) for document in source), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    return tokenizer


def _text_of(document: Document) -> str:
    if isinstance(document, Chat):
        return "\n".join((document.system, *(f"{turn.user}\n{turn.assistant}" for turn in document.turns)))
    return document.text


class Encoder:
    """Turns documents into examples, in the very layout of CHAT_TEMPLATE."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {name: special_id(tokenizer, name) for name in SPECIALS}
        self.pad_id = self._special[PAD]

    def encode(self, document: Document) -> Example:
        """Learn every token of a plain text, but only the assistant's side of a chat."""
        if not isinstance(document, Chat):
            body = [*self._ids(document.text), self._special[END]]
            return Example([self._special[BEGIN], *body], [IGNORED_LABEL, *body])
        token_ids, labels = [self._special[BEGIN]], [IGNORED_LABEL]
        parts = [("<|system|>", document.system)] if document.system else []
        for turn in document.turns:
            parts += [("<|user|>", turn.user), ("<|assistant|>", turn.assistant)]
        for role, text in parts:
            body = [*self._ids(text.strip()), self._special[END]]
            token_ids += [self._special[role], *body]
            labels += [IGNORED_LABEL, *(body if role == "<|assistant|>" else [IGNORED_LABEL] * len(body))]
        return Example(token_ids, labels)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def special_id(tokenizer: Tokenizer, name: str) -> int:
    found = tokenizer.token_to_id(name)
    assert found is not None, name
    return found


def save_tokenizer(tokenizer: Tokenizer, folder: Path, *, max_length: int) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

"""Replies that must match a schema, a regular expression, a list of choices or a grammar.

Owns: the fields that ask for it, with their bounds, and the grammar of each.
Never: compiles a grammar (the engine does, in a process that can be stopped), or reads a reply.
Source: `response_format` as OpenAI documents it, `structured_outputs` as vLLM does. JSON Schema 2020-12,
Validation, section 7: a format that is not defined there is an annotation. Schemas are full of them:
OpenAPI's int32, binary and password, and Pydantic's path.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints

from engine.errors import RequestRejected
from engine.types import Grammar, GrammarKind
from server.edge.refusals import required
from server.edge.wire_model import WireModel, wrong_shape

MAX_GRAMMAR_BYTES = 64 * 1024
"""Size of a schema as compact JSON, of a grammar, or of all choices together."""
MAX_SCHEMA_KEYS = 4096
MAX_REGEX_CHARS = 4096
MAX_CHOICES = 1024
MAX_CHOICE_CHARS = 1024
MAX_DESCRIPTION_CHARS = 1024

_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_ANY_OBJECT = {"type": "object"}
_KNOWN_FORMATS = frozenset(
    {
        *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname"),
        *("ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template"),
        *("json-pointer", "relative-json-pointer", "regex"),
    }
)
_OF_SCHEMAS_BY_NAME = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
"""Keywords whose keys are the caller's names, which may be `format`."""
_TREE_MARKS = re.compile(r"(?m)^[ \t]*[?!]{1,2}(?=_?[a-z][a-z0-9_]*[ \t]*(?:\.[0-9]+[ \t]*)?:)")
"""Marks before the name of a Lark rule, which shape the tree of a text and not the text."""
_OF_VALUES = frozenset({"const", "enum", "default", "examples"})


def _fitting(content: Any) -> Any:
    num_bytes = len(orjson.dumps(content))
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise wrong_shape(f"must be at most {MAX_GRAMMAR_BYTES} bytes of JSON, not {num_bytes}")
    return content


def _of_known_kinds(value: Any) -> Any:
    """Refuse keys, unless off, that change the grammar in other servers (vLLM's structural_tag, say)."""
    for name in value if isinstance(value, dict) else ():
        if name not in _KINDS and value[name] not in (None, False):
            raise wrong_shape(f"has {name[:64]!r}; only {', '.join(_KINDS)} are supported")
    return value


def _as_object(value: Any) -> Any:
    """Parse a schema that is sent as a string of JSON, which vLLM takes too."""
    if not isinstance(value, str):
        return value
    try:
        schema = orjson.loads(value)
        orjson.dumps(schema)  # which refuses deep nesting
    except (orjson.JSONDecodeError, orjson.JSONEncodeError) as error:
        raise wrong_shape(f"is no JSON: {error}") from None
    return schema


Schema = Annotated[dict[str, Any], Field(max_length=MAX_SCHEMA_KEYS), AfterValidator(_fitting)]
_Choice = Annotated[str, StringConstraints(min_length=1, max_length=MAX_CHOICE_CHARS)]


class JsonSchema(WireModel):
    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$", max_length=64)] | None = None
    """Without effect. OpenAI requires it; clients of other servers leave it out."""
    schema_: Schema = Field(alias="schema")
    strict: bool | None = None
    """Without effect: every reply matches, and a schema that cannot be enforced is refused."""
    description: Annotated[str, StringConstraints(max_length=MAX_DESCRIPTION_CHARS)] | None = None
    """For readers of the request; the model is not shown it."""


class ResponseFormat(WireModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Schema | None = Field(default=None, alias="schema")
    """With type json_object: llama.cpp's form of a schema."""


class StructuredOutputs(WireModel):
    """Exactly one of them."""

    json_: Annotated[Schema | None, BeforeValidator(_as_object)] = Field(default=None, alias="json")
    regex: Annotated[str, StringConstraints(min_length=1, max_length=MAX_REGEX_CHARS)] | None = None
    choice: (
        Annotated[
            list[_Choice],
            Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True),
            AfterValidator(_fitting),
        ]
        | None
    ) = None
    grammar: Annotated[str, StringConstraints(min_length=1, max_length=MAX_GRAMMAR_BYTES)] | None = None
    """Lark, or GBNF."""
    json_object: bool | None = None


StructuredOutputsField = Annotated[StructuredOutputs, BeforeValidator(_of_known_kinds)]


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedGrammar:
    """A grammar that is not compiled yet."""

    grammar: Grammar
    param: str
    """The field that it came in."""
    parts: Callable[[], Sequence[tuple[str, Grammar]]] = tuple
    """Makes the grammars of further fields in it, which are tried where the whole is refused, to name one."""
    answer: dict[str, Any] | None = None
    """Its schema, if the reply may be calls of tools instead; None: it may not."""


def wanted_grammar(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> WantedGrammar | None:
    """The grammar that the fields ask for; None if the reply is free. Raises RequestRejected."""
    by_format = None if response_format is None else _of_response_format(response_format)
    if structured_outputs is None:
        return by_format
    if by_format is not None:
        raise RequestRejected(
            "response_format and structured_outputs exclude each other", param="structured_outputs"
        )
    return _of_structured_outputs(structured_outputs)


def json_schema_grammar(schema: dict[str, Any]) -> Grammar:
    """JSON that matches `schema`, its keys in the order in which the schema lists them."""
    text = orjson.dumps(without_unknown_formats(schema)).decode()
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=text)


def choice_grammar(choices: Sequence[str]) -> Grammar:
    """Make a grammar of exactly these texts."""
    # Lark's strings are written as JSON's are, but know no surrogate pairs.
    texts = (json.dumps(choice, ensure_ascii=False) for choice in choices)
    return Grammar(kind=GrammarKind.LARK, text="start: " + " | ".join(texts))


def _of_response_format(wanted: ResponseFormat) -> WantedGrammar | None:
    described = wanted.json_schema
    for name, value, kind in (
        ("json_schema", described, "json_schema"),
        ("schema", wanted.schema_, "json_object"),
    ):
        if value is not None and wanted.type != kind:
            param = f"response_format.{name}"
            raise RequestRejected(f"{param} is allowed only with type {kind}, not {wanted.type}", param=param)
    if wanted.type == "text":
        return None
    param, schema = "response_format", _ANY_OBJECT
    if wanted.schema_ is not None:
        param, schema = "response_format.schema", wanted.schema_
    if wanted.type == "json_schema":
        param = "response_format.json_schema"
        schema, param = required(described, param).schema_, f"{param}.schema"
    answer = without_unknown_formats(schema)
    return WantedGrammar(grammar=json_schema_grammar(answer), param=param, answer=answer)


def _of_structured_outputs(wanted: StructuredOutputs) -> WantedGrammar:
    grammars: dict[str, Grammar] = {}
    if wanted.json_ is not None:
        grammars["json"] = json_schema_grammar(wanted.json_)
    if wanted.regex is not None:
        grammars["regex"] = Grammar(kind=GrammarKind.REGEX, text=wanted.regex)
    if wanted.choice is not None:
        grammars["choice"] = choice_grammar(wanted.choice)
    if wanted.grammar is not None:
        grammars["grammar"] = Grammar(kind=GrammarKind.LARK, text=_TREE_MARKS.sub("", wanted.grammar))
    if wanted.json_object:
        grammars["json_object"] = json_schema_grammar(_ANY_OBJECT)
    if len(grammars) != 1:
        found = ", ".join(grammars) or "none of them"
        raise RequestRejected(
            f"structured_outputs must have exactly one of {', '.join(_KINDS)}; it has {found}",
            param="structured_outputs",
        )
    ((name, grammar),) = grammars.items()
    return WantedGrammar(grammar=grammar, param=f"structured_outputs.{name}")


def without_unknown_formats(schema: Any) -> Any:
    """Copy a schema without the formats that JSON Schema does not know; the compiler judges the others."""
    if isinstance(schema, list):
        return [without_unknown_formats(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _entry(key, value)
        for key, value in schema.items()
        if key != "format" or not isinstance(value, str) or value in _KNOWN_FORMATS
    }


def _entry(key: str, value: Any) -> Any:
    if key in _OF_VALUES:
        return value
    if key in _OF_SCHEMAS_BY_NAME and isinstance(value, dict):
        return {name: without_unknown_formats(schema) for name, schema in value.items()}
    return without_unknown_formats(value)

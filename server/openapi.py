"""The document at /openapi.json: the parameters and replies of each route, errors and streams included.

Owns: the assembly: schemas of bodies, replies and events, which FastAPI does not see, and the need of a key.
"""

import ast
import inspect
import json
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from server.edge.http.endpoint import MODEL_REFERENCE, Endpoint, ReplyList, ReplyModel
from server.edge.wire_model import WireModel

_REFERENCE = re.compile(MODEL_REFERENCE.format(model=r"(\w+)"))


def document(
    app: FastAPI, endpoints: Sequence[Endpoint], *, without_key: Iterable[str] | None
) -> dict[str, Any]:
    """Build the whole document; the application keeps it. `without_key`: None if no path needs a key."""
    page = get_openapi(
        title=app.title,
        version=app.version,
        summary=app.summary,
        description=app.description,
        routes=app.routes,
    )
    schemas = page.setdefault("components", {}).setdefault("schemas", {})
    refusals = {model: names for each in endpoints for model, names in each.requests.items()}
    events = [event for each in endpoints for event in each.events]
    schemas |= _schemas(refusals, [*events, *_replies_in(page)])
    _describe_fields(schemas)
    for model, names in refusals.items():
        _name_refusals(schemas[model.__name__], names)
    if without_key is not None:
        page["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        page["security"] = [{"key": []}]
        for path in without_key:
            for operation in page["paths"][path].values():
                operation["security"] = []
    return page


def _replies_in(page: Mapping[str, Any]) -> list[type[BaseModel]]:
    """Models that the page refers to. A test checks that their names differ."""
    named = set(_REFERENCE.findall(json.dumps(page)))
    return [model for model in _subclasses(ReplyModel, ReplyList) if model.__name__ in named]


def _schemas(requests: Iterable[type[BaseModel]], replies: Iterable[type[BaseModel]]) -> dict[str, Any]:
    _, definitions = models_json_schema(
        [*((model, "validation") for model in requests), *((reply, "serialization") for reply in replies)],
        ref_template=MODEL_REFERENCE,
    )
    found: dict[str, Any] = definitions["$defs"]
    return found


def _describe_fields(schemas: dict[str, Any]) -> None:
    """Give each field the text that stands below it in its class.

    Here, when the document is first asked for: pydantic would read all sources at every start.
    """
    for model in _subclasses(WireModel, ReplyModel):
        described = schemas.get(model.__name__, {}).get("properties", {})
        for each in model.__mro__:
            for name, text in _field_texts(each.__module__).get(each.__qualname__, {}).items():
                if name in described:
                    described[name].setdefault("description", text)


def _subclasses(*models: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for model in models:
        yield model
        yield from _subclasses(*model.__subclasses__())


@cache
def _field_texts(module: str) -> dict[str, dict[str, str]]:
    """Texts below the fields of each class of a module of ours."""
    if not module.startswith("server."):
        return {}
    classes = ast.parse(inspect.getsource(sys.modules[module])).body
    return {each.name: dict(_texts_below(each.body)) for each in classes if isinstance(each, ast.ClassDef)}


def _texts_below(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, below in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match below:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield field.target.id, inspect.cleandoc(text)


def _name_refusals(schema: dict[str, Any], names: Collection[str]) -> None:
    if names:
        listed = ", ".join(f"`{name}`" for name in sorted(names))
        schema["description"] += (
            f"\n\nRefused by name, unless set to a value that asks for nothing: {listed}."
            " Other unknown fields are ignored."
        )

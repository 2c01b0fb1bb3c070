"""The base class of all JSON objects from outside, and what their validators share."""

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


class WireModel(BaseModel):
    """A JSON object from outside: no type is coerced, unknown keys are counted elsewhere."""

    # Built by the first body: few servers are asked at all endpoints, and a start is not kept waiting.
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True, defer_build=True)


def shown_as(**body: Any) -> ConfigDict:
    """The configuration of a model whose document has this example of it."""
    return ConfigDict(json_schema_extra={"examples": [body]})


def wrong_shape(message: str) -> PydanticCustomError:
    """An error for a validator to raise; clients read the message behind the name of the field."""
    return PydanticCustomError("wrong_shape", "{reason}", {"reason": message})


def text_or_list(
    noun: str, of_text: Callable[[str], dict[str, str]], is_left_out: Callable[[str], bool] = lambda _: False
) -> Callable[[Any], Any]:
    """Make a validator that takes a list, or a text in place of its only item, which `of_text` makes.

    Items of a type that is left out have fields of their own: only the type stays, whatever these hold.
    """

    def bare(item: Any) -> Any:
        kind = item.get("type") if isinstance(item, dict) else None
        return {"type": kind[:64]} if isinstance(kind, str) and is_left_out(kind) else item

    def as_list(value: Any) -> Any:
        if isinstance(value, str):
            return [of_text(value)]
        if isinstance(value, list):
            return list(map(bare, value))
        raise wrong_shape(f"must be a string or a list of {noun}")

    return as_list

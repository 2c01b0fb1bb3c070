"""The base class of all JSON objects from outside."""

from typing import Any

from pydantic import BaseModel, ConfigDict


class WireModel(BaseModel):
    """A JSON object from outside: no type is coerced, unknown keys are counted elsewhere."""

    # Built by the first body: few servers are asked at all endpoints, and a start is not kept waiting.
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True, defer_build=True)


def shown_as(**body: Any) -> ConfigDict:
    """The configuration of a model whose document has this example of it."""
    return ConfigDict(json_schema_extra={"examples": [body]})

"""The base class of all JSON objects from outside."""

from pydantic import BaseModel, ConfigDict


class WireModel(BaseModel):
    """A JSON object from outside: no type is coerced, unknown keys are counted elsewhere."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)

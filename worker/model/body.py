"""The body of a model: all but its head."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

TEXT_PARTS = ("language_model", "text_model")
"""Names of the part for text in the body of a model that reads pictures."""
_BESIDE = "whole_body"
"""The attribute that holds a whole body which is not in the place of the model's own."""


@dataclass(slots=True)
class WholeOutputs:
    """Outputs of a whole body, with what heads ask for.

    A ModelOutput of transformers takes longer than a norm. Shapes: T tokens, H numbers of a hidden state.
    """

    last_hidden_state: Tensor
    """[1, T, H], behind the last norm."""
    hidden_TH: Tensor
    """The same numbers."""
    tapped: tuple[Tensor, ...] = ()
    """See tap_layers."""
    past_key_values: None = None
    cache: None = None
    hidden_states: None = None
    attentions: None = None


class WholeBody(Protocol):
    """A body that computes all layers by one call, in the place of the model's own."""

    plain_head: tuple[nn.Module, ...]
    """The output layer, where logits are exactly its outputs. Empty: they come of the model's own
    forward."""

    def tap(self, places: Sequence[int]) -> None:
        """Let outputs have the hidden states before these layers, too; see tap_layers."""

    def __call__(self, **arguments: Tensor) -> WholeOutputs:
        """Compute the arguments of StepTokens in the step of the active executor."""


def body_name(model: Any) -> str:
    """Return the name that the body, or its part for text, has in a model; "model" in one that is a body."""
    # Llama 4's text model keeps the prefix of the whole, which has no such part.
    name = str(model.base_model_prefix)
    name = name if hasattr(model, name) else "model"
    parts = [part for part in TEXT_PARTS if hasattr(getattr(model, name, None), part)]
    return f"{name}.{parts[0]}" if parts else name


def put_whole_body(model: Any, body: nn.Module) -> None:
    """Put a whole body in the place of the model's own.

    Of a model that is a body, or reads pictures, it is put next to the layers: they may be called one by one.
    """
    name = body_name(model)
    setattr(model, name if hasattr(model, name) else _BESIDE, body)


def whole_body_of(model: Any) -> WholeBody | None:
    """Return the body that computes all layers by one call, if the model has one."""
    for name in (body_name(model), _BESIDE):
        body = getattr(model, name, None)
        if hasattr(body, "plain_head"):
            return cast("WholeBody", body)
    return None


def tap_layers(model: Any, places: Sequence[int]) -> None:
    """Let outputs of a model's body have the hidden states [T, H] before some layers, as `tapped`."""
    if not places:
        return
    whole_body = whole_body_of(model)
    if whole_body is not None:
        whole_body.tap(places)
        return
    body = model.get_submodule(body_name(model))
    tapped: list[Tensor] = []

    def before(_: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        hidden_1TH = args[0] if args else options["hidden_states"]
        tapped.append(hidden_1TH[0].clone())  # fused layers change it

    def behind(_: Any, __: Any, outputs: Any) -> None:
        outputs.tapped = tuple(tapped[-len(places) :])
        tapped.clear()

    for place in places:
        body.layers[place].register_forward_pre_hook(before, with_kwargs=True)
    body.register_forward_hook(behind)


class _GivenOutputs(nn.Module):
    def __init__(self, body: Any, outputs: Any) -> None:
        super().__init__()
        self._outputs, self._bodies = outputs, (body,)

    def __getattr__(self, name: str) -> Any:
        """Give what the whole asks of its part for text."""
        return getattr(self.__dict__["_bodies"][0], name)

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._outputs


@contextmanager
def body_gives(model: Any, outputs: Any) -> Iterator[None]:
    """Let the model's own forward take `outputs` for its body's.

    The body is replaced for that: a hook can change a module's outputs, but not skip its forward, which would
    compute the tokens again and write their keys and values.
    """
    name = body_name(model)
    body = model.get_submodule(name)
    if "." in name:  # the whole adds to outputs of transformers' own kind
        outputs = BaseModelOutputWithPast(last_hidden_state=outputs.last_hidden_state)
    model.set_submodule(name, _GivenOutputs(body, outputs))
    try:
        yield
    finally:
        model.set_submodule(name, body)

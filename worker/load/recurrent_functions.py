"""The functions of recurrent layers that transformers' models call by name, replaced by ours.

Owns: the table of names, and the translation of each function's arguments into the one form of worker/states.
Never: computes, or changes a module: without a step of ours under way the family's own function is called.

Each modeling file of transformers has its own copy of these functions, under the names of their kernels. A
version that renames one has no replacement here; the self check then refuses the family.

Shapes: T tokens, C channels, H heads, G groups of heads, K numbers of a key, V numbers of a value.
"""

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from worker.attention.interface import note_layer_begun, states_of_step
from worker.states.interface import Convolution, Recurrence, StateExecutor
from worker.worker_errors import UnsupportedAttention

_Arguments = dict[str, Any]


def knows_recurrence(model_config: Any) -> bool:
    """Tell whether the modeling file of the family's text part has functions that are replaced."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model_config.get_text_config(decoder=True)), None)
    return model_class is not None and bool(_names_in(sys.modules[model_class.__module__]))


def replace_functions(model: nn.Module) -> None:
    """Lead the recurrent layers of a model to the step that is under way. Call it once for each model."""
    for mixer in model.modules():
        has_place = isinstance(getattr(mixer, "layer_idx", None), int)
        if not (has_place and any(isinstance(child, nn.Conv1d) for child in mixer.children())):
            continue
        module = sys.modules[type(mixer).__module__]
        names = _names_in(module)
        for name in names:
            _replace(module, name)
        if names:
            mixer.register_forward_pre_hook(_begin_layer)


def _names_in(module: ModuleType) -> list[str]:
    return [name for name in _FUNCTIONS if hasattr(module, name)]


def _begin_layer(mixer: Any, _arguments: object) -> None:
    states = states_of_step()
    if states is not None:
        note_layer_begun()
        states.begin_layer(mixer.layer_idx)


def _replace(module: ModuleType, name: str) -> None:
    """Replace a function of a modeling file, unless another model's load has done it."""
    original = getattr(module, name)
    if hasattr(original, _MARK):
        return
    translate = _FUNCTIONS[name]
    # Not by a bound signature: that takes longer than the kernels of a decode.
    parameters = inspect.signature(original).parameters.items()
    defaults = {key: each.default for key, each in parameters if each.kind is not each.VAR_KEYWORD}

    @wraps(original)
    def of_step(*args: Any, **kwargs: Any) -> Any:
        states = states_of_step()
        if states is None:
            return original(*args, **kwargs)
        found = translate(states, {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs})
        return original(*args, **kwargs) if found is None else found

    setattr(of_step, _MARK, True)
    setattr(module, name, of_step)


_MARK = "_replaced_by_tokenyard"


def _convolve(states: StateExecutor, given: _Arguments) -> Tensor | None:
    given_TC = given["hidden_states"][0].transpose(0, 1)
    out_TC = states.convolve(Convolution(given_TC, given["weight"], given["bias"], given["activation"]))
    return None if out_TC is None else out_TC.transpose(0, 1).unsqueeze(0)


def _delta_rule(states: StateExecutor, given: _Arguments) -> tuple[Tensor, None] | None:
    query_1TGK, key_dim = given["query"], given["key"].shape[-1]
    out_THV = states.recur(
        Recurrence(
            query_TGK=query_1TGK[0],
            key_TGK=given["key"][0],
            value_THV=given["value"][0],
            log_decay=given["g"][0].float(),
            beta_TH=given["beta"][0],
            has_unit_keys=given["use_qk_l2norm_in_kernel"],
            scaling=key_dim**-0.5,
        )
    )
    return None if out_THV is None else (out_THV.to(query_1TGK.dtype).unsqueeze(0), None)


def _scan(states: StateExecutor, given: _Arguments) -> Tensor | tuple[Tensor, None] | None:
    """Translate Mamba 2: of a head, the state decays as a whole."""
    _refuse_gate(given.get("z"))
    value_THV = given["hidden_states"][0].float()
    step_TH = _step_sizes(given["dt"][0], given["dt_bias"], given["dt_softplus"]).clamp(*given["dt_limit"])
    step_TH = step_TH.float()
    out_THV = states.recur(
        Recurrence(
            query_TGK=given["C"][0],
            key_TGK=given["B"][0],
            value_THV=value_THV * step_TH[..., None],
            log_decay=given["A"].float() * step_TH,
            beta_TH=None,
            has_unit_keys=False,
            scaling=1.0,
        )
    )
    if out_THV is None:
        return None
    if given["D"] is not None:
        out_THV = out_THV + given["D"][:, None] * value_THV
    out_1THV = out_THV.unsqueeze(0)
    return (out_1THV, None) if given["return_final_states"] else out_1THV


def _selective_scan(states: StateExecutor, given: _Arguments) -> Tensor | tuple[Tensor, None] | None:
    """Translate Mamba 1: each channel is a head of one value, whose numbers decay by themselves."""
    input_TC = given["hidden_states"][0].transpose(0, 1)
    bias_C = given["delta_bias"]
    step_TC = _step_sizes(given["dt"][0].transpose(0, 1), bias_C, given["delta_softplus"]).float()
    out_TC1 = states.recur(
        Recurrence(
            query_TGK=given["C"][0].transpose(0, 1).unsqueeze(1),
            key_TGK=given["B"][0].transpose(0, 1).unsqueeze(1),
            value_THV=(step_TC * input_TC.float()).unsqueeze(-1),
            log_decay=step_TC[..., None] * given["A"].float(),
            beta_TH=None,
            has_unit_keys=False,
            scaling=1.0,
        )
    )
    if out_TC1 is None:
        return None
    out_TC = out_TC1.squeeze(-1)
    if given["D"] is not None:
        out_TC = out_TC + input_TC * given["D"]
    if given["z"] is not None:
        out_TC = out_TC * functional.silu(given["z"][0].transpose(0, 1))
    out_1CT = out_TC.transpose(0, 1).unsqueeze(0)
    return (out_1CT, None) if given["return_last_state"] else out_1CT


def _step_sizes(given: Tensor, bias: Tensor | None, is_softplus: bool) -> Tensor:  # noqa: FBT001 (transformers')
    sizes = given if bias is None else given + bias.to(given.dtype)
    return functional.softplus(sizes) if is_softplus else sizes


def _refuse_gate(gate: Tensor | None) -> None:
    if gate is not None:
        raise UnsupportedAttention("a recurrence with a gate in it")


_FUNCTIONS: dict[str, Callable[[StateExecutor, _Arguments], Any]] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _scan,
    "mamba_selective_scan": _selective_scan,
}
"""Names in transformers' modeling files. A model without a cache calls no others."""

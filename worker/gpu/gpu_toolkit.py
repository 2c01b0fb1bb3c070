"""The GPU's kernels as surgery uses them: a Toolkit.

Owns: the formats that they take, and the error for a kernel that Triton cannot compile.
Never: decides which layers are replaced (surgery.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from triton import TritonError

from worker.attention.kv_cache import KVCache
from worker.devices.device import Device
from worker.gpu.gpu_attention import DEFAULT_BACKEND, PagedAttention, choose_attention
from worker.gpu.gpu_products import TAKEN
from worker.gpu.kernels.expert_products import route
from worker.gpu.trials.skinny import choose_products
from worker.gpu.trials.triton_frame import replace_frame
from worker.gpu.triton_experts import TritonExperts
from worker.gpu.triton_layer import TritonLayer
from worker.gpu_quantized.code_experts import CodeExperts
from worker.gpu_quantized.code_modules import replace_code_modules
from worker.gpu_quantized.code_proof import prove_products
from worker.gpu_quantized.float8_products import with_float8_rows
from worker.model.layer_call import LayerCall
from worker.model.layer_parts import LayerParts
from worker.model.linear import Linear
from worker.model.mixture import ExpertLinears, Experts, ReplacedExperts, replace_experts
from worker.model.quantization import NO_ROUNDING, Rounding
from worker.ranks.ranks import Ranks
from worker.worker_errors import StartupError


class GpuToolkit:
    """See Toolkit."""

    name, device_kind, option = "Triton", "GPU", "--gpu-kernels"
    runs_ahead = True
    weights = TAKEN

    def __init__(
        self,
        device: Device,
        attention_backend: str = DEFAULT_BACKEND,
        *,
        rounding: Rounding = NO_ROUNDING,
        max_adapters: int = 0,
    ) -> None:
        self._device, self._rounding, self._max_adapters = device, rounding, max_adapters
        self.fused = "fused" if rounding.layers is None else f"fused, their weights {rounding.layers.word}"
        self._open_attention = choose_attention(attention_backend)

    def divide_among(self, ranks: Ranks) -> None:
        """Refuse: a GPU's layers are not divided yet."""
        raise StartupError(
            f"--tensor-parallel-size {ranks.size} is for CPUs only, not for GPUs yet",
            fix="use one GPU, or --device cpu",
        )

    def attention_over(self, cache: KVCache) -> PagedAttention:
        return self._open_attention(cache, self._device)

    def fuse_exactly(self, parts: LayerParts, call: LayerCall) -> nn.Module:
        return TritonLayer(parts, call)

    def fuse(self, parts: LayerParts, call: LayerCall) -> nn.Module:
        return TritonLayer(parts.with_linears(self._as_asked), call)

    def _as_asked(self, linear: Linear) -> Linear:
        rounded = linear if self._rounding.layers is None else self._rounding.layers.quantize(linear)
        linear = rounded if TAKEN.include(rounded) else linear
        return linear if self._rounding.of_inputs is None else with_float8_rows(linear)

    def prove(self, model: Any, *, must_round_inputs: bool) -> None:
        """See Toolkit."""
        prove_products(model, self._rounding, must_round_inputs=must_round_inputs)

    def replace_others(self, model: Any, max_model_len: int) -> ReplacedExperts:
        """Replace mixtures of experts, the frame and codes elsewhere, and choose products by their time.

        An output layer of plain numbers is one product of cuBLAS as it is.
        """
        replaced = replace_experts(model, _own_experts)
        replace_code_modules(model, self._rounding.head)
        replace_frame(model, TAKEN, max_model_len)
        if self._max_adapters:
            return replaced  # products with updates fold nothing
        layers = [module for module in model.modules() if isinstance(module, TritonLayer)]
        choose_products([product for layer in layers for product in layer.products], self._device)
        return replaced

    @contextmanager
    def refusing_kernels(self) -> Iterator[None]:
        """Raise a StartupError for a kernel that Triton cannot compile for this GPU."""
        try:
            yield
        except TritonError as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise StartupError(
                f"Triton refuses a kernel on this GPU: {reason}",
                fix=f"start with {self.option} off, and report it",
            ) from error


def _own_experts(experts: ExpertLinears) -> nn.Module:
    """Make a mixture of plain numbers or of codes. Raises Unrecognised."""
    return TritonExperts(experts) if isinstance(experts, Experts) else CodeExperts(experts, route)

"""Interface of the kernels of one kind of device, for the start of a model."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from worker.attention.interface import AttentionBackend
from worker.attention.kv_cache import KVCache
from worker.model.layer_call import LayerCall
from worker.model.layer_parts import LayerParts, TakenWeights
from worker.model.linear import Axis, Linear
from worker.model.mixture import ReplacedExperts
from worker.ranks.ranks import Ranks


class Toolkit(Protocol):
    """The kernels of one kind of device. Layers that it makes run under its own attention backend only."""

    name: str
    """Name the kernels, for a person."""
    device_kind: str
    """"CPU" or "GPU", for a person."""
    option: str
    """The option that turns the kernels off."""
    fused: str
    """Name a fused layer, for a person."""
    runs_ahead: bool
    """Whether steps are launched on the device and not waited for."""
    weights: TakenWeights

    def divide_among(self, ranks: Ranks) -> None:
        """Let layers that are fused from now on be shards. Raises StartupError where there are none."""

    def attention_over(self, cache: KVCache) -> AttentionBackend:
        """Make the attention backend that serves, or a small one of a trial's own."""

    def fuse_exactly(self, parts: LayerParts, call: LayerCall) -> nn.Module:
        """Make the layer that is tried. Raises Unrecognised."""

    def round_weights(self, parts: LayerParts) -> LayerParts:
        """Round the weights of a whole layer as the options ask: ranks cut the numbers that one has."""

    def fuse(self, parts: LayerParts, call: LayerCall) -> nn.Module:
        """Make the layer that stays, or a shard of it, of weights that are rounded."""

    def pack_shard(self, shard: Linear, axis: Axis, dtype: torch.dtype) -> nn.Module:
        """Make the module of a rank's part of a product of a layer that stays. Raises Unrecognised."""

    def prove(self, model: Any, *, must_round_inputs: bool) -> None:
        """Try the product of each kind of quantized weight that the kernels would compute.

        Raises StartupError with the name of a module whose product is not exact, and, if asked, where an
        option to round inputs would have no effect.
        """

    def replace_linears(self, model: Any, names: Sequence[str], /) -> None:
        """Replace linear layers of layers that stay, as far as the device's products are faster."""

    def replace_others(self, model: Any, max_model_len: int) -> ReplacedExperts:
        """Replace modules outside of layers, and mixtures of experts; choose what needs all layers."""

    def refusing_kernels(self) -> AbstractContextManager[None]:
        """Raise a StartupError for a kernel that cannot be compiled or launched here."""

"""Updates of the experts of a mixture: how files hold them, and their product in plain torch.

Owns: the updates of one expert, taken out of the tensors of all (peft's target_parameters) or put together
from those of its own modules, as adapters have them that were trained when experts were modules; and the
experts that no kernel computes, which define the right results.
Source: ParamWrapper of peft 0.21.

Shapes: E experts, R ranks, N outputs and K inputs, T tokens, P pairs of a token and an expert.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from worker.adapters.adapted_linear import StepAdapters, WrappedModule
from worker.adapters.files import Halves, LowRank
from worker.adapters.settings import AdapterSettings
from worker.model.layer_parts import Unrecognised
from worker.model.linear import Linear
from worker.model.mixture import ExpertLinears, read_experts
from worker.worker_errors import AdapterRefused, WorkerError

GATE_UP, DOWN = "gate_up_proj", "down_proj"
_NESTED = ".base_layer"
_FIRST_WITH_OUTPUTS_FIRST = (0, 19)
# Names of an expert's own modules: gate, up, down.
_MODULES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


class ExpertsSize(NamedTuple):
    """Numbers of the experts of a layer."""

    num_experts: int
    num_gates: int
    hidden_size: int
    is_concatenated: bool
    """Whether all ups follow all gates in the tensors of a checkpoint; otherwise each follows its gate."""
    is_transposed: bool
    """Whether inputs come before outputs there."""

    def layers(self, name: str) -> dict[str, tuple[int, int]]:
        """Return outputs and inputs of each expert's two layers."""
        sizes = {GATE_UP: (2 * self.num_gates, self.hidden_size), DOWN: (self.hidden_size, self.num_gates)}
        experts = range(self.num_experts)
        return {f"{name}.{expert}.{part}": size for expert in experts for part, size in sizes.items()}

    def take_all(self, name: str, halves: dict[str, Halves], settings: AdapterSettings) -> dict[str, LowRank]:
        """Take the updates of all experts out of `halves`. Raises AdapterRefused."""
        updates = self._take_parameters(name, halves, settings)
        for expert in range(self.num_experts):
            updates |= self._take_modules(f"{name}.{expert}", halves, settings)
        return updates

    def _take_parameters(
        self, name: str, halves: dict[str, Halves], settings: AdapterSettings
    ) -> dict[str, LowRank]:
        # peft puts one wrapper around the other, the last parameter outside.
        updates: dict[str, LowRank] = {}
        parts = [part for part in (DOWN, GATE_UP) if settings.include_parameter(f"{name}.{part}")]
        for depth, part in enumerate(parts):
            found = halves.pop(name + depth * _NESTED, None)
            if found is None:
                raise AdapterRefused(f"{name}.{part} is a target of adapter_config.json and has no tensors")
            whole = found.low_rank(f"{name}.{part}", settings, times=self.num_experts)
            down_ERK = whole.down_RK.reshape(self.num_experts, -1, whole.down_RK.shape[1])
            up_ENR = whole.up_NR.reshape(len(whole.up_NR), -1, self.num_experts).permute(2, 0, 1)
            if self._is_crosswise(name, part, whole, settings):
                down_ERK, up_ENR = up_ENR.transpose(1, 2), down_ERK.transpose(1, 2)
            if part == GATE_UP and not self.is_concatenated:
                up_ENR = torch.cat([up_ENR[:, ::2], up_ENR[:, 1::2]], dim=1)
            for expert in range(self.num_experts):
                update = LowRank(down_ERK[expert], up_ENR[expert], whole.scale)
                updates[f"{name}.{expert}.{part}"] = update
        return updates

    def _is_crosswise(self, name: str, part: str, whole: LowRank, settings: AdapterSettings) -> bool:
        """Tell whether the halves are transposed: peft before 0.19 took outputs for inputs.

        Raises AdapterRefused where neither their shapes nor a version say it.
        """
        outputs, inputs = self.layers(name)[f"{name}.0.{part}"]
        if self.is_transposed or outputs != inputs:
            return not self.is_transposed and (whole.down_RK.shape[1], len(whole.up_NR)) == (outputs, inputs)
        if settings.peft_version is None:
            raise AdapterRefused(
                f"{name}.{part} has as many inputs as outputs, which peft before 0.19 stored the other way "
                "round, and adapter_config.json has no peft_version"
            )
        return settings.peft_version < _FIRST_WITH_OUTPUTS_FIRST

    def _take_modules(
        self, name: str, halves: dict[str, Halves], settings: AdapterSettings
    ) -> dict[str, LowRank]:
        """Take the updates of one expert's modules; a gate and its up become one update side by side."""
        updates = {}
        for gate, up, down in _MODULES:
            own = [
                (start, halves.pop(f"{name}.{module}").low_rank(f"{name}.{module}", settings))
                for start, module in ((0, gate), (self.num_gates, up))
                if f"{name}.{module}" in halves
            ]
            if own:
                updates[f"{name}.{GATE_UP}"] = self._side_by_side(name, own)
            if f"{name}.{down}" in halves:
                updates[f"{name}.{DOWN}"] = halves.pop(f"{name}.{down}").low_rank(f"{name}.{down}", settings)
        return updates

    def _side_by_side(self, name: str, own: list[tuple[int, LowRank]]) -> LowRank:
        up_NR = torch.zeros((2 * self.num_gates, sum(update.rank for _, update in own)))
        first_rank = 0
        for start, update in own:
            found = (len(update.up_NR), update.down_RK.shape[1])
            if found != (self.num_gates, self.hidden_size):
                raise AdapterRefused(
                    f"the tensors of {name} are for {found[1]} inputs and {found[0]} gates or ups, "
                    f"and it has {self.hidden_size} and {self.num_gates}"
                )
            place = (slice(start, start + self.num_gates), slice(first_rank, first_rank + update.rank))
            up_NR[place] = update.scale * update.up_NR.float()
            first_rank += update.rank
        return LowRank(torch.cat([update.down_RK for _, update in own]), up_NR, 1.0)


def size_experts(module: Any) -> ExpertsSize:
    """Read the sizes of experts. Raises Unrecognised where they cannot be taken apart."""
    experts = read_experts(module)
    if experts.num_identities:  # which have unused rows in the tensors of files
        raise Unrecognised("some of its experts return what they are given")
    gate_up = experts.gate_up(0)
    return ExpertsSize(
        experts.num_experts,
        gate_up.num_outputs // 2,
        gate_up.num_inputs,
        bool(module.is_concatenated),
        bool(module.is_transposed),
    )


def check_modules(
    experts: Mapping[str, ExpertsSize], halves: Mapping[str, Halves], settings: AdapterSettings
) -> None:
    """Raise AdapterRefused for a module of an expert that is a target and has no tensors.

    That modules are meant, and not parameters, shows by the tensors of some.
    """
    modules = set()
    for each in halves:
        expert_name, _, module = each.rpartition(".")
        if expert_name.rpartition(".")[0] in experts:
            modules.add(module)
    for name, size in experts.items():
        for expert in range(size.num_experts):
            for module in sorted(modules):
                target = f"{name}.{expert}.{module}"
                if settings.include(target) and target not in halves:
                    raise AdapterRefused(f"{target} is a target of adapter_config.json and has no tensors")


class AdaptedExperts(WrappedModule):
    """Experts with updates. Tokens that have some are computed once more. See AdaptablePart."""

    def __init__(self, name: str, inner: nn.Module, experts: ExpertLinears, step: StepAdapters) -> None:
        super().__init__(inner)
        self._name, self._experts, self._step = name, experts, step
        self._updates: dict[int, dict[str, LowRank]] = {}

    def adapted_names(self) -> tuple[str, ...]:
        experts = range(self._experts.num_experts)
        return tuple(f"{self._name}.{expert}.{part}" for expert in experts for part in (GATE_UP, DOWN))

    def put(self, slot: int, updates: Mapping[str, LowRank]) -> None:
        own = {name: updates[name] for name in self.adapted_names() if name in updates}
        if own:
            self._updates[slot] = own

    def clear(self, slot: int) -> None:
        self._updates.pop(slot, None)

    def forward(self, hidden_TH: Tensor, expert_ids_TK: Tensor, scores_TK: Tensor, **others: Any) -> Tensor:
        """Return the weighed sum of the outputs of each token's experts: [T, H]."""
        sums_TH: Tensor = self.inner(hidden_TH, expert_ids_TK, scores_TK, **others)
        for slot, tokens in self._step.groups:
            updates = self._updates.get(slot)
            if updates is None:
                continue
            if tokens is None:
                tokens = torch.arange(len(hidden_TH))
            elif len(hidden_TH) != self._step.num_tokens:
                raise WorkerError(f"{self._name} is given {len(hidden_TH)} of {self._step.num_tokens} tokens")
            given = (hidden_TH[tokens], expert_ids_TK[tokens], scores_TK[tokens])
            sums_TH[tokens] = self._compute(updates, *given).to(sums_TH.dtype)
        return sums_TH

    def _compute(
        self, updates: dict[str, LowRank], hidden_TH: Tensor, expert_ids_TK: Tensor, scores_TK: Tensor
    ) -> Tensor:
        num_chosen, ids_P = expert_ids_TK.shape[1], expert_ids_TK.reshape(-1)
        outputs_PH = torch.zeros((len(ids_P), hidden_TH.shape[1]))
        for expert in sorted(set(ids_P.tolist())):
            if expert >= self._experts.num_experts:  # one more stands for none
                continue
            places = (ids_P == expert).nonzero()[:, 0]
            x = hidden_TH[places // num_chosen]
            of_expert = f"{self._name}.{expert}"
            merged = _multiply(self._experts.gate_up(expert), updates.get(f"{of_expert}.{GATE_UP}"), x)
            gated = self._experts.gate(*merged.float().chunk(2, dim=-1)).to(x.dtype)
            product = _multiply(self._experts.down(expert), updates.get(f"{of_expert}.{DOWN}"), gated)
            outputs_PH[places] = product.float()
        weighed = outputs_PH * scores_TK.reshape(-1, 1).float()
        return weighed.view(len(hidden_TH), num_chosen, -1).sum(dim=1)


def _multiply(linear: Linear, update: LowRank | None, x: Tensor) -> Tensor:
    product = linear.multiply(x)
    return product if update is None else product + update.multiply(x).to(product.dtype)

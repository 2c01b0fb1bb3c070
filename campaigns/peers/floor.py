"""The time below which no decode step can be: its bytes over the bandwidth.

Owns: the bytes of a step, from the files of the checkpoint.
Never: the arithmetic, which bounds large batches and prompts: there the floor is far below what can be.
"""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from campaigns.peers.workloads import Workload

_BYTES_OF_KV = 2  # bfloat16
_BYTES_OF_DTYPE = {"BF16": 2, "F16": 2, "F32": 4}
_INPUT_EMBEDDINGS = ("embed_tokens.weight", "wte.weight")


class UnreadableCheckpoint(Exception):
    """The folder is no checkpoint whose bytes can be counted; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """Bytes that a decode step must read."""

    weights: int
    """Bytes of all weights; an input embedding that is not the output layer too counts a few rows."""
    kv_per_token: int
    states_per_client: int = 0
    """Bytes of what layers that recur keep, as it is read and as it is written."""

    def step_s(self, workload: Workload, bandwidth: float) -> float:
        """Seconds of a step with every client in the middle of its reply; `bandwidth` in bytes per second."""
        context = workload.input_len + workload.output_len / 2
        of_clients = workload.concurrency * (context * self.kv_per_token + self.states_per_client)
        return (self.weights + of_clients) / bandwidth

    def tokens_per_s(self, workload: Workload, bandwidth: float) -> float:
        """Output tokens per second if everything but decoding were free."""
        return workload.concurrency / self.step_s(workload, bandwidth)


def step_bytes(model: Path) -> StepBytes:
    """Raises UnreadableCheckpoint."""
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        tensors = {
            name: each for path in model.glob("*.safetensors") for name, each in _tensors(path).items()
        }
        weights = sum(_num_bytes(each) for each in tensors.values())
        if not config.get("tie_word_embeddings", True):
            weights -= sum(
                _num_bytes(each) for name, each in tensors.items() if name.endswith(_INPUT_EMBEDDINGS)
            )
        heads = config.get("num_key_value_heads", config["num_attention_heads"])
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        num_recurrent = (config.get("layer_types") or []).count("linear_attention")
        kv_per_token = 2 * (config["num_hidden_layers"] - num_recurrent) * heads * head_dim * _BYTES_OF_KV
        states = 2 * num_recurrent * _state_bytes(config) if num_recurrent else 0
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UnreadableCheckpoint(f"cannot count the bytes of {model}: {error!r}") from None
    if not weights:
        raise UnreadableCheckpoint(f"{model} holds no safetensors")
    return StepBytes(weights=weights, kv_per_token=kv_per_token, states_per_client=states)


def _state_bytes(config: dict[str, Any]) -> int:
    """Bytes of one layer's state, float32, and of its convolution's earlier inputs in 16 bits."""
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    inputs = (config["linear_conv_kernel_dim"] - 1) * (2 * keys + values)
    num_bytes: int = 4 * values * config["linear_key_head_dim"] + 2 * inputs
    return num_bytes


def _tensors(path: Path) -> dict[str, dict[str, Any]]:
    """The header of a safetensors file: what each tensor is."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, dict[str, Any]] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header


def _num_bytes(tensor: dict[str, Any]) -> int:
    """Bytes that every peer reads: whatever the file holds, it is made 16 bits wide."""
    num_elements: int = math.prod(tensor["shape"])
    return num_elements * min(2, _BYTES_OF_DTYPE[tensor["dtype"]])

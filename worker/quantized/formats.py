"""From a checkpoint's quantization_config to the rules that say how its modules are read."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from worker.checkpoint.checkpoint_files import read_json
from worker.quantized.auto_round import read_auto_round_rules
from worker.quantized.awq import read_awq_rules
from worker.quantized.bitsandbytes import BitsAndBytesRules
from worker.quantized.compressed_tensors import read_compressed_tensors_rules
from worker.quantized.fp8 import read_fp8_rules, read_modelopt_rules, read_mxfp8_rules
from worker.quantized.gguf_blocks import GgufRules
from worker.quantized.gptq import read_gptq_rules
from worker.quantized.mxfp4 import Mxfp4Reader
from worker.quantized.scheme import QuantizationRefused, Rules
from worker.quantized.torchao import read_torchao_rules
from worker.worker_errors import refused_as

_SIDECAR = "hf_quant_config.json"
_METHODS: dict[str, Callable[[dict[str, Any]], Rules]] = {
    "auto-round": read_auto_round_rules,
    "awq": read_awq_rules,
    "bitsandbytes": lambda _: BitsAndBytesRules(),
    "compressed-tensors": read_compressed_tensors_rules,
    "fp8": read_fp8_rules,
    "gguf": lambda _: GgufRules(),
    "gptq": read_gptq_rules,
    "modelopt": read_modelopt_rules,
    "mxfp4": lambda _: Mxfp4Reader(),
    "mxfp8": read_mxfp8_rules,
    "torchao": read_torchao_rules,
}
_OTHER_NAMES = {
    "auto_round": "auto-round",
    "fbgemm_fp8": "fp8",
    "intel/auto-round": "auto-round",
    "modelopt_fp4": "modelopt",
    "modelopt_fp8": "modelopt",
    "modelopt_mixed": "modelopt",
}


def find_rules(folder: Path, checkpoint_config: dict[str, Any]) -> Rules | None:
    """The rules of a checkpoint, of which config.json tells or ModelOpt's own file; None: it is plain.

    Raises StartupError.
    """
    parts = (checkpoint_config, checkpoint_config.get("text_config") or {})
    keys = ("quantization_config", "compression_config")  # as older compressed-tensors files name it
    found = next((part[key] for part in parts for key in keys if part.get(key)), None)
    if found is not None:
        return read_rules(found)
    if not (folder / _SIDECAR).is_file():
        return None
    found = read_json(folder / _SIDECAR).get("quantization")
    return read_rules({"quant_method": "modelopt", **(found if isinstance(found, dict) else {})})


def read_rules(quantization_config: Any) -> Rules:
    """The rules of a config.json's quantization_config. Raises QuantizationRefused."""
    said = quantization_config if isinstance(quantization_config, dict) else {}
    is_of_bits_and_bytes = said.get("load_in_4bit") or said.get("load_in_8bit")  # which older files say alone
    method = said.get("quant_method") or ("bitsandbytes" if is_of_bits_and_bytes else None)
    method = _OTHER_NAMES.get(str(method), method)
    if method not in _METHODS:
        how = f"by {method!r}" if method else "and names no method, as files of MLX do not"
        raise QuantizationRefused(
            f"the checkpoint is quantized {how}", fix=f"take one of {', '.join(sorted(_METHODS))}"
        )
    refusal = partial(QuantizationRefused, fix="correct the config")
    with refused_as(refusal, f"quantization_config of {method}"):
        return _METHODS[method](quantization_config)

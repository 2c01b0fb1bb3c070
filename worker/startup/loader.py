"""Loader of a checkpoint as a transformers model; a decoder's attention calls reach the worker's backend.

Owns: building the class that transformers has for the family and the task, and the refusal of checkpoints
that cannot be served.
Never: moves weights (devices/weight_life.py), or takes code from the checkpoint (auto_map is not followed),
pickled weights, or anything from the network.
"""

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)
from transformers.utils import logging as transformers_logging

from worker.attention.interface import (
    ATTENTION_NAME,
    CHUNKED_LAYER,
    FULL_LAYER,
    SLIDING_LAYER,
    attention_forward,
)
from worker.attention.kv_cache import LayerShape
from worker.checkpoint.checkpoint_files import (
    WeightFile,
    bytes_not_taken,
    find_checkpoint,
    find_weights,
    loaded_bytes,
    read_json,
    warm_page_cache,
)
from worker.checkpoint.checksums import Checksums
from worker.checkpoint.generation_config import default_sampling, eos_token_ids
from worker.checkpoint.overrides import merged
from worker.checkpoint.plausible_sizes import check_sizes
from worker.checkpoint.task import Task, choose_task, reads_both_ways
from worker.devices.device import Device
from worker.devices.lazy_imports import load_shapes
from worker.devices.weight_life import WeightLife, is_out_of_memory, refusing_out_of_memory
from worker.memory_sizes import WeightBytes
from worker.model.mixture import find_experts
from worker.model.quantized_layers import QuantizedEmbedding
from worker.progress import LoadPhase, LoadStage
from worker.quantized.formats import find_rules
from worker.quantized.grouped_weight import GroupedWeight
from worker.quantized.scheme import Rules
from worker.ranks.ranks import ALONE, Ranks, is_divided
from worker.startup.quantized_loading import (
    QuantizedModules,
    arguments_of,
    find_quantized,
    read_state,
    refuse_unplaced,
    without_quantization,
)
from worker.worker_config import ModelFacts, WorkerConfig
from worker.worker_errors import FamilyRefused, StartupError

log = logging.getLogger(__name__)

_MOST_REASON_CHARS = 200
_CHECK_IT = "check the checkpoint with AutoModelForCausalLM.from_pretrained"
NO_PAGED_ATTENTION = "has attention of its own that a paged KV cache cannot be put under"
_BITS = {"int8": 8, "int4": 4.5}
"""Bits of a number, with its share of a group's scale, by the words of --quantization."""
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_SUPPORTED_LAYERS = frozenset({FULL_LAYER, SLIDING_LAYER, CHUNKED_LAYER})
# Where families keep the length of their context window, besides max_position_embeddings.
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_LEN_WITHOUT_LIMIT = 8192
"""Context window of a model whose configuration gives none, unless one is asked for."""

# A head for the training of encoders: its output is never read, and many checkpoints leave it out.
_POOLER = "pooler."

AttentionInterface.register(ATTENTION_NAME, attention_forward)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKind:
    """Properties of a checkpoint that decide how it is built and run."""

    folder: Path
    checkpoint_config: dict[str, Any]
    task: Task
    quantization: Rules | None
    """Rules of a checkpoint whose weights were rounded before; None: they are plain."""
    is_encoder: bool
    """Tokens see later ones: there is no KV cache, and attention stays the model's own."""
    has_overrides: bool = False
    """The operator has changed `checkpoint_config`: it is not the file's."""
    keeps_own_cache: bool = False
    """Attention, or its replacement in the family, stays the model's own: no paged KV cache fits under it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """Model on its device, and the facts of its checkpoint."""

    model: nn.Module
    dtype: torch.dtype
    model_type: str
    text_config: Any
    """Part of the configuration that describes the language model."""
    num_parameters: int
    weight_bytes: int
    vocab_size: int
    checkpoint_len: int
    eos_token_ids: tuple[int, ...]
    default_sampling: dict[str, float]
    weights: WeightLife
    has_experts: bool = False
    """Mixture of experts: a token reads the weights of some experts only."""
    layers_beside: dict[int, LayerShape] = field(default_factory=dict)
    """Layers of another model that keep keys and values in the same blocks, behind all layers of this one."""
    ranks: Ranks = ALONE
    """Ranks that are to divide the layers."""

    def facts(self, device: Device, **sizes: Any) -> ModelFacts:
        """Join what is known of the model with the sizes of its cache."""
        return ModelFacts(
            model_type=self.model_type,
            num_parameters=self.num_parameters,
            weight_bytes=self.weight_bytes,
            dtype=str(self.dtype).removeprefix("torch."),
            device=device.describe(),
            vocab_size=self.vocab_size,
            eos_token_ids=self.eos_token_ids,
            default_sampling=self.default_sampling,
            **sizes,
        )

    def head_layers(self, num_layers: int) -> float:
        """Count the output layer's weights in layers, of so many."""
        return head_layers(self.text_config, self.vocab_size, self.num_parameters, num_layers)


def find_kind(config: WorkerConfig) -> ModelKind:
    """Read config.json, and compare all texts with their checksums. Raises StartupError to refuse them."""
    folder = find_checkpoint(config.model_path)
    if config.checksums_file is not None:
        Checksums.read(Path(config.checksums_file)).check_texts(folder)
    checkpoint_config = merged(read_json(folder / "config.json"), config.config_overrides)
    if checkpoint_config.get("transformers_weights") not in (None, "model.safetensors"):
        raise StartupError(
            f"{folder / 'config.json'} names weights of its own, by transformers_weights",
            fix="name them model.safetensors, and remove that key",
        )
    task = choose_task(config.task, folder, checkpoint_config)
    return ModelKind(
        folder=folder,
        checkpoint_config=checkpoint_config,
        task=task,
        quantization=find_rules(folder, checkpoint_config),
        is_encoder=reads_both_ways(checkpoint_config),
        has_overrides=bool(config.config_overrides),
    )


def model_config_of(kind: ModelKind) -> Any:
    """Make transformers' configuration of a checkpoint, with the operator's values in it."""
    if not kind.has_overrides:
        return AutoConfig.from_pretrained(kind.folder, local_files_only=True, trust_remote_code=False)
    return CONFIG_MAPPING[kind.checkpoint_config["model_type"]].from_dict(dict(kind.checkpoint_config))


def load_model(
    config: WorkerConfig, kind: ModelKind, device: Device, stage: LoadStage, ranks: Ranks = ALONE
) -> LoadedModel:
    """Load the weights onto the device. Raises StartupError for everything that cannot be served."""
    if config.dtype not in _DTYPES:
        raise StartupError(f"unknown dtype {config.dtype!r}", fix=f"ask for one of {', '.join(_DTYPES)}")
    folder = kind.folder
    sampling = default_sampling(folder, config.sampling_overrides)
    files = find_weights(folder)
    check_sizes(kind.checkpoint_config, files)
    weights = bytes_to_load(config, kind, files, device)
    left_bytes = device.check_weights(weights.on_one_of(config.num_devices, config.num_nodes))
    _read_weights(config, folder, files, stage, left_bytes)
    with refusing_out_of_memory(device, f"{weights.total / (1 << 30):.2f} GiB of weights were loaded"):
        stage.enter(LoadPhase.BUILDING)
        modules = None if kind.quantization is None else find_quantized(kind.quantization, files)
        model = _build(kind, config.dtype, modules, files)
        if modules is not None:
            modules.fill(model, device.torch_device)
        life = WeightLife(model, device, [file.path for file in files], modules, weights.total)
        if not (is_divided(ranks) or _await_kernels(config, kind, device)):
            life.move(stage)
    model.eval()
    text_config = model.config.get_text_config(decoder=True)
    vocab_size = vocab_size_of(model)
    parameters = list(model.parameters())
    quantized = [] if modules is None else modules.weights_of(model)
    return LoadedModel(
        model=model,
        dtype=model.dtype,
        model_type=model.config.model_type,
        text_config=text_config,
        num_parameters=sum(each.numel() for each in parameters) + sum(map(_numbers_of, quantized)),
        weight_bytes=sum(each.nbytes for each in parameters) + sum(each.num_bytes for each in quantized),
        vocab_size=vocab_size,
        checkpoint_len=_checkpoint_len(config, kind, text_config),
        eos_token_ids=eos_token_ids(folder, (text_config, model.config), vocab_size=vocab_size),
        default_sampling=sampling,
        weights=life,
        has_experts=any(find_experts(model)),
        ranks=ranks,
    )


def bytes_to_load(
    config: WorkerConfig, kind: ModelKind, files: list[WeightFile], device: Device
) -> WeightBytes:
    """Size the weights as a load takes them: rounded layer by layer on a CPU, if they are to be."""
    dtype = dtype_name(config.dtype, kind.checkpoint_config)
    weights, num_bits = loaded_bytes(files, dtype), _BITS.get(config.quantization)
    is_alone = config.num_ranks == config.num_stages == 1
    if num_bits is None or not is_alone or not _await_kernels(config, kind, device):
        return weights
    rounds_head = config.quantize_head != "none"
    not_taken = bytes_not_taken(files, dtype, num_bits=num_bits, rounds_head=rounds_head)
    return replace(weights, total=weights.total - not_taken)


def _await_kernels(config: WorkerConfig, kind: ModelKind, device: Device) -> bool:
    """Tell whether kernels are to take the weights over, which copies them."""
    is_replaced = not (kind.is_encoder or kind.keeps_own_cache)
    return is_replaced and device.torch_device.type == "cpu" and config.cpu_kernels != "off"


def _read_weights(
    config: WorkerConfig, folder: Path, files: list[WeightFile], stage: LoadStage, left_bytes: int
) -> None:
    """Bring the files into the page cache, and compare them on the way if there is a list of checksums."""
    file_bytes = sum(file.num_bytes for file in files)
    if config.checksums_file is None and file_bytes > left_bytes:
        return  # the first pages would be gone again before they are used
    stage.enter(LoadPhase.READING, total_bytes=file_bytes)
    if config.checksums_file is not None:
        checksums = Checksums.read(Path(config.checksums_file))
        checksums.check_weights(folder, [file.path for file in files], stage.count)
        log.info("all files are as %s lists them", checksums.path)
    else:
        warm_page_cache(files, stage.count)


def refuse_layers(text_config: Any) -> None:
    """Raise StartupError for layers whose kind of attention the attention call does not show."""
    layer_types = set(getattr(text_config, "layer_types", None) or ())
    unknown = sorted(layer_types - _SUPPORTED_LAYERS)
    if unknown:
        raise FamilyRefused(
            f"{text_config.model_type} has layers of type {', '.join(unknown)}, which this worker cannot "
            "compute: it keeps keys and values of full, sliding and chunked attention only"
        )


def describe_division(config: WorkerConfig) -> str:
    """Name the options that divide the model."""
    options = {"--tensor-parallel-size": config.num_ranks, "--pipeline-parallel-size": config.num_stages}
    return " ".join(f"{option} {number}" for option, number in options.items() if number > 1)


def refuse_ranks(config: WorkerConfig, kind: ModelKind) -> None:
    """Raise StartupError for ranks of a kind of model that is not divided among them."""
    if config.num_ranks == config.num_stages == 1:
        return
    asked = describe_division(config)
    if kind.task is not Task.GENERATE or kind.is_encoder:
        raise StartupError(
            f"{asked} divides models that generate, and this one is made to {kind.task.value}",
            fix="leave it out",
        )


def _torch_dtype(dtype: str, kind: ModelKind) -> torch.dtype:
    named: torch.dtype = getattr(torch, dtype_name(dtype, kind.checkpoint_config) or "float32")
    return named


def _class_of(kind: ModelKind, model_config: Any, state: dict[str, Tensor] | None) -> Any:
    if state is not None:  # which transformers takes by a class alone
        if kind.task is not Task.GENERATE:
            raise StartupError(
                f"GGUF files are not served for --task {kind.task.value}", fix="take the model's safetensors"
            )
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)]
    match kind.task:
        case Task.GENERATE:
            return AutoModelForCausalLM
        case Task.EMBED:
            return AutoModel
        case Task.SCORE:
            return AutoModelForSequenceClassification


def _quieten() -> None:
    """Let transformers' lines go where ours go, in the same form."""
    transformers_logging.disable_progress_bar()
    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()


def _build(kind: ModelKind, dtype: str, modules: QuantizedModules | None, files: list[WeightFile]) -> Any:
    """Build the model with its plain weights; those of quantized modules are yet to be filled in."""
    _quieten()
    folder = kind.folder
    state = read_state(files)
    try:
        model_config = model_config_of(kind)
        is_paged = not (kind.is_encoder or kind.keeps_own_cache)
        if is_paged:
            refuse_layers(model_config.get_text_config(decoder=True))
        model, loading = _from_pretrained(
            _class_of(kind, model_config, state),
            folder if state is None else None,
            config=without_quantization(model_config),
            dtype=_torch_dtype(dtype, kind) if state is not None or dtype != "auto" else dtype,
            attn_implementation=ATTENTION_NAME if is_paged else None,
            output_loading_info=True,
            **arguments_of(modules),
            **({} if state is None else {"state_dict": state}),
        )
    except KeyError as error:
        if ATTENTION_NAME in error.args:  # the class looks attention up in a table of its own
            raise FamilyRefused(f"{model_config.model_type} {NO_PAGED_ATTENTION}") from error
        raise StartupError(f"transformers cannot load {folder}: {error}", fix=_CHECK_IT) from error
    except StrictDataclassError as error:
        reason = " ".join(str(error).split())[:_MOST_REASON_CHARS]
        raise StartupError(
            f"{folder / 'config.json'} is refused: {reason}", fix="correct that file"
        ) from error
    except StartupError:
        raise
    except (OSError, ValueError, RuntimeError, AttributeError, TypeError, ImportError) as error:
        if is_out_of_memory(error):
            raise
        raise StartupError(
            f"transformers cannot load {folder}: {_first_line(error)}", fix=_CHECK_IT
        ) from error
    refuse_unplaced(model, modules, files, kind.task)
    missing = sorted(name for name in loading["missing_keys"] if not name.startswith(_POOLER))
    if missing:
        raise StartupError(
            f"{folder} has no weights for {len(missing)} parameters, {missing[0]} first",
            fix="download it again",
        )
    return model


def _from_pretrained(model_class: Any, folder: Path | None, **options: Any) -> Any:
    """Build a model and read its weights, with torch's rules for shapes in C++ or else with all rules."""
    options |= {"use_safetensors": True, "local_files_only": True, "trust_remote_code": False}
    try:
        return model_class.from_pretrained(folder, **options)
    except NotImplementedError:
        if not load_shapes():
            raise
        return model_class.from_pretrained(folder, **options)


def dtype_name(dtype: str, checkpoint_config: dict[str, Any]) -> str | None:
    """Name the dtype that the weights will have; None for that of the files."""
    if dtype != "auto":
        return dtype
    named = checkpoint_config.get("dtype") or checkpoint_config.get("torch_dtype")
    return named.removeprefix("torch.") if isinstance(named, str) else None


def vocab_size_of(model: Any) -> int:
    """Count the tokens that can be both read and sampled: some families read more than they sample."""
    embedding = model.get_input_embeddings()
    num_read = (
        embedding.num_embeddings
        if isinstance(embedding, QuantizedEmbedding)
        else int(embedding.weight.shape[0])
    )
    output = model.get_output_embeddings()
    return num_read if output is None else min(num_read, int(output.out_features))


def head_layers(text_config: Any, vocab_size: int, num_parameters: int, num_layers: int) -> float:
    """Count the output layer's weights in layers; the embedding is looked up, which costs nothing."""
    num_head = vocab_size * int(text_config.hidden_size)
    num_ends = num_head if text_config.tie_word_embeddings else 2 * num_head
    return num_head * num_layers / max(num_head, num_parameters - num_ends)


def _numbers_of(weight: GroupedWeight) -> int:
    return weight.num_outputs * weight.num_inputs


def _checkpoint_len(config: WorkerConfig, kind: ModelKind, text_config: Any) -> int:
    try:
        return context_window(text_config)
    except FamilyRefused:
        if not kind.keeps_own_cache:
            raise
        return config.max_model_len or _LEN_WITHOUT_LIMIT  # a recurrent model may have none


def context_window(text_config: Any) -> int:
    lengths = [getattr(text_config, key, None) for key in _LENGTH_KEYS]
    length = next((int(length) for length in lengths if isinstance(length, int) and length > 0), None)
    if length is None:
        raise FamilyRefused(f"the configuration of {text_config.model_type} gives no context window")
    rope = getattr(text_config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "yarn" and rope.get("original_max_position_embeddings"):
        # Yarn is often added to a configuration whose max_position_embeddings is still the old length.
        length = max(length, int(rope["original_max_position_embeddings"] * rope["factor"]))
    return length


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

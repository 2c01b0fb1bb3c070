"""Survey of the device and the model, as the worker would find them, without loading the model."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import transformers

from worker.checkpoint.checkpoint_files import WeightFile, find_weights
from worker.checkpoint.plausible_sizes import check_sizes
from worker.checkpoint.task import Task
from worker.devices.device import Device, open_device
from worker.doctor_findings import Finding, Verdict
from worker.load.model_kind import ModelKind, find_kind, refuse_ranks, torch_dtype
from worker.load.weight_files import refuse_engines, weight_bytes
from worker.memory_sizes import format_size
from worker.startup.kernel_choice import kernels_of, verifies_drafts
from worker.startup.start_adapters import refuse_adapters
from worker.survey.draft_forecast import DraftForecast, foresee_draft
from worker.survey.forecast import Forecast, forecast
from worker.survey.unloaded_model import CannotForesee
from worker.worker_config import DraftMethod, WorkerConfig
from worker.worker_errors import AdapterRefused, FamilyRefused, StartupError, refused_as


def survey(config: WorkerConfig) -> Iterator[Finding]:
    """Yield findings up to the first fault: a load would not get further either."""
    yield _fine("libraries", f"torch {torch.__version__}, transformers {transformers.__version__}")
    topic = "device"
    try:
        device = open_device(config)
        yield _fine(topic, f"{device.describe()}, {device.describe_memory()}")
        with refused_as(partial(StartupError, fix="check the files of the model"), config.model_path):
            topic = "model"
            kind = find_kind(config)
            yield _fine(topic, f"{kind.checkpoint_config['model_type']}, made to {kind.task.value}")
            topic = "weights"
            files = find_weights(kind.folder)
            check_sizes(kind.checkpoint_config, files)
            yield _fine(topic, _describe_files(files))
            if not kind.is_encoder:
                topic = "kernels"
                yield kernels_of(device).foresee(config, device, torch_dtype(config.dtype, kind))
            refuse_adapters(config, kind, device)
            topic = "memory"
            yield from _look_at_memory(config, kind, device)
    except StartupError as error:
        yield Finding(topic=topic, verdict=Verdict.FAULT, what=error.what, fix=error.fix)


def _describe_files(files: list[WeightFile]) -> str:
    dtypes = sorted({name for file in files for name in file.bytes_of_dtype})
    num_bytes = sum(file.num_bytes for file in files)
    size = f"{format_size(num_bytes)} of {', '.join(dtypes)}"
    return f"{size} in {len(files)} {files[0].path.suffix.removeprefix('.')}, each as long as it promises"


def _look_at_memory(config: WorkerConfig, kind: ModelKind, device: Device) -> Iterator[Finding]:
    num_weight_bytes = weight_bytes(config, kind, device)
    weights = f"weights {format_size(num_weight_bytes)}"
    draft = _look_at_draft(config, kind, device)
    if draft is not None and draft.is_head:
        weights += f", {format_size(draft.weight_bytes)} of them of its draft head"
    elif draft is not None:
        num_weight_bytes += draft.weight_bytes
        weights += f" and {format_size(draft.weight_bytes)} of the draft model"
    if config.num_engines > 1:
        weights += f" for each of {config.num_engines} engines"
        refuse_engines(config, device, num_weight_bytes)
    num_processes = config.num_ranks * config.num_stages
    if num_processes > 1:
        weights += (
            f", about {format_size(num_weight_bytes // num_processes)} on each of {num_processes} ranks"
        )
    if config.num_nodes > 1:
        weights += f" on {config.num_nodes} nodes"
    refuse_ranks(config, kind)
    if kind.task is not Task.GENERATE or kind.is_encoder:
        yield _fine("memory", f"{weights}; not looked at: what a step takes")
        return
    try:
        found = _forecast(config, kind, device, num_weight_bytes, draft)
    except CannotForesee:
        yield _memory_warning(
            f"{weights}; how much KV cache fits is not known without loading this family",
            fix="start the server: it measures, and says what does not fit",
        )
        return
    except FamilyRefused as refused:
        if kind.is_encoder:
            raise
        yield _memory_warning(
            f"{weights}; {refused.what}: sequences will be computed one after the other, if at all",
            fix="expect a fraction of the speed, or serve a model of another family (docs/models.md)",
        )
        return
    yield _judge(config, weights, found)
    yield from _look_at_adapters(config, found)


def _look_at_draft(config: WorkerConfig, kind: ModelKind, device: Device) -> DraftForecast | None:
    """Raise StartupError for a draft model that cannot be served; None for one that cannot be foreseen."""
    if not verifies_drafts(config, device):
        return None
    try:
        return foresee_draft(config, kind, device)
    except CannotForesee:
        return None


def _forecast(
    config: WorkerConfig, kind: ModelKind, device: Device, num_weight_bytes: int, draft: DraftForecast | None
) -> Forecast:
    """Forecast the cache; as the start does, without a head that was not asked for if it has no room."""
    if draft is not None:
        try:
            return forecast(config, kind, device, num_weight_bytes, draft.kept)
        except StartupError:
            if config.speculation.method is not DraftMethod.AUTO:
                raise
    return forecast(config, kind, device, num_weight_bytes)


def _look_at_adapters(config: WorkerConfig, found: Forecast) -> Iterator[Finding]:
    """Read the adapters of the command line, and forecast how much memory they all may take."""
    limits = config.adapter_limits
    if not limits.max_in_step:
        return
    targets = found.adapter_targets
    for adapter in config.adapters:
        try:
            targets.read(Path(adapter.folder), max_rank=limits.max_rank)
        except AdapterRefused as refusal:
            yield Finding(
                topic="adapters",
                verdict=Verdict.FAULT,
                what=f"adapter {adapter.name} in {adapter.folder}: {refusal}",
                fix="correct it, or leave it out of --lora-modules",
            )
    yield _fine(
        "adapters",
        f"{len(targets.sizes)} layers can be updated; up to {limits.max_in_memory} adapters of rank "
        f"{limits.max_rank} in memory, {format_size(found.adapter_bytes)} besides the KV cache",
    )


def _judge(config: WorkerConfig, weights: str, found: Forecast) -> Finding:
    layout, max_model_len = found.layout, found.size.max_model_len
    of_longest = layout.most_blocks(max_model_len)
    places = -(-max_model_len // layout.block_size)  # as many blocks as if one kept all of a token
    num_tokens = found.size.num_blocks * places // of_longest * layout.block_size
    cache = format_size(found.size.num_blocks * found.layout.block_bytes // config.num_stages)
    if config.num_ranks * config.num_stages > 1:
        cache += f" on each of them{_describe_heads(config, found)}"
    if config.num_engines > 1:
        cache += " in each engine"
    what = (
        f"{weights}, KV cache up to {cache} for "
        f"{num_tokens:,} tokens; context window {max_model_len:,} tokens, "
        f"{found.size.num_blocks // of_longest:,} requests of full length at once{_describe_groups(found)}"
    )
    if max_model_len >= found.checkpoint_len:
        return _fine("memory", what)
    return _memory_warning(
        f"{what}; the model could take {found.checkpoint_len:,} tokens",
        fix="give the KV cache more memory, or accept it",
    )


def _describe_groups(found: Forecast) -> str:
    """Say what each group of layers keeps of a request of full length, where there are several."""
    by_group = found.layout.bytes_by_group(found.size.max_model_len)
    if len(by_group) == 1:
        return ""
    sizes = [f"{format_size(num_bytes)} for {name}" for name, num_bytes in by_group.items()]
    return f", each {' and '.join(sizes)}"


def _describe_heads(config: WorkerConfig, found: Forecast) -> str:
    """Say how many KV heads a rank has, where heads are divided."""
    if config.num_ranks == 1:
        return ""
    nums = sorted({shape.num_heads for shape in found.layout.layers.values()})
    return f" with {' or '.join(map(str, nums))} KV head{'s' * (nums != [1])} in each layer"


def _fine(topic: str, what: str) -> Finding:
    return Finding(topic=topic, verdict=Verdict.OK, what=what)


def _memory_warning(what: str, *, fix: str) -> Finding:
    return Finding(topic="memory", verdict=Verdict.WARNING, what=what, fix=fix)

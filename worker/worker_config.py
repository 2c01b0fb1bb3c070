"""Configuration of the worker, and the facts that it reports once the model is loaded."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from scheduler.cache_groups import CacheGroup, LifetimeKind, most_blocks, num_tables
from scheduler.messages import PoolingTask, PromptComputation

MAX_DRAFTS = 16
"""Most drafts of one sequence in a step that can be asked for."""


class DraftMethod(StrEnum):
    """Source of drafts for sequences without a prediction of their own."""

    AUTO = "auto"  # the head of the model's own checkpoint, where it has one that can be taken
    PREDICTION = "prediction"  # none
    NGRAM = "ngram"  # their own text
    SUFFIX = "suffix"  # their own text, and replies that ended of late
    DRAFT_MODEL = "draft_model"  # a smaller model with the same vocabulary
    MTP = "mtp"  # a head of the model's own checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Drafts that the worker proposes. How many of them are verified, the scheduler decides."""

    method: DraftMethod = DraftMethod.PREDICTION
    num_speculative_tokens: int = 8
    """Most drafts of one sequence in a step."""
    prompt_lookup_min: int = 2
    """Tokens that must have gone the same way before."""
    prompt_lookup_max: int = 5
    """Tokens that are compared; of several places the one with the longest match counts."""
    model_path: str = ""
    """Checkpoint folder of the draft model."""
    is_eagle: bool = False
    """Whether it must be a head of EAGLE-3."""


class AdapterFolder(NamedTuple):
    """An adapter that is loaded at start."""

    name: str
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLimits:
    """Limits of the adapters (LoRA) that the worker computes with."""

    max_in_step: int = 0
    """Most different ones that rows use at once. 0: none are computed."""
    max_in_memory: int = 0
    """At least as many."""
    max_rank: int = 64


RANKS_AT_ONCE = 16
"""Ranks of an adapter that a program of a GPU takes: stacks have a multiple of it."""


def padded_rank(max_rank: int) -> int:
    """Return the ranks that a GPU keeps memory for."""
    return -(-max_rank // RANKS_AT_ONCE) * RANKS_AT_ONCE


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Configuration as engine/options/engine_config.py resolves it; the worker measures the rest."""

    model_path: str
    """Checkpoint folder on this machine."""
    checksums_file: str | None = None
    """List of checksums that every file which is read must be in. None: no file is compared."""
    chat_template_file: str | None = None
    """Chat template in the place of the checkpoint's. None: its own."""
    sampling_overrides: dict[str, float] = field(default_factory=dict)
    """Defaults of sampling that win over generation_config.json."""
    config_overrides: dict[str, Any] = field(default_factory=dict)
    """Values that are merged into config.json (worker/checkpoint/overrides.py)."""
    dtype: str = "auto"
    """auto takes the checkpoint's own; else float32, bfloat16 or float16."""
    task: str = "auto"
    """auto takes what the checkpoint is made for (worker/checkpoint/task.py); else generate, embed or
    score."""
    device: str = "auto"
    """auto takes CUDA where torch sees a GPU, else the CPU; or cpu, cuda, cuda:1."""
    max_model_len: int | None = None
    """Context window. None takes the checkpoint's own, cut to the size of the KV cache."""
    block_size: int | None = None
    """Tokens per KV block, 1 to 1024. None: the device's default (worker/devices/device.py)."""
    num_blocks: int | None = None
    """Blocks that sequences can use; the padding block is extra. None measures free memory."""
    gpu_memory_utilization: float = 0.9
    """Share of the device's memory for weights, KV cache and activations together. CUDA only."""
    kv_cache_bytes: int | None = None
    """Memory for the KV cache; on a GPU its most. None: the share of free memory that
    worker/memory_sizes.py names."""
    kv_cache_dtype: str = "auto"
    """auto keeps keys and values as the model computes them; fp8 as floats of 8 bits, with two scales for
    each layer that are measured at load."""
    swap_space_bytes: int = 0
    """Host memory for the KV blocks of preempted sequences. 0: there is no host pool."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    cpu_kernels: str = "auto"
    """auto computes with kernels of our own where they can be compiled; off leaves all to torch."""
    gpu_kernels: str = "auto"
    """auto computes with Triton kernels of our own on a GPU; off leaves all to torch, one step at a time."""
    attention_backend: str = "triton"
    """fa3 and flashinfer leave layers to FlashAttention 3 or FlashInfer where it is installed and a trial at
    load finds it right and faster; triton to our own kernels. GPU kernels only."""
    enforce_eager: bool = False
    """True: no step is captured as a CUDA graph."""
    quantization: str = "none"
    """int8 keeps the layers' weights as integers with a scale for each output; int4 as integers of four bits
    with a scale for each 32 of them; fp8 as floats of 8 bits with a scale for each output."""
    quantize_head: str = "none"
    """int8 keeps the output layer so."""
    activations: str = "none"
    """int8 rounds each row before it is multiplied by codes in groups: CPU kernels only. fp8 rounds what
    floats of 8 bits with one scale for each output multiply: GPU kernels only."""
    speculation: SpeculationConfig = SpeculationConfig()
    adapter_limits: AdapterLimits = AdapterLimits()
    adapters: tuple[AdapterFolder, ...] = ()
    """Adapters to load at start."""
    num_threads: int | None = None
    """Compute threads of each rank on CPU. None: the physical cores that this process may use, divided among
    ranks."""
    num_stages: int = 1
    """Groups of layers that are computed one after the other, each by ranks of its own."""
    num_ranks: int = 1
    """Processes that compute a stage together, each with a shard of its layers. They share the memory
    that is asked for here."""
    num_nodes: int = 1
    """Machines that the ranks are on, as many on each. Memory that is asked for here is that of one."""
    num_engines: int = 1
    """Engines that load at the same time; on CPUs they share cores and free memory, on GPUs the host's."""
    is_replacement: bool = False
    """The engine has been ready before, and the others have their weights already."""

    @property
    def num_devices(self) -> int:
        """Count the devices of all ranks: GPUs where each has one, else the one that all of them share."""
        return self.num_stages * self.num_ranks if self.device == "cuda" else 1

    @property
    def num_gpus_of_a_node(self) -> int:
        """Count the GPUs that the ranks of a machine have, one each; 0 where they share one or have none."""
        return self.num_devices // self.num_nodes if self.device == "cuda" else 0

    @property
    def num_ranks_on_device(self) -> int:
        """Count the ranks of a stage whose caches are on one device; processors of all nodes count as one."""
        return 1 if self.num_devices > 1 else self.num_ranks // self.num_gpus_of_a_stage

    @property
    def num_gpus_of_a_stage(self) -> int:
        """Count the GPUs of a stage's ranks, which share that of their machine; processors count as one."""
        return max(1, self.num_nodes // self.num_stages) if self.device.startswith("cuda") else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """Progress of a load, reported at least every half second."""

    stage: str
    """Phase, for a person: `reading weights`, `measuring memory`, `warming up`."""
    done_bytes: int
    total_bytes: int
    """Bytes of this stage; 0 for one that does not count bytes."""
    elapsed_s: float
    share_before: float = 0.0
    """Share of the whole load that lies before this stage, 0 to 1."""
    share: float = 1.0
    """Share of the whole load that this stage is."""

    @property
    def fraction(self) -> float:
        """Return the finished share of the whole load; below 1 until the last stage is over."""
        done = self.done_bytes / self.total_bytes if self.total_bytes else 0.0
        return self.share_before + self.share * done


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingFacts:
    """Task of a model that pools."""

    task: PoolingTask
    num_dimensions: int
    """Size of its vectors; 1 for scores."""
    prompt: PromptComputation
    """Computation of a prompt that the kind of pooling needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFacts:
    """Facts of an adapter that was read and fits the model."""

    name: str
    identity: str
    """Name and content: another content under the same name is another adapter."""
    folder: str
    rank: int
    """The highest of its modules."""
    num_bytes: int
    """Size of its updates, in the numbers of the model."""
    is_of_tower: bool = False
    """Whether it also updates a tower, which is not computed: its requests have no pictures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFacts:
    """Facts of a model that reads pictures."""

    family: str
    """The whole model's model_type."""
    image_token_id: int
    """Token that stands in a prompt at each position of a picture."""
    num_cache_tokens: int
    """Positions of pictures whose rows are kept until they are computed, and for the next request with the
    same picture. No picture may have more."""
    computes_at_once: bool = False
    """A picture is computed in one step: each of its tokens sees all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts of the loaded model."""

    model_type: str
    num_parameters: int
    weight_bytes: int
    dtype: str
    device: str
    """For a person: `cpu (2 threads)`, `NVIDIA H100 80GB HBM3`."""
    kernels: str = ""
    """For a person: kernels of our own that compute layers, as `avx512-bf16`; empty where none are named."""
    vocab_size: int
    """Rows of the embedding; ids at or above it never reach the model."""
    max_model_len: int
    block_size: int
    num_blocks: int
    """Blocks that sequences can use, ids 1 to num_blocks; block 0 is the worker's own, for padding."""
    kv_cache_bytes: int
    groups: tuple[CacheGroup, ...] = (CacheGroup(),)
    """Layers by how long they keep keys and values. Empty: each sequence has a cache of the model's own, and
    blocks only stand for memory. They cannot be reused, swapped or copied."""
    num_host_blocks: int = 0
    """Blocks of the host pool, ids 1 to num_host_blocks."""
    copy_s_per_block: float = 0.0
    """Measured at load: seconds to copy one block between the pools, one way. 0 without a host pool."""
    runs_ahead: bool = False
    """Steps are computed while the host goes on: the next one can be launched before the result is known."""
    saturating_tokens: int = 0
    """Number of prompt tokens from which the time of a step is linear: more tokens are not computed faster.
    0 if unknown, or if there is no such number."""
    max_drafts: int = 0
    """Most drafts of one sequence that a step can verify. 0: the steps of this model verify none."""
    has_draft_model: bool = False
    """Drafts take time: they are made for sequences for which a plan asks."""
    eos_token_ids: tuple[int, ...]
    default_sampling: dict[str, float] = field(default_factory=dict)
    """Defaults that generation_config.json sets: temperature, top_p, top_k, min_p, repetition_penalty."""
    adapters: tuple[AdapterFacts, ...] = ()
    """Adapters that were loaded at start."""
    num_ranks: int = 1
    """Processes that compute the model together."""
    num_stages: int = 1
    """Groups of layers that compute different steps at the same time."""
    pooling: PoolingFacts | None = None
    """Facts of a model that pools; None for one that generates."""
    vision: VisionFacts | None = None
    """Facts of a model that reads pictures; None for one that reads text alone."""

    @property
    def num_state_blocks(self) -> int:
        """Count the blocks of a sequence's state, as large after one token as after many."""
        fixed = (group for group in self.groups if group.lifetime.kind is LifetimeKind.FIXED)
        return sum(group.num_stripes for group in fixed)

    @property
    def has_points(self) -> bool:
        """Whether some layers can be gone on from at chosen positions only: those with windows or states."""
        return any(group.lifetime.kind is not LifetimeKind.ALL for group in self.groups)

    @property
    def is_paged(self) -> bool:
        """Whether blocks hold keys and values."""
        return bool(self.groups)

    @property
    def num_tables(self) -> int:
        """Tables of blocks that have an entry for each place."""
        return num_tables(self.groups)

    @property
    def bytes_by_group(self) -> dict[str, int]:
        """Size of what a sequence as long as can be keeps, by groups of layers."""
        block_bytes = self.kv_cache_bytes // (self.num_blocks + 1)
        return {
            group.name: block_bytes
            * most_blocks((group,), self.max_model_len, block_size=self.block_size, num_step_tokens=1)
            for group in self.groups
        }

    @property
    def num_full_length(self) -> int:
        """Sequences as long as can be that have room at once, once their prompts are computed."""
        groups, size = self.groups or (CacheGroup(),), self.block_size
        return self.num_blocks // most_blocks(groups, self.max_model_len, block_size=size, num_step_tokens=1)

"""Tiny families that read pictures, their own forward, and a worker with a scheduler before it.

Owns: one configuration for each family, random pictures in the form that a family's tower takes, and the
comparison of every sampled token's logits with those of transformers' own forward over all tokens at once.
Never: an image file: what a processor makes of one is another subject.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from scheduler.config import SchedulerConfig
from scheduler.input_messages import EncoderInput, Payload
from scheduler.messages import SchedulerOutput, SequenceId
from scheduler.scheduler import Scheduler
from tests.fakes import make_sequence
from tests.invariants import check_invariants
from tests.worker.conftest import BLOCK_SIZE, load_worker
from worker.steps.inputs import StepInputs
from worker.steps.protocol import LaunchedStep
from worker.steps.tokens import StepOutcome
from worker.worker import Worker
from worker.worker_config import ModelFacts

VOCABULARY, IMAGE, TEXT_BETWEEN = 600, 590, 580
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ANGLES = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [4, 2, 2],
    "mrope_interleaved": True,
}
_TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 4,
    "out_hidden_size": 64,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
}
_MARKS = {
    "image_token_id": IMAGE,
    "video_token_id": IMAGE + 1,
    "vision_start_token_id": IMAGE + 2,
    "vision_end_token_id": IMAGE + 3,
}


@dataclass(frozen=True)
class Picture:
    """A picture, prepared for a family's tower."""

    content: str
    arguments: dict[str, Tensor]
    num_rows: int
    grid: tuple[int, int, int]
    run: int = 0
    """Places behind which a token of text stands, where there are more; 0: there is none."""

    @property
    def token_ids(self) -> list[int]:
        run = self.run or self.num_rows
        lines = [[IMAGE] * run] * (self.num_rows // run)
        return [*lines[0], *(token for line in lines[1:] for token in (TEXT_BETWEEN, *line))]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Eyed:
    """A family with eyes."""

    config: Callable[[], Any]
    picture: Callable[[torch.Generator, int], Picture]
    """Makes the picture of a number; numbers differ in size where the family has sizes."""
    joins_along: int = 0
    """Dimension along which the arguments of several pictures are joined."""
    type_ids: tuple[str, ...] = ("mm_token_type_ids",)
    pads: bool = False
    """Whether pixels of pictures of different sizes are padded to one size, to be joined."""


def _patches(generator: torch.Generator, number: int) -> Picture:
    rows, columns = ((6, 8), (4, 6), (8, 4))[number % 3]
    pixels = torch.randn(rows * columns, 3 * 2 * 8 * 8, generator=generator)
    arguments = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, rows, columns]])}
    return Picture(f"picture {number}", arguments, rows * columns // 4, (1, rows, columns))


def _qwen3_vl() -> Any:
    text = {**_TEXT, "model_type": "qwen3_vl_text", "rope_parameters": _ANGLES}
    tower = {**_TOWER, "deepstack_visual_indexes": [0, 1]}
    return AutoConfig.for_model("qwen3_vl", text_config=text, vision_config=tower, **_MARKS)


def _qwen3_vl_moe() -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    text = {**_TEXT, **experts, "model_type": "qwen3_vl_moe_text", "rope_parameters": _ANGLES}
    tower = {**_TOWER, "deepstack_visual_indexes": [0, 1]}
    return AutoConfig.for_model("qwen3_vl_moe", text_config=text, vision_config=tower, **_MARKS)


def _qwen3_5(name: str, **experts: object) -> Any:
    kinds = ["linear_attention", "full_attention"] * 2
    states = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2}
    angles = _ANGLES | {"partial_rotary_factor": 1.0}
    text = {**_TEXT, **states, **experts, "model_type": f"{name}_text", "layer_types": kinds}
    text |= {"linear_num_value_heads": 4, "rope_parameters": angles}
    return AutoConfig.for_model(name, text_config=text, vision_config=_TOWER, **_MARKS)


def _qwen3_5_moe() -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    return _qwen3_5("qwen3_5_moe", **experts, shared_expert_intermediate_size=48)


def _qwen2_5_vl() -> Any:
    angles = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    text = {**_TEXT, "model_type": "qwen2_5_vl_text", "rope_parameters": angles}
    windows = {"window_size": 32, "fullatt_block_indexes": [1]}
    return AutoConfig.for_model("qwen2_5_vl", text_config=text, vision_config=_TOWER | windows, **_MARKS)


def _qwen2_vl() -> Any:
    angles = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    text = {**_TEXT, "model_type": "qwen2_vl_text", "rope_parameters": angles}
    tower = {**_TOWER, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    return AutoConfig.for_model("qwen2_vl", text_config=text, vision_config=tower, **_MARKS)


def _glm4v(name: str, **experts: object) -> Any:
    angles = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 2, 2],
        "partial_rotary_factor": 1.0,
    }
    text = {**_TEXT, "model_type": f"{name}_text", "rope_parameters": angles, **experts}
    tower = {**_TOWER, "image_size": 64, "out_hidden_size": 64, "rms_norm_eps": 1e-5}
    marks = {"image_start_token_id": IMAGE + 2, "image_end_token_id": IMAGE + 3}
    return AutoConfig.for_model(name, text_config=text, vision_config=tower, **_MARKS, **marks)


def _glm4v_moe() -> Any:
    routed = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1}
    return _glm4v("glm4v_moe", topk_group=1, moe_intermediate_size=48, first_k_dense_replace=1, **routed)


_SQUARE_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 64,
    "patch_size": 8,
}


def _square(num_tokens: int, *, tiles: bool = False) -> Callable[[torch.Generator, int], Picture]:
    def picture(generator: torch.Generator, number: int) -> Picture:
        shape = (1, number % 3 % 2 + 1, 3, 64, 64) if tiles else (1, 3, 64, 64)
        pixels = torch.randn(*shape, generator=generator)
        num_tiles = shape[1] if tiles else 1
        return Picture(
            f"picture {number}", {"pixel_values": pixels}, num_tokens * num_tiles, (0, 0, 0), num_tokens
        )

    return picture


def _internvl() -> Any:
    tower = {**_SQUARE_TOWER, "image_size": [64, 64], "patch_size": [8, 8]}
    return AutoConfig.for_model(
        "internvl",
        text_config={**_TEXT, "model_type": "qwen2"},
        vision_config=tower,
        image_seq_length=16,
        image_token_id=IMAGE,
        downsample_ratio=0.5,
    )


def _smolvlm(name: str) -> Any:
    return AutoConfig.for_model(
        name,
        text_config={**_TEXT, "model_type": "llama"},
        vision_config=_SQUARE_TOWER,
        scale_factor=2,
        image_token_id=IMAGE,
        pad_token_id=0,
    )


def _mistral3() -> Any:
    tower = {"model_type": "pixtral", "head_dim": 8, "num_channels": 3, **_SQUARE_TOWER, "image_size": 128}
    return AutoConfig.for_model(
        "mistral3",
        text_config={**_TEXT, "model_type": "mistral"},
        vision_config=tower,
        spatial_merge_size=2,
        image_token_index=IMAGE,
        image_token_id=IMAGE,
    )


def _of_any_size(generator: torch.Generator, number: int) -> Picture:
    height, width = ((48, 64), (32, 48), (64, 32))[number % 3]
    pixels = torch.randn(1, 3, height, width, generator=generator)
    arguments = {"pixel_values": pixels, "image_sizes": torch.tensor([[height, width]])}
    rows, columns = height // 16, width // 16
    return Picture(f"picture {number}", arguments, rows * columns, (0, 0, 0), columns)


def _gemma3() -> Any:
    text = {
        "model_type": "gemma3_text",
        "sliding_window": 16,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    }
    return AutoConfig.for_model(
        "gemma3",
        text_config=_TEXT | text,
        vision_config={"model_type": "siglip_vision_model", **_SQUARE_TOWER},
        mm_tokens_per_image=16,
        image_token_index=IMAGE,
        image_token_id=IMAGE,
        boi_token_index=IMAGE + 1,
        eoi_token_index=IMAGE + 2,
    )


def _gemma4(*, seen_whole: bool) -> Any:
    text = {
        "model_type": "gemma4_text",
        "sliding_window": 16,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "num_kv_shared_layers": 0,
        "global_head_dim": 16,
        "use_bidirectional_attention": "vision" if seen_whole else None,
    }
    tower = {
        **_SQUARE_TOWER,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "pooling_kernel_size": 3,
        "position_embedding_size": 64,
        "default_output_length": 16,
    }
    tower.pop("image_size")
    return AutoConfig.for_model(
        "gemma4",
        text_config=_TEXT | text,
        vision_config=tower,
        audio_config=None,
        image_token_id=IMAGE,
        video_token_id=IMAGE + 1,
        audio_token_id=IMAGE + 4,
        boi_token_id=IMAGE + 2,
        eoi_token_id=IMAGE + 3,
    )


def _placed_patches(generator: torch.Generator, number: int) -> Picture:
    rows, columns = ((6, 9), (9, 6), (6, 6))[number % 3]
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)
    arguments = {
        "pixel_values": torch.rand(1, 54, 3 * 8 * 8, generator=generator),
        "image_position_ids": torch.nn.functional.pad(places, (0, 0, 0, 54 - rows * columns), value=-1)[None],
    }
    return Picture(f"picture {number}", arguments, rows * columns // 9, (0, 0, 0))


FAMILIES = {
    "gemma3": Eyed(_gemma3, _square(16), type_ids=("token_type_ids",)),
    "gemma4": Eyed(lambda: _gemma4(seen_whole=False), _placed_patches),
    "gemma4, large": Eyed(lambda: _gemma4(seen_whole=True), _placed_patches),
    "qwen3_vl": Eyed(_qwen3_vl, _patches),
    "qwen3_vl_moe": Eyed(_qwen3_vl_moe, _patches),
    "qwen3_5": Eyed(lambda: _qwen3_5("qwen3_5"), _patches),
    "qwen3_5_moe": Eyed(_qwen3_5_moe, _patches),
    "qwen2_5_vl": Eyed(_qwen2_5_vl, _patches),
    "qwen2_vl": Eyed(_qwen2_vl, _patches),
    "glm4v": Eyed(lambda: _glm4v("glm4v"), _patches),
    "glm4v_moe": Eyed(_glm4v_moe, _patches),
    "internvl": Eyed(_internvl, _square(16), type_ids=()),
    "smolvlm": Eyed(lambda: _smolvlm("smolvlm"), _square(16, tiles=True), joins_along=1, type_ids=()),
    "idefics3": Eyed(lambda: _smolvlm("idefics3"), _square(16, tiles=True), joins_along=1, type_ids=()),
    "mistral3": Eyed(_mistral3, _of_any_size, type_ids=(), pads=True),
}


class Reference:
    """Transformers' own model of a family, with random weights, saved as a checkpoint."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.family, self.folder = name, FAMILIES[name], folder
        torch.manual_seed(7)
        model = AutoModelForImageTextToText.from_config(self.family.config(), attn_implementation="eager")
        self._model = model.float().eval()
        for parameter in self._model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.15)
        self._model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)

    def read_again(self, folder: Path) -> None:
        """Take the weights of a checkpoint that was derived from it."""
        self._model = AutoModelForImageTextToText.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()

    def picture(self, number: int) -> Picture:
        return self.family.picture(torch.Generator().manual_seed(number), number)

    @torch.inference_mode()
    def logits(self, token_ids: list[int], pictures: list[Picture]) -> Tensor:
        ids = torch.tensor([token_ids])
        names = pictures[0].arguments if pictures else ()
        joined = {name: self._joined([each.arguments[name] for each in pictures]) for name in names}
        kinds = {name: (ids == IMAGE).long() for name in self.family.type_ids} if pictures else {}
        arguments = {"attention_mask": torch.ones_like(ids), **kinds, **joined}
        return self._model(input_ids=ids, use_cache=False, **arguments).logits[0]

    def _joined(self, parts: list[Tensor]) -> Tensor:
        if self.family.pads and parts[0].dim() == 4:
            height, width = (max(part.shape[place] for part in parts) for place in (2, 3))
            parts = [
                torch.nn.functional.pad(part, (0, width - part.shape[3], 0, height - part.shape[2]))
                for part in parts
            ]
        return torch.cat(parts, dim=self.family.joins_along)


class Prompt:
    """Tokens with pictures between them."""

    def __init__(self, *parts: int | list[int] | Picture) -> None:
        self.token_ids: list[int] = []
        self.pictures = [part for part in parts if isinstance(part, Picture)]
        self.inputs: list[EncoderInput] = []
        for part in parts:
            if isinstance(part, Picture):
                self.inputs.append(EncoderInput(len(self.token_ids), part.num_tokens, part.content))
                self.token_ids += part.token_ids
            else:
                self.token_ids += [part] if isinstance(part, int) else part


@contextmanager
def payloads_of(pictures: list[Picture], change: Callable[[bytes], bytes] = bytes) -> Iterator[list[Payload]]:
    """Put the bytes of pictures, each once, into shared memory."""
    segments, payloads = [], []
    try:
        for picture in {each.content: each for each in pictures}.values():
            content = change(save(picture.arguments))
            segments.append(segment := SharedMemory(create=True, size=len(content)))
            segment.buf[: len(content)] = content
            payloads.append(Payload(picture.content, segment.name, len(content), picture.grid))
        yield payloads
    finally:
        for segment in segments:
            segment.close()
            segment.unlink()


@dataclass
class Served:
    """A worker over a checkpoint, and a scheduler that may be told of fewer blocks than there are."""

    worker: Worker
    facts: ModelFacts
    changes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.facts.vision is not None
        room = self.facts.vision.num_cache_tokens
        settings: dict[str, Any] = {
            "num_blocks": self.facts.num_blocks,
            "block_size": BLOCK_SIZE,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_model_len": self.facts.max_model_len,
            "watermark": 0.0,
            "num_host_blocks": self.facts.num_host_blocks,
            "groups": self.facts.groups,
            "encoder_cache_tokens": room,
            "inputs_at_once": self.facts.vision.computes_at_once,
            "max_plans_in_flight": 2 if self.facts.runs_ahead else 1,
        }
        self.scheduler = Scheduler(SchedulerConfig(**(settings | self.changes)))
        self.tokens: dict[int, list[int]] = {}
        self.logits: dict[int, list[Tensor]] = {}
        self.failures: dict[SequenceId, str] = {}
        self.drafts: Mapping[SequenceId, tuple[int, ...]] = {}
        self.prompt_logprobs: dict[int, list[float]] = {}
        self._prompts: dict[int, Prompt] = {}
        self._in_flight: deque[tuple[SchedulerOutput, LaunchedStep]] = deque()

    def add(self, prompt: Prompt, payloads: list[Payload], *, max_tokens: int = 4, **changes: object) -> int:
        number = next(_numbers)
        self._prompts[number], self.tokens[number], self.logits[number] = prompt, [], []
        inputs = {"encoder_inputs": tuple(prompt.inputs), "payloads": tuple(payloads)}
        seq = make_sequence(number, prompt.token_ids, max_tokens=max_tokens, **inputs, **changes)
        self.scheduler.add_request(seq, now_s=0.0)
        return number

    def step(self) -> SchedulerOutput:
        """Take the result of a plan, with as many in flight as may be."""
        while self.scheduler.can_schedule:
            if (plan := self.scheduler.schedule(now_s=0.0)).is_empty and self._in_flight:
                break
            with self._noting_logits():
                self._in_flight.append((plan, self.worker.launch(plan)))
        plan, launched = self._in_flight.popleft()
        result = launched.result()
        self.failures |= result.failures
        for output in self.scheduler.update_from_output(plan, result).get(0, []):
            self.tokens[output.sequence_id] += output.token_ids
        self.drafts = result.draft_token_ids
        for sequence_id, found in result.prompt_logprobs.items():
            self.prompt_logprobs.setdefault(sequence_id, []).extend(each.logprob for each in found)
        self.scheduler.update_draft_token_ids(self.drafts)
        check_invariants(self.scheduler)
        return plan

    def run(self) -> None:
        while self.scheduler.has_unfinished_requests:
            self.step()
        for number in self.tokens:  # which the next plan would say, and another scheduler's does not
            self.worker._steps.release(SequenceId(number))  # type: ignore[union-attr]

    def check_tokens(self, number: int, reference: Reference) -> Tensor:
        """Compare the tokens with the likeliest ones, whose logits are returned."""
        prompt = self._prompts[number]
        expected = reference.logits(prompt.token_ids + self.tokens[number], prompt.pictures)
        expected = expected[len(prompt.token_ids) - 1 : -1]
        assert self.tokens[number] == expected.argmax(dim=-1).tolist()
        return expected

    def error(self, number: int, reference: Reference) -> float:
        """Return the largest error of a logit of any sampled token over the size of the largest logit."""
        expected = self.check_tokens(number, reference)
        ours = torch.stack(self.logits[number])
        assert ours.shape == expected.shape
        return float((ours - expected).abs().max() / expected.abs().max())

    @contextmanager
    def _noting_logits(self) -> Iterator[None]:
        steps: Any = self.worker._steps._steps  # type: ignore[attr-defined]
        compute = steps.compute

        def noting(inputs: StepInputs) -> StepOutcome:
            outcome: StepOutcome = compute(inputs)
            # Which logits of drafts count is not known yet.
            for sequence_id, logits in zip(inputs.sequence_ids, outcome.logits_NV, strict=False):
                self.logits[sequence_id].append(logits.clone())
            return outcome

        steps.compute = noting
        try:
            yield
        finally:
            steps.compute = compute


_numbers = itertools.count(1)


def load(folder: Path, **options: object) -> tuple[Worker, ModelFacts]:
    return load_worker(folder, num_blocks=120, swap_space_bytes=1 << 20, **options)

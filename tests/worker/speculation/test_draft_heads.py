"""Heads of a checkpoint draft as transformers' own do, and change no answer."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from scheduler.config import PreemptionMode
from scheduler.messages import ModelRunnerOutput, SamplingParams
from tests.checkpoints import make_checkpoint
from tests.quantized_checkpoints import quantize, stack_experts
from tests.tiers import by_day
from tests.worker.adapters.test_adapted_models import LIMITS
from tests.worker.conftest import MakeCheckpoint, load_worker
from tests.worker.speculation.head_checkpoints import write_head
from tests.worker.speculation.random_requests import TOOL_CALL
from tests.worker.speculation.speculated import Drafts, ModelDrafted, half_right
from tests.worker.speculation.test_drafts_with_states import NUM_ROWS, SHARED, check_same_tokens, requests_of
from tests.worker.speculation.test_verification import Loaded
from worker.devices.device import CpuDevice
from worker.doctor_findings import Verdict
from worker.load.model_kind import find_kind
from worker.load.weight_files import weight_bytes
from worker.speculation.head_layer import DraftHead
from worker.startup import start_drafting, start_head
from worker.steps.head_steps import HeadSteps
from worker.survey.draft_forecast import foresee_draft
from worker.survey.forecast import forecast
from worker.survey.survey import survey
from worker.worker import Worker
from worker.worker_config import DraftMethod, SpeculationConfig, WorkerConfig
from worker.worker_errors import StartupError

MTP = SpeculationConfig(method=DraftMethod.MTP, num_speculative_tokens=4)
AUTO = SpeculationConfig(method=DraftMethod.AUTO)
SETTINGS = {"num_blocks": 64, "swap_space_bytes": 1 << 20}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = [[5, 9, 12, 40, 41, 7, 3, 22, 30], [60, 61], [33, 34, 35, 36, 37, 38]]


def load_with_head(folder: Path, **options: Any) -> Loaded:
    return load_worker(folder, **{**SETTINGS, "speculation": MTP, **options})


class Oracle:
    """The head as transformers loads it, and computes it over whole texts."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        config = self.model.config
        # transformers looks for layer 61 or 92, and for no head of this family.
        names = [rf"^model\.layers\.{config.num_hidden_layers}\."]
        if not hasattr(config, "num_mtp_layers"):
            config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
            names = [r"^mtp\."]
        if getattr(config, "mlp_layer_types", None):
            config.mtp_mlp_layer_types = config.mlp_layer_types[-1:]
        self.model._keys_to_ignore_on_load_unexpected = names
        self.head = MtpModel.from_pretrained(self.model).eval()

    @torch.inference_mode()
    def drafts(self, tokens: list[int], num: int) -> list[int]:
        """Guess greedily behind tokens of which the last is yet to be computed by the model."""
        ids = torch.tensor([tokens])
        hidden = self.model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        found: list[int] = []
        for _ in range(num):
            places = torch.arange(1, ids.shape[1])[None]
            states = self.head.forward_layer(0, hidden, places, None, input_ids=ids[:, 1:])
            found.append(int(self.model.lm_head(states[:, -1]).argmax()))
            ids = torch.cat([ids, torch.tensor([[found[-1]]])], dim=1)
            hidden = torch.cat([hidden, states[:, -1:]], dim=1)
        return found


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        ("glm4_moe", "auto"),
        ("glm4_moe", "off"),
        pytest.param("deepseek_v3", "off", marks=pytest.mark.night),
        pytest.param("glm4_moe_lite", "auto", marks=pytest.mark.night),
        pytest.param("qwen3", "off", marks=pytest.mark.night),
        pytest.param("qwen3_next", "auto", marks=pytest.mark.night),
    ],
)
def test_a_head_guesses_what_transformers_guesses(
    checkpoints: MakeCheckpoint, tmp_path: Path, family: str, kernels: str
) -> None:
    source = checkpoints(family)
    if family == "qwen3_next":  # transformers takes the head's norms from the last layer
        layer_types = ["linear_attention", "linear_attention", "full_attention"]
        source = make_checkpoint(family, tmp_path / "attention last", layer_types=layer_types)
    folder = write_head(tmp_path / family, source)
    check_guesses(load_with_head(folder, cpu_kernels=kernels), Oracle(folder))


def check_guesses(loaded: Loaded, oracle: Oracle, **changes: int) -> None:
    """Compare greedy guesses, some behind others, in prompts that are cut and at all places behind them."""
    requests = [(prompt, GREEDY) for prompt in PROMPTS]
    expected = ModelDrafted(*loaded, num_asked=0).answers(requests)
    changes = {"max_num_batched_tokens": 16, **changes}
    world = ModelDrafted(*loaded, num_asked=3, next_id=100, changes=changes)
    found = world.answers(requests)
    assert [each[0] for each in found] == [each[0] for each in expected]
    num_compared = 0
    for (number, num_generated), offer in world.offers.items():
        if offer:
            text = [*PROMPTS[number], *found[number][0][:num_generated]]
            assert list(offer) == oracle.drafts(text, len(offer)), (number, num_generated)
            num_compared += 1
    assert num_compared > 20


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(*case, marks=[] if place < 1 else pytest.mark.night)
        for place, case in enumerate(
            (
                ("glm4_moe", "int4"),  # its joint is of codes too
                ("qwen3", "gptq"),  # its joint is plain, and no list says so
                ("deepseek_v3", "fp8"),  # and the expansion of its latents is of codes
                ("glm4_moe", "awq"),
                ("qwen3", "float8"),
                ("qwen3_next", "fp8"),
            )
        )
    ],
)
def test_a_head_in_codes_guesses_what_the_numbers_guess_that_they_stand_for(
    checkpoints: MakeCheckpoint, tmp_path: Path, family: str, name: str
) -> None:
    source = checkpoints(family)
    if family == "qwen3_next":
        layer_types = ["linear_attention", "linear_attention", "full_attention"]
        source = make_checkpoint(family, tmp_path / "attention last", layer_types=layer_types)
    plain, quantized = write_head(tmp_path / family, source), tmp_path / name
    quantize(plain, quantized, name)
    check_guesses(load_with_head(quantized), Oracle(plain))


def test_a_head_whose_experts_are_codes_in_one_tensor_is_read(
    checkpoints: MakeCheckpoint, tmp_path: Path
) -> None:
    plain = write_head(tmp_path / "plain", checkpoints("qwen3_moe"))
    quantized = Path(shutil.copytree(plain, tmp_path / "quantized"))
    numbers, experts = load_file(plain / "model.safetensors"), "mtp.layers.0.mlp.experts"
    codes = stack_experts(numbers, experts, ("scale_inv", "activation_scale"))
    codes |= {name: each for name, each in numbers.items() if not name.startswith(f"{experts}.")}
    save_file(codes, quantized / "model.safetensors", metadata={"format": "pt"})
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (quantized / "config.json").write_text(json.dumps(config))
    check_guesses(load_with_head(quantized), Oracle(plain))


def test_a_plain_head_of_a_quantized_model_is_read_though_no_list_excludes_it(
    checkpoints: MakeCheckpoint, tmp_path: Path
) -> None:
    plain, quantized = write_head(tmp_path / "plain", checkpoints("glm4_moe")), tmp_path / "quantized"
    quantize(plain, quantized, "gptq")
    whole, tensors = load_file(plain / "model.safetensors"), load_file(quantized / "model.safetensors")
    head = {name: each for name, each in whole.items() if name.startswith("model.layers.3.")}
    kept = {name: each for name, each in tensors.items() if not name.startswith("model.layers.3.")}
    save_file(kept | head, quantized / "model.safetensors", metadata={"format": "pt"})
    check_guesses(load_with_head(quantized), Oracle(plain))


def changed(folder: Path, source: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Copy a checkpoint with other tensors."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def of_another_size(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(64, 96)


def with_a_wide_layer(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.3.self_attn.o_proj.weight"] = torch.zeros(64, 80)


def with_another_vocabulary(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.3.shared_head.head.weight"] = torch.zeros(64, 64)


def without_a_norm(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.3.input_layernorm.weight"]


def in_eight_bits(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.3.self_attn.o_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)


def with_a_joint_of_codes(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.3.eh_proj.weight"]
    tensors["model.layers.3.eh_proj.qweight"] = torch.zeros(16, 64, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        pytest.param(*case, id=case[0].__name__, marks=[] if place < 1 else pytest.mark.night)
        for place, case in enumerate(
            (
                (of_another_size, "model.layers.3.eh_proj.weight is [64, 96] in the files, and [64, 128]"),
                (with_another_vocabulary, "model.layers.3.shared_head.head.weight is [64, 64] in the files"),
                (with_a_joint_of_codes, "model.layers.3.eh_proj.qweight is I32"),
                (with_a_wide_layer, "model.layers.3.self_attn.o_proj.weight is [64, 80] in the files"),
                (without_a_norm, "layers.0.input_layernorm.weight"),
                (in_eight_bits, "model.layers.3.self_attn.o_proj.weight is F8_E4M3"),
            )
        )
    ],
)
def test_a_head_of_another_model_is_refused_by_name_and_left_out_where_nobody_asked(
    checkpoints: MakeCheckpoint, tmp_path: Path, change: Any, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_head(tmp_path / "whole", checkpoints("glm4_moe"))
    folder = changed(tmp_path / "changed", folder, change)
    with pytest.raises(StartupError) as refused:
        load_with_head(folder)
    assert refused.value.what.startswith("draft head: ")
    assert named in refused.value.what
    assert '"off"' in refused.value.fix
    monkeypatch.setattr(start_head, "LEAST_WITH_HEAD", 0)
    _, facts = load_with_head(folder, speculation=AUTO)
    assert not facts.has_draft_model


def test_a_head_is_taken_by_itself_with_a_model_that_is_large_enough(
    checkpoints: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_head(tmp_path / "glm4_moe", checkpoints("glm4_moe"))
    _, facts = load_with_head(folder, speculation=AUTO)
    assert not facts.has_draft_model
    monkeypatch.setattr(start_head, "LEAST_WITH_HEAD", 0)
    for method, has_head in (
        (DraftMethod.AUTO, True),
        (DraftMethod.PREDICTION, False),
        (DraftMethod.NGRAM, False),
    ):
        _, facts = load_with_head(folder, speculation=SpeculationConfig(method=method))
        assert facts.has_draft_model == has_head, method
    with pytest.raises(StartupError, match=r"draft head: .* has no head that drafts \(MTP\)"):
        load_with_head(checkpoints("glm4_moe"))


def test_a_head_that_was_not_asked_for_is_left_out_where_the_cache_has_no_room_for_it(
    checkpoints: MakeCheckpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(start_head, "LEAST_WITH_HEAD", 0)
    folder = write_head(tmp_path / "glm4_moe", checkpoints("glm4_moe"))
    _, facts = load_with_head(folder, speculation=SpeculationConfig())
    room, longest = facts.kv_cache_bytes, facts.num_blocks * facts.block_size
    options = {"num_blocks": None, "kv_cache_bytes": room, "max_model_len": longest, "block_size": 4}
    with pytest.raises(StartupError, match="max_model_len"):
        load_with_head(folder, **options)
    caplog.set_level("INFO", "worker.load.draft_kind")
    _, without = load_with_head(folder, speculation=AUTO, **options)
    assert not without.has_draft_model
    assert without.num_blocks == facts.num_blocks
    assert "draft head: the KV cache of" in caplog.text
    config = WorkerConfig(model_path=str(folder), device="cpu", speculation=AUTO, **(SETTINGS | options))
    assert all(each.verdict is not Verdict.FAULT for each in survey(config))


def test_a_head_that_fails_its_check_is_left_out_and_the_log_says_what_stays(
    checkpoints: MakeCheckpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: object) -> None:
        raise StartupError("it computes other numbers", fix="report it")

    monkeypatch.setattr(start_head, "LEAST_WITH_HEAD", 0)
    monkeypatch.setattr(start_drafting, "prove_draft", refuse)
    folder = write_head(tmp_path / "glm4_moe", checkpoints("glm4_moe"))
    caplog.set_level("INFO", "worker")
    _, facts = load_with_head(folder, speculation=AUTO)
    assert not facts.has_draft_model
    assert "the KV cache keeps its place for that head all the same" in caplog.text


def test_an_embedding_that_is_tied_to_the_output_layer_is_not_kept_twice_for_a_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads: list[DraftHead] = []

    class Noted(HeadSteps):
        def __init__(self, head: DraftHead, *others: Any) -> None:
            heads.append(head)
            super().__init__(head, *others)

    monkeypatch.setattr(start_drafting, "HeadSteps", Noted)
    source = make_checkpoint("glm4_moe", tmp_path / "tied", tie_word_embeddings=True)
    _, facts = load_with_head(write_head(tmp_path / "glm4_moe", source))
    assert facts.vocab_size not in {len(each) for each in heads[0].parameters()}


ERRORS = (
    RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    SafetensorError("incomplete metadata"),
    AttributeError("rotary"),
    FileNotFoundError("No such file"),
)


@pytest.mark.parametrize("error", by_day(ERRORS, ERRORS[:2]), ids=repr)
def test_any_error_of_a_head_that_was_not_asked_for_leaves_it_out_with_a_line(
    checkpoints: MakeCheckpoint,
    tmp_path: Path,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(start_head, "LEAST_WITH_HEAD", 0)
    monkeypatch.setattr(start_head, "build_head", fail)
    folder = write_head(tmp_path / "glm4_moe", checkpoints("glm4_moe"))
    caplog.set_level("INFO", "worker.load.draft_kind")
    _, facts = load_with_head(folder, speculation=AUTO)
    assert not facts.has_draft_model
    assert f"draft head: {type(error).__name__}: {error}: the model is served without it" in caplog.text
    with pytest.raises(StartupError, match=str(error)):
        load_with_head(folder)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kv_cache_dtype": "fp8", "cpu_kernels": "off"}, "does not go with a draft model"),
        ({"adapter_limits": LIMITS}, "draft head: adapters"),
        ({"num_stages": 2}, "stages verify no drafts yet"),
    ],
)
def test_doctor_refuses_a_head_where_the_start_does(
    checkpoints: MakeCheckpoint, tmp_path: Path, options: dict[str, Any], named: str
) -> None:
    folder = write_head(tmp_path / "glm4_moe", checkpoints("glm4_moe"))
    config = WorkerConfig(
        model_path=str(folder), device="cpu", kv_cache_bytes=4 << 20, speculation=MTP, **options
    )
    *_, last = survey(config)
    assert last.verdict is Verdict.FAULT
    assert named in last.what


def test_doctor_tells_the_bytes_of_a_head_and_foresees_its_blocks(
    checkpoints: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_head, "LEAST_WITH_HEAD", 0)
    folder = write_head(tmp_path / "glm4_moe", checkpoints("glm4_moe"))
    config = WorkerConfig(
        model_path=str(folder),
        device="cpu",
        kv_cache_bytes=4 << 20,
        num_threads=1,
        speculation=AUTO,
    )
    memory = next(each for each in survey(config) if each.topic == "memory")
    assert "of them of its draft head" in memory.what
    kind, device = find_kind(config), CpuDevice(config)
    head = foresee_draft(config, kind, device)
    assert head is not None
    assert head.is_head
    found = forecast(config, kind, device, weight_bytes(config, kind, device), head.kept)
    facts = Worker(config).load(lambda progress: None)
    assert facts.has_draft_model
    assert found.size.num_blocks == facts.num_blocks


@dataclass
class HalfRight(ModelDrafted):
    """A head is asked in each step; what it guesses takes turns with guesses of which most are right."""

    def _drafts(self, made_up: Drafts, result: ModelRunnerOutput) -> Drafts:
        return result.draft_token_ids if self.num_steps % 2 else made_up


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("qwen3_next", PreemptionMode.SWAP),
        pytest.param("qwen3_next", PreemptionMode.AUTO, marks=pytest.mark.night),
        pytest.param("glm4_moe", PreemptionMode.SWAP, marks=pytest.mark.night),
        pytest.param("qwen3_5_text", PreemptionMode.RECOMPUTE, marks=pytest.mark.night),
    ],
)
def test_tokens_are_the_same_with_a_head_over_swaps_restore_points_and_tool_calls(
    checkpoints: MakeCheckpoint, tmp_path: Path, family: str, mode: PreemptionMode
) -> None:
    folder = write_head(tmp_path / family, checkpoints(family))
    loaded = load_with_head(folder, num_blocks=400, swap_space_bytes=1 << 24, max_num_seqs=NUM_ROWS)
    facts, random = loaded[1], Random(7)
    requests = [(prompt, replace(params, max_tokens=16)) for prompt, params in requests_of(random, 6)]
    calls = SamplingParams(temperature=0.8, seed=3, max_tokens=16, grammar=TOOL_CALL)
    requests += [(SHARED[number:], calls) for number in range(2)]
    expected = ModelDrafted(*loaded, num_asked=0).answers(requests)
    tight = {"num_blocks": 3 * facts.num_state_blocks + 24, "preemption_mode": mode}
    for place, changes in enumerate((tight, {"max_num_batched_tokens": 16})):
        world = HalfRight(*loaded, changes, num_asked=3, next_id=1000 * (place + 1))
        for _ in range(2):  # the second time behind restore points, or in blocks of the prefix cache
            check_same_tokens(
                expected, world.answers(requests, half_right(expected, random, facts.vocab_size))
            )
        assert world.num_accepted > 20
        assert world.num_found > 0 or changes is tight
        assert world.num_preemptions > 0 or changes is not tight

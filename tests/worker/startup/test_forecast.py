"""Memory as doctor forecasts it is what loading then finds."""

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import worker.devices.device
from scheduler.cache_groups import ALL_TOKENS, Lifetime, LifetimeKind
from tests.adapters import write_adapter
from tests.checkpoints import FAMILIES, RECURRENT_FAMILIES, make_checkpoint
from tests.families import MATRIX
from tests.quantized_checkpoints import write_quantized
from tests.worker.family_formats import build
from tests.worker.family_trial import tiny_config
from worker.attention.kv_cache import BlockLayout, LayerShape
from worker.checkpoint.checkpoint_files import find_weights, loaded_bytes
from worker.devices.device import CpuDevice
from worker.doctor_findings import Verdict
from worker.load.model_kind import find_kind
from worker.load.weight_files import weight_bytes
from worker.memory_sizes import CPU_SHARE_OF_AVAILABLE, format_size, size_cache
from worker.model.layer_shards import DividedLayout, bytes_of_a_rank
from worker.ranks.ranks import Alone
from worker.ranks.stage import Stage
from worker.startup.cache_memory import _cache_request
from worker.survey.forecast import _size_of_cache, forecast
from worker.survey.survey import survey
from worker.worker import Worker
from worker.worker_config import AdapterFolder, AdapterLimits, WorkerConfig
from worker.worker_errors import StartupError

pytestmark = pytest.mark.night

KV_CACHE_BYTES = 4 << 20
CALCULATOR = Path(__file__).parents[3] / "docs" / "sizing.mjs"


def config_of(folder: Path, **rest: object) -> WorkerConfig:
    config = WorkerConfig(model_path=str(folder), device="cpu", kv_cache_bytes=KV_CACHE_BYTES, num_threads=1)
    return replace(config, **rest)


def test_two_attentions_of_a_layer_and_experts_that_return_what_they_are_given_are_foreseen(
    tmp_path: Path,
) -> None:
    build(tiny_config(next(each for each in MATRIX if each.name == "longcat_flash"))).save_pretrained(
        tmp_path
    )
    check_forecast(config_of(tmp_path))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_forecast_is_what_loading_finds(family: str, tmp_path: Path) -> None:
    check_forecast(config_of(make_checkpoint(family, tmp_path / family)))


def check_forecast(config: WorkerConfig) -> None:
    kind, device = find_kind(config), CpuDevice(config)
    found = forecast(config, kind, device, weight_bytes(config, kind, device))
    facts = Worker(config).load(lambda progress: None)
    assert found.size.num_blocks == facts.num_blocks
    assert found.size.max_model_len == facts.max_model_len
    assert found.layout.block_size == facts.block_size
    assert str(found.layout.dtype).removeprefix("torch.") == facts.dtype


def calculated(script: str) -> dict[str, dict[str, float]]:
    """The JSON that a script prints which has the calculator of docs/sizing.md."""
    whole = (
        f'import {{ MODELS, sizes }} from "{CALCULATOR.as_uri()}"; import {{ readFileSync }} from "node:fs";'
    )
    command = ["node", "--input-type=module", "-e", whole + script]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


@pytest.mark.skipif(shutil.which("node") is None, reason="the calculator of docs/sizing.md needs node")
def test_the_calculator_of_the_documentation_computes_the_same_sizes(tmp_path: Path) -> None:
    found = {}
    for family in ("llama", "qwen2", "qwen3"):
        config = config_of(make_checkpoint(family, tmp_path / family))
        kind, device = find_kind(config), CpuDevice(config)
        num_bytes = weight_bytes(config, kind, device)
        found[config.model_path] = (num_bytes, forecast(config, kind, device, num_bytes).layout)
    asked = {folder: str(layout.dtype).removeprefix("torch.") for folder, (_, layout) in found.items()}
    computed = calculated(
        f"""const asked = Object.entries({json.dumps(asked)}).map(([folder, format]) => [folder,
              sizes(JSON.parse(readFileSync(`${{folder}}/config.json`, "utf-8")),
                    {{ format, sequences: 3, tokens: 7 }})]);
            console.log(JSON.stringify(Object.fromEntries(asked)))"""
    )
    for folder, (num_bytes, layout) in found.items():
        assert computed[folder]["perToken"] == layout.block_bytes / layout.block_size
        assert computed[folder]["cache"] == 21 * computed[folder]["perToken"]
        # Norms and biases are not counted: they are thousandths of a model of a useful size.
        assert computed[folder]["weights"] == pytest.approx(num_bytes, rel=0.02)


@pytest.mark.skipif(shutil.which("node") is None, reason="the calculator of docs/sizing.md needs node")
def test_the_models_of_the_calculator_have_the_parameters_that_were_published() -> None:
    published = {"SmolLM2 135M": 134.5e6, "Qwen3 0.6B": 596e6, "Qwen3 4B": 4.02e9, "Qwen3 8B": 8.19e9}
    script = """console.log(JSON.stringify(Object.fromEntries(
                  Object.entries(MODELS).map(([name, config]) => [name, sizes(config)]))))"""
    computed = {name: found["parameters"] for name, found in calculated(script).items()}
    assert computed == pytest.approx(published | {"Llama 3.1 8B": 8.03e9}, rel=0.003)


def test_all_is_well_with_a_model_that_fits(tiny_model: Path) -> None:
    findings = list(survey(config_of(tiny_model)))
    assert [(each.topic, each.verdict) for each in findings] == [
        ("libraries", "ok"),
        ("device", "ok"),
        ("model", "ok"),
        ("weights", "ok"),
        ("CPU kernels", findings[4].verdict),  # as there is a compiler, or not
        ("memory", "ok"),
    ]
    assert not any(each.fix for each in findings if each.topic != "CPU kernels")


@pytest.mark.parametrize(
    ("options", "topic", "part"),
    [
        ({"device": "cuda:7", "kv_cache_bytes": None}, "device", "not there"),
        ({"max_model_len": 10**6}, "memory", "exceeds the model's own context window"),
        ({"kv_cache_bytes": 2**50}, "memory", "does not fit"),
        ({"num_blocks": 1, "max_model_len": 500}, "memory", "holds"),
        ({"num_blocks": 9, "swap_space_bytes": 2**50}, "memory", "swap space"),
    ],
)
def test_a_fault_is_the_last_finding_and_says_what_to_do(tiny_model: Path, options, topic, part) -> None:
    *before, last = survey(config_of(tiny_model, **options))
    assert (last.topic, last.verdict) == (topic, "fault")
    assert part in last.what
    assert last.fix
    assert all(each.verdict is Verdict.OK for each in before)


def test_a_shorter_context_window_than_the_models_is_a_warning(tiny_model: Path) -> None:
    last = list(survey(config_of(tiny_model, num_blocks=3)))[-1]
    assert last.verdict is Verdict.WARNING
    assert "the model could take 512 tokens" in last.what


def test_a_family_without_a_paged_cache_is_a_warning_that_says_why(tmp_path: Path) -> None:
    *_, last = survey(config_of(make_checkpoint("recurrent_gemma", tmp_path / "recurrent_gemma")))
    assert last.verdict is Verdict.WARNING
    assert "layers of type linear_attention" in last.what


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_states_are_foreseen(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path / family)
    config = config_of(folder, num_blocks=None, kv_cache_bytes=1 << 22)
    *_, last = survey(config)
    facts = Worker(config).load(lambda progress: None)
    assert last.verdict is Verdict.OK
    assert f"{facts.num_full_length:,} requests of full length at once" in last.what
    assert len(facts.bytes_by_group) == len(facts.groups)
    for name, num_bytes in facts.bytes_by_group.items():
        assert f"{format_size(num_bytes)} for {name}" in last.what or len(facts.groups) == 1


def test_a_family_that_is_refused_at_load_is_refused_here(tmp_path: Path) -> None:
    config = config_of(make_checkpoint("bert", tmp_path / "bert"), task="generate")
    *_, last = survey(config)
    assert last.verdict is Verdict.FAULT
    with pytest.raises(StartupError) as caught:
        Worker(config).load(lambda progress: None)
    assert caught.value.fix == last.fix


def test_damaged_weights_are_found_without_being_loaded(tiny_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "damaged"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    *_, last = survey(config_of(folder))
    assert (last.topic, last.verdict) == ("weights", "fault")
    assert "its header promises" in last.what


def test_adapters_are_read_and_what_they_may_take_is_what_loading_allows(
    tiny_model: Path, tmp_path: Path
) -> None:
    limits = AdapterLimits(max_in_step=2, max_in_memory=3, max_rank=8)
    good = AdapterFolder("good", str(write_adapter(tmp_path / "good", tiny_model)))
    bad = AdapterFolder("bad", str(write_adapter(tmp_path / "bad", tiny_model, rank=9)))
    *_, last = survey(config_of(tiny_model, adapter_limits=limits, adapters=(good,)))
    assert (last.topic, last.verdict) == ("adapters", "ok")
    assert "21 layers can be updated; up to 3 adapters of rank 8 in memory" in last.what
    found = list(survey(config_of(tiny_model, adapter_limits=limits, adapters=(good, bad))))
    (fault,) = [each for each in found if each.verdict is Verdict.FAULT]
    assert "adapter bad in " in fault.what
    assert "rank 9, and --max-lora-rank allows 8" in fault.what
    sizes = []
    for num_ranks, num_nodes in ((1, 1), (2, 1), (2, 2)):
        divided = config_of(tiny_model, adapter_limits=limits, num_ranks=num_ranks, num_nodes=num_nodes)
        *_, last = survey(divided)
        sizes.append(float(last.what.split(" in memory, ")[1].split()[0]))
    assert sizes[1] == pytest.approx(2 * sizes[0], abs=0.02), "each rank may have the larger part"
    assert sizes[2] == sizes[0], "each machine has memory of its own"


class StandInGpu(CpuDevice):
    """A device of the host that counts as a GPU."""

    is_gpu = True


def test_adapters_of_a_gpu_are_foreseen_as_their_stacks_are_allocated(tiny_model: Path) -> None:
    found = []
    for max_rank in (9, 16):
        limits = AdapterLimits(max_in_step=1, max_in_memory=1, max_rank=max_rank)
        config = config_of(tiny_model, adapter_limits=limits)
        kind, device = find_kind(config), StandInGpu(config)
        found.append(forecast(config, kind, device, weight_bytes(config, kind, device)).adapter_bytes)
    assert found[0] == found[1]


def memory_line(config: WorkerConfig) -> str:
    (found,) = [each for each in survey(config) if each.topic == "memory"]
    assert found.verdict is Verdict.OK
    return found.what


def num_tokens_of(line: str) -> int:
    """Tokens that the KV cache holds, as the line says."""
    return int(line.partition("for ")[2].partition(" tokens")[0].replace(",", ""))


def test_engines_stages_and_nodes_each_change_the_figures_as_they_divide_memory(tiny_model: Path) -> None:
    alone, engines, stages = (
        memory_line(config_of(tiny_model, **asked)) for asked in ({}, {"num_engines": 2}, {"num_stages": 2})
    )
    assert "for each of 2 engines" in engines
    assert "in each engine" in engines
    assert "on each of 2 ranks, KV cache up to" in stages
    assert "on each of them for" in stages
    assert num_tokens_of(stages) == num_tokens_of(alone)
    nodes = memory_line(config_of(tiny_model, num_stages=2, num_nodes=2))
    assert "on each of 2 ranks on 2 nodes" in nodes
    block_size = CpuDevice(config_of(tiny_model)).default_block_size
    more = num_tokens_of(nodes) - 2 * num_tokens_of(alone)
    assert more in (block_size, 2 * block_size), "one block is for padding, and halves of blocks are joined"


def test_the_weights_of_all_engines_leave_a_cache_what_each_start_finds(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tiny_model, kv_cache_bytes=None, num_engines=2)
    num_bytes = weight_bytes(config, find_kind(config), CpuDevice(config))
    monkeypatch.setattr(worker.devices.device, "available_memory_bytes", lambda: 3 * num_bytes)
    found = forecast(config, find_kind(config), CpuDevice(config), num_bytes)
    assert found.size.num_blocks * found.layout.block_bytes <= CPU_SHARE_OF_AVAILABLE * num_bytes / 2
    assert found.size.num_blocks == Worker(config).load(lambda progress: None).num_blocks


def num_blocks_on_gpus(folder: Path, **split: object) -> int:
    config = config_of(folder, kv_cache_bytes=1 << 24, **split)
    kind, device = find_kind(config), StandInGpu(config)
    return forecast(config, kind, device, weight_bytes(config, kind, device)).size.num_blocks


def test_a_gpu_of_a_node_has_room_for_its_own_layers_as_one_of_a_single_machine_has(tiny_model: Path) -> None:
    one, two = (
        num_blocks_on_gpus(tiny_model, device="cuda", num_stages=2, num_nodes=count) for count in (1, 2)
    )
    assert one == two


def test_a_gpu_of_a_node_that_has_one_has_room_for_the_layers_of_its_node_alone(tiny_model: Path) -> None:
    one, two = (
        num_blocks_on_gpus(tiny_model, device="cuda:0", num_stages=2, num_nodes=count) for count in (1, 2)
    )
    assert two in (2 * one, 2 * one + 1, 2 * one + 2), "one block is for padding"


@pytest.mark.parametrize("split", [{"num_stages": 2}, {"num_ranks": 2}], ids=["stages", "shards"])
@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("lifetime", [ALL_TOKENS, Lifetime(LifetimeKind.WINDOW, 32)], ids=["all", "window"])
def test_a_start_sizes_the_cache_of_a_shared_gpu_as_it_was_foreseen(
    split: dict[str, int], num_nodes: int, lifetime: Lifetime
) -> None:
    config = config_of(Path(), device="cuda:0", num_nodes=num_nodes, **split)
    layers = {place: LayerShape(1, key_dim=8, value_dim=8, lifetime=lifetime) for place in range(4)}
    layout = BlockLayout(layers=layers, block_size=16, dtype=torch.float32)
    ranks, budget_bytes = Alone(), 1 << 20
    ranks.stage = Stage(0, config.num_stages)
    layouts = DividedLayout(layout, layout.only(ranks.stage.layers_of(len(layers))))
    request = _cache_request(config, layouts, budget_bytes // config.num_ranks_on_device, 1 << 20, ranks)
    assert size_cache(request) == _size_of_cache(config, layout, budget_bytes, 1 << 20)


def test_ranks_share_a_gpu_with_those_of_their_own_node_alone(tiny_model: Path) -> None:
    one, two = (
        num_blocks_on_gpus(tiny_model, device="cuda:0", num_ranks=2, num_nodes=count) for count in (1, 2)
    )
    assert two in (2 * one, 2 * one + 1, 2 * one + 2), "one block is for padding"


def test_ranks_are_told_what_each_has_of_weights_and_heads(tiny_model: Path) -> None:
    num_bytes = weight_bytes(
        config_of(tiny_model), find_kind(config_of(tiny_model)), StandInGpu(config_of(tiny_model))
    )
    divided = memory_line(config_of(tiny_model, num_ranks=2))
    assert f"{format_size(num_bytes // 2)} on each of 2 ranks" in divided
    assert "on each of them with 1 KV head in each layer" in divided
    assert num_tokens_of(divided) == num_tokens_of(memory_line(config_of(tiny_model)))
    *_, last = survey(config_of(tiny_model, num_ranks=3))
    assert (last.topic, last.verdict) == ("memory", Verdict.FAULT)
    assert "its 2 KV heads cannot be divided by 3" in last.what


def test_ranks_with_a_gpu_each_have_its_memory_to_themselves(tiny_model: Path) -> None:
    """A cache for twice as many tokens, since each has half of the heads, or of the layers."""
    found = []
    for device, num_ranks, num_stages in (("cuda", 1, 1), ("cuda", 2, 1), ("cuda:0", 2, 1), ("cuda", 1, 2)):
        config = config_of(tiny_model, device=device, num_ranks=num_ranks, num_stages=num_stages)
        kind, stand_in = find_kind(config), StandInGpu(config)
        found.append(forecast(config, kind, stand_in, weight_bytes(config, kind, stand_in)).size.num_blocks)
    alone, own, shared, own_layers = found
    assert 2 * alone <= own <= 2 * alone + 2
    assert alone - 1 <= shared <= alone + 1
    assert 1.4 * alone <= own_layers <= 2 * alone + 2


def test_more_engines_than_the_memory_holds_are_a_fault(tiny_model: Path) -> None:
    found = list(survey(config_of(tiny_model, num_engines=10**7)))
    assert [each.verdict for each in found if each.topic == "memory"] == [Verdict.FAULT]
    assert "for 10000000 engines" in next(each.what for each in found if each.topic == "memory")


class NotingGpu(StandInGpu):
    """Notes the bytes of weights that are expected on it."""

    def foreseen_budget_bytes(self, num_weight_bytes: int) -> int:
        self.num_weight_bytes = num_weight_bytes
        return super().foreseen_budget_bytes(num_weight_bytes)


def test_weights_of_a_gpu_are_parts_of_both_tied_ends_and_all_codes(tmp_path: Path) -> None:
    """Codes are whole until they are cut, after the cache is sized."""
    plain, num_ranks = make_checkpoint("llama", tmp_path / "plain", tie_word_embeddings=True), 2
    model = AutoModelForCausalLM.from_pretrained(plain)
    expected = bytes_of_a_rank(model, num_ranks)
    assert weights_on_one(plain, num_ranks) == pytest.approx(expected, abs=num_ranks)
    coded, _ = write_quantized("llama", "awq", tmp_path)
    whole = loaded_bytes(find_weights(coded), "float32")
    assert whole.codes > whole.total // 4
    assert whole.on_one_of(num_ranks, 1).total <= weights_on_one(coded, num_ranks) < whole.total


def weights_on_one(folder: Path, num_ranks: int) -> int:
    config = config_of(folder, device="cuda", num_ranks=num_ranks)
    kind, device = find_kind(config), NotingGpu(config)
    forecast(config, kind, device, weight_bytes(config, kind, device))
    return device.num_weight_bytes


@pytest.mark.parametrize(
    ("limit_bytes", "said"),
    [(3 << 30, "2.00 GiB of memory available, in a control group with 3.00 GiB"), (None, " available")],
)
def test_doctor_names_the_limit_of_the_control_group(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, limit_bytes: int | None, said: str
) -> None:
    monkeypatch.setattr(worker.devices.device, "available_memory_bytes", lambda: 2 << 30)
    monkeypatch.setattr(worker.devices.device, "control_group_limit_bytes", lambda: limit_bytes)
    (finding,) = (each for each in survey(config_of(tiny_model)) if each.topic == "device")
    assert finding.what.endswith(said)

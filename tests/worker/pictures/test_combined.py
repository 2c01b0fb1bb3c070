"""Pictures with checkpoints in codes and with adapters: logits are transformers' own."""

from pathlib import Path

import pytest
import torch

from tests.adapters import merge_adapter, write_adapter
from tests.quantized_checkpoints import quantize
from tests.worker.adapters.test_adapted_models import LIMITS
from tests.worker.pictures.seeing import Reference, Served, load, payloads_of
from tests.worker.pictures.test_pictures import BOUND, three
from worker.worker_config import AdapterFolder

pytestmark = pytest.mark.night


@pytest.mark.pairs
@pytest.mark.parametrize("kernels", ["off", "auto"])
@pytest.mark.parametrize("name", ["fp8", "float8", "int4", "gptq"])
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "gemma3"])
def test_text_in_codes_beside_a_plain_tower(family: str, name: str, kernels: str, tmp_path: Path) -> None:
    reference = Reference(family, tmp_path / "plain")
    quantize(reference.folder, tmp_path / "codes", name)
    reference.read_again(reference.folder)
    served = Served(*load(tmp_path / "codes", cpu_kernels=kernels))
    prompt = three(reference)
    with payloads_of(prompt.pictures) as payloads:
        number = served.add(prompt, payloads)
        served.run()
    assert served.error(number, reference) < BOUND


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "gemma3"])
def test_an_adapter_reads_pictures_as_its_merged_checkpoint_does(family: str, tmp_path: Path) -> None:
    reference = Reference(family, tmp_path / "plain")
    adapter = write_adapter(tmp_path / "tuned", reference.folder, targets=["o_proj", "down_proj"], seed=2)
    merged = merge_adapter(tmp_path / "merged", reference.folder, adapter)
    options = {"adapter_limits": LIMITS, "adapters": (AdapterFolder("tuned", str(adapter)),)}
    served = Served(*load(reference.folder, **options), {"max_adapters": 2})
    [facts] = served.facts.adapters
    prompt = three(reference)
    with payloads_of(prompt.pictures) as payloads:
        plain = served.add(prompt, payloads)
        tuned = served.add(prompt, payloads, adapter=facts.identity)
        served.run()
    assert served.error(plain, reference) < BOUND
    assert not torch.allclose(*(torch.stack(served.logits[each]) for each in (plain, tuned)), atol=1e-2)
    reference.read_again(merged)
    assert served.error(tuned, reference) < BOUND


def test_an_adapter_that_updates_a_tower_too_is_taken_and_says_so(tmp_path: Path) -> None:
    reference = Reference("gemma3", tmp_path / "plain")
    adapter = write_adapter(tmp_path / "tuned", reference.folder, targets=["o_proj", "out_proj"])
    options = {"adapter_limits": LIMITS, "adapters": (AdapterFolder("tuned", str(adapter)),)}
    _, facts = load(reference.folder, **options)
    assert [each.is_of_tower for each in facts.adapters] == [True]

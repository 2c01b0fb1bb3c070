"""The head of a checkpoint drafts behind pictures what transformers' own does there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from scheduler.config import DraftSupply
from scheduler.step import pace
from tests.tiers import by_day
from tests.worker.pictures.seeing import IMAGE, Prompt, Reference, Served, load, payloads_of
from tests.worker.pictures.test_pictures import pictures_of, three
from tests.worker.speculation.head_checkpoints import write_head
from tests.worker.speculation.speculated import without_asking
from tests.worker.speculation.test_draft_heads import MTP, Oracle
from worker.pictures.outputs import OutputCache


class SeeingOracle(Oracle):
    """The same behind a prompt with pictures."""

    def __init__(self, folder: Path, prompt: Prompt) -> None:
        super().__init__(folder)
        self._prompt = prompt
        masks = self.head.create_masks_for_mtp_layer  # which takes positions of one row alone
        self.head.create_masks_for_mtp_layer = lambda layer, embeds, cache, places: masks(
            layer, embeds, cache, torch.arange(embeds.shape[1])[None]
        )
        self._whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def drafts(self, tokens: list[int], num: int) -> list[int]:
        """See Oracle."""
        whole, ids, found = self._whole.model, torch.tensor([tokens]), []
        arguments = {
            name: torch.cat([each.arguments[name] for each in self._prompt.pictures])
            for name in ("pixel_values", "image_grid_thw")
        }
        rows = torch.cat([*whole.get_image_features(**arguments).pooler_output])
        kinds = (ids == IMAGE).long()
        arguments["mm_token_type_ids"] = kinds[:, :-1]
        hidden = whole(input_ids=ids[:, :-1], use_cache=False, **arguments).last_hidden_state
        for _ in range(num):
            kinds = (ids == IMAGE).long()
            places = whole.get_rope_index(ids, kinds, image_grid_thw=arguments["image_grid_thw"])[0]
            embeds = whole.get_input_embeddings()(ids)
            embeds[kinds.bool()] = rows
            states = self.head.forward_layer(0, hidden, places[..., 1:], None, inputs_embeds=embeds[:, 1:])
            found.append(int(self._whole.lm_head(states[:, -1]).argmax()))
            ids = torch.cat([ids, torch.tensor([[found[-1]]])], dim=1)
            hidden = torch.cat([hidden, states[:, -1:]], dim=1)
        return found


def with_large_weights(folder: Path) -> Path:
    """Make a head's weights as large as those of the model: its guesses depend on all that it reads then."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.startswith("mtp.") and tensor.dim() > 1:
            torch.nn.init.normal_(tensor, std=0.3)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


ASKED: dict[str, Any] = {"max_drafts": 3, "draft_supply": DraftSupply.ASKED, "max_num_batched_tokens": 16}


def check_guesses(served: Served, reference: Reference, folder: Path, prompt: Prompt) -> None:
    """Compare guesses behind a prompt with pictures."""
    oracle, num_compared = SeeingOracle(folder, prompt), 0
    with payloads_of(prompt.pictures) as payloads:
        number = served.add(prompt, payloads, max_tokens=12)
        while served.scheduler.has_unfinished_requests:
            served.step()
            drafts = served.drafts.get(number, ())
            if drafts and not {IMAGE, IMAGE + 1} & {*drafts, *served.tokens[number]}:
                text = prompt.token_ids + served.tokens[number]
                assert list(drafts) == oracle.drafts(text, len(drafts))
                num_compared += 1
    served.check_tokens(number, reference)
    assert num_compared > 5


@pytest.mark.parametrize("has_prefix", by_day([False, True], [True]))
def test_a_head_guesses_behind_pictures_what_transformers_guesses(tmp_path: Path, has_prefix: bool) -> None:
    """Also where what is before them was computed for a prompt of text alone."""
    reference = Reference("qwen3_5", tmp_path / "plain")
    folder = with_large_weights(write_head(tmp_path / "with a head", reference.folder))
    served = Served(*load(folder, speculation=MTP), ASKED)
    prompt = three(reference)
    if has_prefix:
        prefix = [(7 * index + 3) % 500 + 3 for index in range(48)]
        prompt = Prompt(prefix, reference.picture(0), [5, 6, 7, 8, 9, 10])
        served.add(Prompt([*prefix, 11, 12, 13]), [], max_tokens=6)
        served.run()
    check_guesses(served, reference, folder, prompt)


def check_without_rows(served: Served, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a head read a prompt whose picture has made room for another one; it changes no token."""
    monkeypatch.setattr(pace, "_SHORTEST_SLICE_S", 60.0)
    cat, dog = reference.picture(1), reference.picture(0)
    worker, asks = served.worker, False
    launch = worker.launch
    monkeypatch.setattr(worker, "launch", lambda plan: launch(plan if asks else without_asking(plan)))
    monkeypatch.setattr(pictures_of(served), "_outputs", OutputCache(dog.num_rows))
    with payloads_of([cat, dog]) as payloads:
        first = served.add(Prompt([20], cat, [5, 6]), payloads[:1], max_tokens=20)
        while not served.tokens[first]:
            served.step()
        second = served.add(Prompt([30], dog, [5, 6]), payloads[1:])
        while not served.tokens[second]:
            served.step()
        asks = True
        served.run()
    served.check_tokens(first, reference)
    served.check_tokens(second, reference)
    assert served.scheduler.stats().num_draft_tokens > 0


def test_no_hidden_state_waits_to_be_written_where_blocks_get_another_use(tmp_path: Path) -> None:
    """A block that is freed may become one of a recurrent state."""
    reference = Reference("qwen3_5", tmp_path / "plain")
    folder = write_head(tmp_path / "with a head", reference.folder)
    served = Served(*load(folder, speculation=MTP), {"draft_supply": DraftSupply.ASKED})
    waiting: Any = served.worker._steps
    num_before = []
    served.add(Prompt([5, 6, 7]), [], max_tokens=30)
    while served.scheduler.has_unfinished_requests:
        if served.tokens and len(num_before) == 6:
            served.add(Prompt([8, 9]), [], max_tokens=4)
        plan = served.step()
        num_waiting = len(waiting._draft_model._followed)
        if plan.new_sequences or plan.new_blocks or plan.taps or plan.released:
            assert num_waiting <= 1  # this step's
        num_before.append(num_waiting)
    assert max(num_before) > 3

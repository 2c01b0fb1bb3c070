"""The head of a checkpoint drafts behind pictures what transformers' own does there."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from scheduler.config import DraftSupply
from tests.worker.pictures.seeing import IMAGE, Prompt, Reference, Served, load, payloads_of
from tests.worker.pictures.test_pictures import three
from tests.worker.speculation.head_checkpoints import write_head
from tests.worker.speculation.test_draft_heads import MTP, Oracle


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


def test_a_head_guesses_behind_pictures_what_transformers_guesses(tmp_path: Path) -> None:
    reference = Reference("qwen3_5", tmp_path / "plain")
    folder = with_large_weights(write_head(tmp_path / "with a head", reference.folder))
    changes = {"max_drafts": 3, "draft_supply": DraftSupply.ASKED, "max_num_batched_tokens": 16}
    served = Served(*load(folder, speculation=MTP), changes)
    prompt = three(reference)
    oracle = SeeingOracle(folder, prompt)
    num_compared = 0
    with payloads_of(prompt.pictures) as payloads:
        number = served.add(prompt, payloads, max_tokens=12)
        while served.scheduler.has_unfinished_requests:
            served.step()
            if drafts := served.drafts.get(number):
                text = prompt.token_ids + served.tokens[number]
                assert list(drafts) == oracle.drafts(text, len(drafts))
                num_compared += 1
    served.check_tokens(number, reference)
    assert num_compared > 5

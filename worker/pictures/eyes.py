"""Eyes of a model: the tower that reads pictures, and how its rows enter the language model.

Owns: the families whose logits were compared with transformers' own, and the rows that are added behind
layers.

Shapes: P places of pictures, H numbers of a hidden state.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from worker.devices.device import Device
from worker.model.body import TEXT_PARTS, body_name
from worker.pictures.tower_parts import TOWER_ATTENTION, TowerParts, cut_tower
from worker.worker_config import VisionFacts
from worker.worker_errors import SequenceRefused

_IN_THREE_ROWS = frozenset(
    {
        *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
        *("glm4v", "glm4v_moe"),
    }
)
"""Families whose rotation takes time, row and column of a picture apart."""
_SEEN_WHOLE = {"gemma3": False, "gemma4": True}
"""Families of whose pictures each token sees all others, and whether in layers with windows alone."""
FAMILIES = _IN_THREE_ROWS | {"internvl", "mistral3", "smolvlm", "idefics3", *_SEEN_WHOLE}
MOST_PLACES = 16384
"""Places of pictures whose rows are kept: those of the largest picture that a family takes."""

_BYTES_BESIDE = 16384 * 66
"""Memory of a tower by the size of its hidden states: patches of four million pixels, by measured bytes."""
_PRODUCTS_BY_SIZE = 32
"""Multiplications in a part of a tower by the layers of the text and the square of their width: twice the
weights that they have."""


class PictureRows(NamedTuple):
    """Output of a tower for one picture."""

    embeds_PH: Tensor
    deep: tuple[Tensor, ...] = ()
    """Rows [P, H] to be added behind the first layers, one for each."""

    def between(self, start: int, end: int) -> "PictureRows":
        """Return the rows of some of the places."""
        return PictureRows(self.embeds_PH[start:end], tuple([rows[start:end] for rows in self.deep]))

    @classmethod
    def joined(cls, parts: list["PictureRows"]) -> "PictureRows":
        """Put the rows of several pictures, or parts of them, behind each other."""
        deep = zip(*[part.deep for part in parts], strict=True)
        return cls(torch.cat([part.embeds_PH for part in parts]), tuple([torch.cat(rows) for rows in deep]))


class Eyes:
    """The tower of a model that computes steps."""

    def __init__(self, model: Any, device: Device) -> None:
        self._model, self.device = model, device
        config = model.config
        self._embed = model.get_input_embeddings()
        token_id = getattr(config, "image_token_id", None)
        self.image_token_id = int(config.image_token_index if token_id is None else token_id)
        """Token at each place of a picture."""
        is_two_way = getattr(config.get_text_config(), "use_bidirectional_attention", None) == "vision"
        is_causal = config.model_type == "gemma4" and not is_two_way  # the small ones
        self.seen_in_windows_only = None if is_causal else _SEEN_WHOLE.get(config.model_type)
        """Whether layers with windows alone see pictures whole; None: none does."""
        self.merge_size = int(getattr(config.vision_config, "spatial_merge_size", 1))
        self.has_three_rows = config.model_type in _IN_THREE_ROWS
        config.vision_config._attn_implementation = TOWER_ATTENTION
        self._pause: Callable[[], None] | None = None
        self._deep: tuple[Tensor, tuple[Tensor, ...]] | None = None
        for place, layer in enumerate(model.get_submodule(body_name(model)).layers[: _num_deep(config)]):
            layer.register_forward_hook(lambda _layer, _given, hidden, place=place: self._add(place, hidden))
        text = config.get_text_config()
        # A part takes some tenth of a decode step, which reads each weight of the text once.
        num_products = _PRODUCTS_BY_SIZE * text.num_hidden_layers * text.hidden_size**2
        parts = TowerParts(self._may_pause, num_products, device.scale_of_parts)
        for tower in _towers_of(model):
            cut_tower(tower, parts)

    def read(
        self, arguments: dict[str, Tensor], num_tokens: int, pause: Callable[[], None] | None = None
    ) -> PictureRows:
        """Compute a picture's rows; `pause` is called again and again meanwhile, within a few milliseconds.

        Raises SequenceRefused if its arguments do not make `num_tokens` rows, and whatever the tower raises.
        """
        self._pause = pause
        try:
            return self._read(arguments, num_tokens)
        finally:
            self._pause = None

    @torch.inference_mode()
    def _read(self, arguments: dict[str, Tensor], num_tokens: int) -> PictureRows:
        device, dtype = self._model.device, self._model.dtype
        outputs = self._model.get_image_features(
            **{
                name: tensor.to(device, dtype if tensor.is_floating_point() else None)
                for name, tensor in arguments.items()
            }
        )
        rows = PictureRows(
            _joined(outputs.pooler_output),
            tuple(_joined(each) for each in getattr(outputs, "deepstack_features", None) or ()),
        )
        if len(rows.embeds_PH) != num_tokens:
            raise SequenceRefused(f"a picture has {len(rows.embeds_PH)} rows, and {num_tokens} places")
        return rows

    def no_rows(self, num_rows: int) -> PictureRows:
        """Make rows of zeros."""
        config = self._model.config
        shape = num_rows, config.get_text_config().hidden_size
        zeros_PH = torch.zeros(shape, dtype=self._model.dtype, device=self.device.torch_device)
        return PictureRows(zeros_PH, (zeros_PH,) * _num_deep(config))

    @torch.inference_mode()
    def embeds(self, input_ids_1T: Tensor, places_P: Tensor, embeds_PH: Tensor) -> Tensor:
        """Look up the embeddings [1, T, H] of tokens, with the rows of pictures at their places."""
        embeds_1TH: Tensor = self._embed(input_ids_1T)
        return embeds_1TH.index_copy(1, places_P, embeds_PH.to(embeds_1TH.dtype).unsqueeze(0))

    @torch.inference_mode()
    def layer_embeds(self, input_ids_1T: Tensor, places_P: Tensor) -> Tensor | None:
        """Look up what layers add for each token, for padding at pictures; None if they add nothing.

        The family's own way back from embeddings to ids would compare each with the whole vocabulary.
        """
        body = self._model.get_submodule(body_name(self._model))
        if not getattr(body, "hidden_size_per_layer_input", 0):
            return None
        ids_1T = input_ids_1T.index_fill(1, places_P, self._model.config.get_text_config().pad_token_id)
        found: Tensor = body.get_per_layer_inputs(ids_1T)
        return found

    @contextmanager
    def adding(self, places_P: Tensor, deep: tuple[Tensor, ...]) -> Iterator[None]:
        """Add rows behind the first layers at these places of the tokens of a step."""
        self._deep = places_P, deep
        try:
            yield
        finally:
            self._deep = None

    def _may_pause(self) -> None:
        if self._pause is not None:
            self.device.record().wait()  # time is that of the device, which computes later
            self._pause()

    def _add(self, place: int, hidden_1TH: Tensor) -> None:
        if self._deep is not None and self._deep[1]:
            places_P, deep = self._deep
            hidden_1TH[0].index_add_(0, places_P, deep[place])


def bytes_of_pictures(model: Any, dtype: torch.dtype) -> int:
    """Size the rows of pictures that are kept, and what a tower holds for one; 0 for text alone."""
    if not has_eyes(model):
        return 0
    tower = model.config.vision_config
    num_numbers = model.config.get_text_config().hidden_size * (1 + _num_deep(model.config))
    row_bytes = MOST_PLACES * int(num_numbers) * dtype.itemsize
    return row_bytes + int(getattr(tower, "embed_dim", tower.hidden_size)) * _BYTES_BESIDE


def has_eyes(model: Any) -> bool:
    """Tell whether a model reads pictures that come out right."""
    has_tower = hasattr(model, "get_image_features") and hasattr(model.config, "vision_config")
    return has_tower and model.config.model_type in FAMILIES


def _num_deep(config: Any) -> int:
    """Count the layers behind which rows are added."""
    return len(getattr(config.vision_config, "deepstack_visual_indexes", None) or ())


def vision_facts(eyes: Eyes, family: str, num_cache_tokens: int) -> VisionFacts:
    """Say what a model with eyes reads."""
    return VisionFacts(
        family=family,
        image_token_id=eyes.image_token_id,
        num_cache_tokens=num_cache_tokens,
        computes_at_once=eyes.seen_in_windows_only is not None,
    )


def _towers_of(model: Any) -> Iterator[nn.Module]:
    """Yield the modules that read pictures: all but the language model."""
    for name, child in model.model.named_children():
        if name not in TEXT_PARTS:
            yield child


def _joined(rows: Any) -> Tensor:
    """Join what families give as one tensor, or as one for each part of a picture."""
    parts = rows if isinstance(rows, tuple | list) else (rows,)
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in parts])

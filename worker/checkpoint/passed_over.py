"""Tensors of a checkpoint that a model may leave unread, each kind with its reason.

Owns: the whole list. A tensor that the model has no place for and that is not here ends the start.
"""

import re
from collections.abc import Collection, Iterable

from worker.checkpoint.task import Task

_SCALES_OF_VALUES = (
    r"((input|output)_global_scale"
    r"|(input|output|act|activation|[qkv]|kv|kv_cache|prob|prob_output)_(scale|zero_point))"
)
_TOWERS = (
    r"(^|\.)(visual|vision_\w+|vit|img_processor|image_newline|image_encoder|audio_\w+|embed_vision"
    r"|embed_audio|multi_?modal_projector|mm_projector|mm_\w+|mlp1|talker|code2wav|token2wav)(\.|$)"
)
_KINDS = {
    "heads that predict several tokens at once: they are read apart (load/draft_head.py)": (
        r"(^|\.)(mtp|nextn)[._]"
    ),
    "towers for pictures and sound, and what joins them to the text: only text is served": _TOWERS,
    "masks of attention: they are computed": (
        r"(^|\.)(attn|attention|self_attention)\.(bias|masked_bias|causal_mask)$"
    ),
    "angles of rotary embeddings: they are computed": (
        r"(^|\.)(rotary_emb|rotary_pos_emb)\.|(^|\.)rope\.freqs$|(^|\.)inv_freq$|(^|\.)(cos|sin)_cached$"
    ),
    "what training counts, and states of its libraries": r"(^|\.)(num_batches_tracked|_extra_state)$",
    "numbers of positions: they are counted": r"(^|\.)(position_ids|embed_positions\.weights)$",
    "scales of activations and of stored keys and values: neither is rounded by them": (
        rf"(^|\.){_SCALES_OF_VALUES}$"
    ),
    "heads for training: a pooler, one that says how good a text is, one for the order of sentences": (
        r"(^|\.)(pooler|v_head|seq_relationship|sop_classifier)\."
    ),
}
_PASSED_OVER = re.compile("|".join(_KINDS.values()))
# No text is generated from a model that embeds or scores.
_HEADS = re.compile(
    r"(lm_head|cls|classifier|score|qa_outputs|\w*predictions|vocab_\w+|dense|decoder|mlm_head|head)\."
)
_LAYER = re.compile(r"(?:^|\.)layers\.(?P<number>\d+)\.(?P<is_draft>(?:eh_proj|enorm|hnorm|shared_head)\.)?")


def is_passed_over(name: str, *, draft_layers: Collection[int], task: Task) -> bool:
    """Tell whether a tensor without a place changes nothing that is served."""
    layer = _LAYER.search(name)
    return (
        _PASSED_OVER.search(name) is not None
        or (layer is not None and int(layer["number"]) in draft_layers)
        or (task is not Task.GENERATE and _HEADS.match(name) is not None)
    )


def is_of_tower(name: str) -> bool:
    """Tell whether a name is that of a module for pictures or sound, or within one."""
    return re.search(_TOWERS, name) is not None


def draft_layers_in(names: Iterable[str], num_layers: float) -> set[int]:
    """Find the layers beyond the model's number that predict several tokens at once.

    They have tensors that no other layer has, or a number that does not follow the model's last layer. Any
    other layer beyond it tells of a configuration that is another model's.
    """
    layers = [found for name in names if (found := _LAYER.search(name))]
    beyond = {number for found in layers if (number := int(found["number"])) >= num_layers}
    drafting = {int(found["number"]) for found in layers if found["is_draft"]}
    return beyond & drafting if num_layers in beyond else beyond


def is_scale_of_values(last_name: str) -> bool:
    """Tell a scale of activations, or of stored keys and values, among the tensors of a quantized weight."""
    return re.fullmatch(_SCALES_OF_VALUES, last_name) is not None

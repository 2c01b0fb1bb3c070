"""A tiny Qwen3-VL with random weights, with the tokenizer and template of a model for pictures."""

import json
from pathlib import Path

import tokenizers

from tests.checkpoints import write_tokenizer
from tests.engine.media.made_pictures import write_checkpoint
from tests.worker.pictures.seeing import IMAGE, Reference

_MARKS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif -%}
{%- endfor %}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""


def write_seeing_model(folder: Path) -> Path:
    """Write a whole checkpoint whose tokenizer knows the marks of pictures at the model's own ids."""
    Reference("qwen3_vl", folder)
    config = json.loads((folder / "config.json").read_text())
    write_tokenizer(folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    num_fill = IMAGE - backend.get_vocab_size()
    backend.add_tokens([f"<fill {number}>" for number in range(num_fill)])
    backend.add_special_tokens(list(_MARKS))
    assert backend.token_to_id(_MARKS[0]) == IMAGE
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    write_checkpoint(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder

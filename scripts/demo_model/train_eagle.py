"""Train a head of EAGLE-3 for the demo model, and write it into a folder of its own.

    python scripts/demo_model/train_eagle.py --model engine/demo_model --out FOLDER

Owns: the head and its names, in the format of speculators. Its loss and its texts are those of train_head.py.

The head reads the states before three layers of the model and the token behind them. It begins with the
projection that takes the last of the three.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from train_head import open_model, read_arguments, train
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast

from worker.speculation.eagle_layer import EagleHead

TAPPED = (1, 3, 4)


class Trained(nn.Module):
    """A head, with the methods that train_head.py calls."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        config = LlamaConfig(**model.config.to_dict())
        config.num_hidden_layers, config.draft_vocab_size = 1, config.vocab_size
        config.norm_before_residual, config.tapped = False, TAPPED
        size = config.hidden_size
        self.head = EagleHead(config, size, config.vocab_size)
        self.head.body.embed_tokens = model.get_input_embeddings()
        with torch.no_grad():
            self.head.fc.weight.copy_(torch.cat([torch.zeros(size, 2 * size), torch.eye(size)], dim=1))
            self.head.lm_head.weight.copy_(model.lm_head.weight)

    def forward(self, token_ids_BT: Tensor, kept_BTH: Tensor) -> Tensor:
        embeds_BTH = self.head.body.embed_tokens(token_ids_BT)
        joined = torch.cat([embeds_BTH, kept_BTH.to(embeds_BTH.dtype)], dim=-1)
        return self.head.body(inputs_embeds=joined, use_cache=False).last_hidden_state

    def kept(self, outputs: BaseModelOutputWithPast) -> Tensor:
        return self.head.fc(torch.cat([outputs.hidden_states[place] for place in TAPPED], dim=-1))

    def logits(self, _: LlamaForCausalLM, states_NH: Tensor) -> Tensor:
        return self.head.lm_head(self.head.norm(states_NH))


def write(head: EagleHead, folder: Path) -> None:
    """Write the folder: a configuration, and weights under their published names."""
    tensors = {
        name.removeprefix("body."): weight.detach().to(torch.bfloat16).contiguous()
        for name, weight in head.state_dict().items()
        if "embed_tokens" not in name  # the model's
    }
    tensors["d2t"] = torch.zeros(len(head.lm_head.weight), dtype=torch.int64)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    layer = head.body.config.to_dict()
    content = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": layer.pop("draft_vocab_size"),
        "norm_before_residual": layer.pop("norm_before_residual"),
        "eagle_aux_hidden_state_layer_ids": layer.pop("tapped"),
        "transformer_layer_config": layer,
    }
    (folder / "config.json").write_text(json.dumps(content, indent=2))


def main() -> None:
    parser = read_arguments(__doc__.splitlines()[0], "checkpoint folder of the model, which stays as it is")
    parser.add_argument("--out", type=Path, required=True, help="new folder of the head")
    args = parser.parse_args()
    model = open_model(args)
    trained = Trained(model)
    train(trained, model, args)
    write(trained.head, args.out)


if __name__ == "__main__":
    main()

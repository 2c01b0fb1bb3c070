"""Train the draft head of the demo model, and add it to its checkpoint.

    python scripts/demo_model/train_head.py --model engine/demo_model

Owns: the head, its loss, and its names among the weights: those of Qwen's heads (`mtp.fc`, `mtp.layers.0`),
which take a layer of any family. The model itself stays as it is.

The head reads the model's last hidden state at a place and the token behind it, and guesses the token behind
that. It learns the model's own distribution of that token, not the text: a draft is kept where the model
would say the same. Its own output takes the hidden state's place for the second guess, so that is learned as
well.

Shapes: B rows of T tokens, H numbers of a hidden state, V tokens of the vocabulary.
"""

import argparse
import copy
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizer import Encoder
from tokenizers import Tokenizer
from torch import Tensor, nn
from train import BATCH_TOKENS, SEED, Feed, Progress
from transformers import LlamaForCausalLM, LlamaModel
from transformers.modeling_outputs import BaseModelOutputWithPast

DEFAULT_STEPS = 500
_PEAK = 2e-3
_WARMUP_STEPS = 20
_WEIGHT_OF_SECOND = 0.4
_FIRST_SIGHT = 0.3
"""Share of the token's embedding in what the layer is given at first; the rest is the hidden state."""


class Head(nn.Module):
    """One layer between the model's last hidden state and its output layer."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        config = copy.deepcopy(model.config)
        config.num_hidden_layers = 1
        self.body = LlamaModel(config)
        self.body.embed_tokens = model.model.embed_tokens
        self.body.layers[0].load_state_dict(model.model.layers[-1].state_dict())
        self.body.norm.load_state_dict(model.model.norm.state_dict())
        self.token_norm, self.hidden_norm = copy.deepcopy(self.body.norm), copy.deepcopy(self.body.norm)
        size = config.hidden_size
        self.joint = nn.Linear(2 * size, size, bias=False)
        with torch.no_grad():
            for norm in (self.token_norm, self.hidden_norm):
                norm.weight.fill_(1.0)
            self.joint.weight.copy_(torch.cat([_FIRST_SIGHT * torch.eye(size), torch.eye(size)], dim=1))

    def forward(self, token_ids_BT: Tensor, hidden_BTH: Tensor) -> Tensor:
        """Compute hidden states [B, T, H] for the output layer, from tokens and the states before them."""
        embeds_BTH = self.token_norm(self.body.embed_tokens(token_ids_BT))
        joint_BTH = self.joint(torch.cat([embeds_BTH, self.hidden_norm(hidden_BTH)], dim=-1))
        return self.body(inputs_embeds=joint_BTH, use_cache=False).last_hidden_state

    def kept(self, outputs: BaseModelOutputWithPast) -> Tensor:
        """Take the states [B, T, H] that it reads from what the model's body gave."""
        return outputs.last_hidden_state

    def logits(self, model: LlamaForCausalLM, states_NH: Tensor) -> Tensor:
        """Compute logits [N, V] of its outputs."""
        return model.lm_head(states_NH)

    def tensors(self) -> dict[str, Tensor]:
        """Name its weights as the checkpoint has them."""
        found = {
            "mtp.fc.weight": self.joint.weight,
            "mtp.pre_fc_norm_embedding.weight": self.token_norm.weight,
            "mtp.pre_fc_norm_hidden.weight": self.hidden_norm.weight,
            "mtp.norm.weight": self.body.norm.weight,
        }
        layer = self.body.layers[0].state_dict()
        found |= {f"mtp.layers.0.{name}": weight for name, weight in layer.items()}
        return {name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in found.items()}


def loss_of(
    head: Head, model: LlamaForCausalLM, token_ids_BT: Tensor, labels_BT: Tensor
) -> tuple[Tensor, float, float]:
    """Cross entropy with the model's distributions; with the shares of first and second guesses that hold."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            outputs = model.model(input_ids=token_ids_BT, use_cache=False, output_hidden_states=True)
        hidden_BTH = outputs.last_hidden_state
        first_BTH = head(token_ids_BT[:, 1:], head.kept(outputs)[:, :-1])
        second_BTH = head(token_ids_BT[:, 2:], first_BTH[:, :-1])
        losses, rates = [], []
        for place, states_BTH in enumerate((first_BTH, second_BTH), start=1):
            # What the model says behind the token that the guess is behind, where the text is its own.
            wanted_BT = torch.zeros_like(labels_BT[:, place:], dtype=torch.bool)
            wanted_BT[:, :-1] = labels_BT[:, place + 1 :] >= 0
            with torch.no_grad():
                model_NV = model.lm_head(hidden_BTH[:, place:][wanted_BT]).float()
            guess_NV = head.logits(model, states_BTH[wanted_BT]).float()
            losses.append(nn.functional.cross_entropy(guess_NV, model_NV.softmax(dim=-1)))
            rates.append(float((guess_NV.argmax(-1) == model_NV.argmax(-1)).float().mean()))
    return losses[0] + _WEIGHT_OF_SECOND * losses[1], rates[0], rates[1]


def read_arguments(description: str, model_help: str) -> argparse.ArgumentParser:
    """Make the parser of what each training is given."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, required=True, help=model_help)
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS, help="optimiser steps")
    parser.add_argument("--batch-tokens", type=int, default=BATCH_TOKENS, help="tokens of a batch")
    parser.add_argument("--threads", type=int, default=2, help="threads torch may use")
    return parser


def open_model(args: argparse.Namespace) -> LlamaForCausalLM:
    """Load the model that a head is trained for, the same each time."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    return LlamaForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()


def train(head: nn.Module, model: LlamaForCausalLM, args: argparse.Namespace) -> None:
    """Train all weights of a head but its embedding, and none of the model's."""
    model.requires_grad_(requires_grad=False)
    weights = [weight for name, weight in head.named_parameters() if "embed_tokens" not in name]
    optimiser = torch.optim.AdamW(weights, lr=_PEAK, betas=(0.9, 0.98), weight_decay=0.0)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    feed = Feed(Encoder(tokenizer), num_steps=args.steps, batch_tokens=args.batch_tokens)
    progress = Progress(args.steps)
    rates: list[tuple[float, float]] = []
    for step in range(args.steps):
        factor = min((step + 1) / _WARMUP_STEPS, 1.0) * (1.0 - step / args.steps) ** 0.7
        optimiser.param_groups[0]["lr"] = _PEAK * max(factor, 0.02)
        batch = feed.at(step)
        loss, *held = loss_of(head, model, batch.token_ids_BT, batch.labels_BT)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        progress.note(step, loss=loss.item(), num_tokens=batch.num_tokens)
        rates.append((held[0], held[1]))
        if step % 50 == 49 or step == args.steps - 1:
            first, second = (sum(each) / len(each) for each in zip(*rates[-50:], strict=True))
            print(f"right: {first:.1%} of first guesses, {second:.1%} of second ones", flush=True)


def main() -> None:
    args = read_arguments(__doc__.splitlines()[0], "checkpoint folder to add the head to").parse_args()
    model = open_model(args)
    head = Head(model)
    train(head, model, args)
    add_head(args.model / "model.safetensors", head)


def add_head(path: Path, head: Head) -> None:
    """Write the head beside the model's weights, in the place of one that was there."""
    kept = {name: weight for name, weight in load_file(path).items() if not name.startswith("mtp.")}
    save_file(kept | head.tensors(), path, metadata={"format": "pt"})
    path.chmod(0o644)


if __name__ == "__main__":
    main()

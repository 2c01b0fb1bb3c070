"""Train the demo model from nothing: corpus, tokenizer, network, exam.

    python scripts/demo_model/train.py --out engine/demo_model

Owns: the recipe's numbers and the progress lines. Deterministic on one machine: every draw comes from SEED.
"""

import argparse
import os
import time
from pathlib import Path

# A neighbour on the same cores makes spinning threads many times slower; read once, when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch
from batches import Batch, cut_batches, sorted_batches
from copy_heads import plant_copy_heads
from documents import documents, echo_documents, long_documents
from exam import HELD_OUT_KEYS, sit_exam
from model import MAX_POSITIONS, Optimisers, build_model, loss_of, save_model
from tokenizer import BEGIN, END, PAD, Encoder, save_tokenizer, special_id, train_tokenizer
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

SEED = 20260
DEFAULT_STEPS = 3000
TOKENIZER_DOCUMENTS = 30_000
BATCH_TOKENS = 2048
ECHO_SHARE = 0.06
ECHO_EVERY = 30
"""Every second batch is an echo for the first share of the steps, afterwards one in so many."""
LONG_EVERY = 12
"""One batch in so many is of conversations of MAX_POSITIONS tokens."""


class Feed:
    """Which batch a step sees: mostly mixed ones, now and then long ones or echoes."""

    def __init__(self, encoder: Encoder, *, num_steps: int, batch_tokens: int = BATCH_TOKENS) -> None:
        self._num_echo_steps = int(num_steps * ECHO_SHARE)
        mixed = documents(SEED + 1, excluded=HELD_OUT_KEYS)
        long = long_documents(SEED + 2, num_turns=MAX_POSITIONS // 28, excluded=HELD_OUT_KEYS)
        self._mixed = sorted_batches(encoder, mixed, seed=SEED + 3, budget=batch_tokens)
        self._long = cut_batches(
            encoder, long, budget=batch_tokens, max_length=min(MAX_POSITIONS, batch_tokens)
        )
        self._echo = sorted_batches(encoder, echo_documents(SEED + 4), seed=SEED + 5, budget=batch_tokens)

    def at(self, step: int) -> Batch:
        if step % (2 if step < self._num_echo_steps else ECHO_EVERY) == 1:
            return next(self._echo)
        return next(self._long if step % LONG_EVERY == LONG_EVERY - 1 else self._mixed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to write")
    parser.add_argument(
        "--steps", type=int, default=DEFAULT_STEPS, help="optimiser steps; 300 make a first sketch"
    )
    parser.add_argument("--threads", type=int, default=2, help="threads torch may use")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)

    tokenizer = train_tokenizer(seed=SEED, num_documents=TOKENIZER_DOCUMENTS)
    save_tokenizer(tokenizer, args.out, max_length=MAX_POSITIONS)
    print(f"tokenizer: {tokenizer.get_vocab_size()} entries", flush=True)
    model = train(tokenizer, num_steps=args.steps)
    save_model(model, args.out)
    sit_exam(args.out)


def train(tokenizer: Tokenizer, *, num_steps: int) -> LlamaForCausalLM:
    special_ids = {
        key: special_id(tokenizer, name) for key, name in (("bos", BEGIN), ("eos", END), ("pad", PAD))
    }
    model = build_model(seed=SEED, vocab_size=tokenizer.get_vocab_size(), special_ids=special_ids)
    plant_copy_heads(model, seed=SEED)
    print(f"model: {sum(weight.numel() for weight in model.parameters()):,} parameters", flush=True)
    optimisers = Optimisers(model, num_steps=num_steps)
    feed = Feed(Encoder(tokenizer), num_steps=num_steps)
    progress = Progress(num_steps)
    model.train()
    for step in range(num_steps):
        batch = feed.at(step)
        loss_sum, num_labels = loss_of(model, batch.token_ids_BT, batch.labels_BT)
        torch.autograd.backward(loss_sum / num_labels)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimisers.step(step)
        progress.note(step, loss=loss_sum.item() / num_labels, num_tokens=batch.num_tokens)
    return model.eval()


class Progress:
    """Prints a line every few steps: loss, tokens per second, minutes left."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._started_s = self._last_s = time.monotonic()
        self._losses: list[float] = []
        self._tokens = self._all_tokens = 0

    def note(self, step: int, *, loss: float, num_tokens: int) -> None:
        self._losses.append(loss)
        self._tokens += num_tokens
        self._all_tokens += num_tokens
        if step % 50 != 49 and step != self._num_steps - 1:
            return
        now_s = time.monotonic()
        left_min = (now_s - self._started_s) / (step + 1) * (self._num_steps - step - 1) / 60
        print(
            f"step {step + 1}/{self._num_steps}  loss {sum(self._losses) / len(self._losses):.4f}  "
            f"{self._tokens / (now_s - self._last_s):.0f} tokens/s  {self._all_tokens / 1e6:.2f} M tokens  "
            f"{(now_s - self._started_s) / 60:.1f} min gone, {left_min:.1f} left",
            flush=True,
        )
        self._losses, self._tokens, self._last_s = [], 0, now_s


if __name__ == "__main__":
    main()

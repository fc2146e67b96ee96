"""What both sides of `training.py` train on: a model folder and a batch, written as files that need no Midflight to read.

A batch is `batch.npz`: `prompts` [G, P], and of the M = G x n completions, group by group, `completions` [T] laid end to end,
`lengths` [M], `rewards` [M] and `logprobs` [T], the last under the model's own weights.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from midflight.models.load import make_model, save_model
from midflight.text.byte_tokenizer import VOCAB_SIZE, write_byte_tokenizer


@dataclass(frozen=True)
class Shape:
    """One step to compare: a model's vocabulary, and the lengths of what it trains on, in tokens."""

    name: str
    spread: bool
    """Completions of 8 to 64 tokens, each length as likely as another; else all have 64."""
    vocab_size: int = VOCAB_SIZE
    num_groups: int = 8
    group_size: int = 8
    prompt: int = 32
    longest: int = 64
    shortest: int = 8


SHAPES = (
    Shape("equal", spread=False),
    Shape("spread", spread=True),
    Shape("spread-32k", spread=True, vocab_size=32_000),
    Shape("spread-150k", spread=True, vocab_size=150_000),
)


def write(shape: Shape, folder: Path) -> None:
    """The model (3.2 M parameters with a byte vocabulary, float32) and the batch of a shape."""
    write_byte_tokenizer(folder)
    model = make_model(
        vocab_size=shape.vocab_size, hidden_size=256, intermediate_size=768, num_layers=4, num_heads=4, num_kv_heads=2,
        max_context=256, seed=0, dtype="float32",
    )  # fmt: skip
    save_model(model, folder)
    draw = np.random.default_rng(0)
    size = shape.num_groups * shape.group_size
    lengths = draw.integers(shape.shortest, shape.longest + 1, size) if shape.spread else np.full(size, shape.longest)
    lengths[0] = shape.longest
    prompts = draw.integers(0, 256, (shape.num_groups, shape.prompt))
    completions = draw.integers(0, 256, int(lengths.sum()))
    # In the thousands, so that the small constants which the two sides add to a group's deviation don't show.
    rewards = draw.normal(0, 1000, size).astype(np.float32)
    logprobs = _logprobs(model, np.repeat(prompts, shape.group_size, axis=0), completions, lengths)
    np.savez(folder / "batch.npz", prompts=prompts, completions=completions, lengths=lengths, rewards=rewards, logprobs=logprobs)
    (folder / "shape.json").write_text(json.dumps(asdict(shape)))


@torch.inference_mode()
def _logprobs(model: PreTrainedModel, prompts: np.ndarray, completions: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    found = []
    for prompt, answer in zip(prompts, np.split(completions, np.cumsum(lengths)[:-1]), strict=True):
        logits = model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        found.append(logits.log_softmax(-1)[torch.arange(len(answer)), torch.tensor(answer)])
    return torch.cat(found).numpy()

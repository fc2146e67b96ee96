"""Small models with made weights, engines over them, and real steps of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from harness.processes import ROOT
from midflight.engines.embedded.engine import EmbeddedEngine
from midflight.models.creation import make_model
from midflight.models.names import named_tensors
from midflight.ports import WeightReceiver
from midflight.text.byte_tokenizer import END, VOCAB_SIZE, byte_tokenizer, write_byte_tokenizer
from midflight.text.tokenizer import Tokenizer
from midflight.trainer.credit import Scoring
from midflight.trainer.objective import Objective
from midflight.trainer.optimizer import Adam
from midflight.trainer.schedule import Schedule
from midflight.trainer.trainer import PolicyTrainer
from midflight.types import GenerateRequest, PackedBatch, SamplingParams, Version
from midflight.types.facts import record_nothing
from midflight.weights.transports.select import receiver

PRETRAIN_RATE = 1e-3
GROUP = 8
"""Rollouts of a group in `made_groups`."""
PROMPT = 32
"""Tokens of a prompt in `made_groups`."""
Tensors = dict[str, Tensor]


def small_model(
    hidden: int = 256,
    *,
    layers: int = 4,
    heads: int = 4,
    inner: int | None = None,
    vocab_size: int = VOCAB_SIZE,
    context: int = 256,
    seed: int = 0,
) -> PreTrainedModel:
    """A model in float32 with random weights: 3.2 million with the defaults. Keys and values have
    half as many heads; the feed-forward layers are three times as wide unless `inner` says how
    wide.
    """
    return make_model(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=inner or 3 * hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads // 2,
        max_context=context,
        seed=seed,
        dtype="float32",
    )


def write_model(model: PreTrainedModel, folder: Path) -> None:
    """The model with the tokenizer of bytes, as a folder that can be served."""
    model.save_pretrained(folder)
    write_byte_tokenizer(folder)


def loaded_byte_tokenizer() -> Tokenizer:
    """The tokenizer of bytes, without a template."""
    return Tokenizer(byte_tokenizer(), template=None, eos_token_ids=frozenset({END}))


def embedded_engine(
    model: PreTrainedModel,
    *,
    running: int,
    context: int,
    own_receiver: WeightReceiver | None = None,
    **more: Any,
) -> EmbeddedEngine:
    """An engine in this process, of so many requests at once. `more` goes to `EmbeddedEngine`."""
    settings: dict[str, Any] = {"max_batch_tokens": 2048, "packs": True, **more}
    return EmbeddedEngine(
        model,
        tokenizer=loaded_byte_tokenizer(),
        name="benchmark",
        receiver=own_receiver or receiver(),
        record=record_nothing,
        max_running=running,
        max_context=context,
        pause_lease_seconds=60,
        **settings,
    )


def requests(
    prompts: Sequence[Sequence[int]],
    *,
    answer: int,
    seed: int = 0,
    temperature: float = 1.0,
) -> list[GenerateRequest]:
    """One request for each prompt, for exactly `answer` tokens, with a seed of its own."""
    made: list[GenerateRequest] = []
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(
            max_tokens=answer, ignore_eos=True, seed=seed + number, temperature=temperature
        )
        made.append(GenerateRequest(str(number), tuple(prompt), len(prompt), sampling))
    return made


# --- Training -------------------------------------------------------------------------------------


def policy_trainer(model: PreTrainedModel, *, rate: float = 1e-4, **more: Any) -> PolicyTrainer:
    """A trainer with the default loss. `more` goes to `PolicyTrainer`."""
    return PolicyTrainer(
        model, Objective(), scoring=Scoring(), schedule=Schedule(), adam=Adam(rate), **more
    )


def made_groups(version: Version, *, number: int, answer: int, first: int = 0) -> PackedBatch:
    """Groups `first` to `first + number` of a batch, with random tokens and rewards. A group has
    the same content, whichever others come with it.
    """
    rows = number * GROUP
    prompts: list[np.ndarray] = []
    answers: list[np.ndarray] = []
    rewards: list[np.ndarray] = []
    for group in range(first, first + number):
        draw = np.random.default_rng((version, group))
        prompts.append(np.repeat(draw.integers(0, 256, (1, PROMPT)), GROUP, axis=0))
        answers.append(draw.integers(0, 256, (GROUP, answer)))
        rewards.append(draw.integers(0, 4, GROUP))
    length = PROMPT + answer
    tokens = np.concatenate([np.concatenate(prompts), np.concatenate(answers)], axis=1)
    mask = np.tile(np.arange(length) >= PROMPT, rows)
    return PackedBatch(
        lease=1,
        train_version=version,
        token_ids=tokens.astype(np.int32).ravel(),
        loss_mask=mask,
        logprobs=np.full(len(mask), -5.5, np.float32),
        versions=np.full(len(mask), version, np.int32),
        kv_versions=np.full(len(mask), version, np.int32),
        row_offsets=np.arange(0, len(mask) + 1, length, dtype=np.int32),
        row_rollout=np.arange(rows, dtype=np.int32),
        rewards=np.concatenate(rewards).astype(np.float32),
        rollout_group=np.repeat(np.arange(number), GROUP).astype(np.int32),
        truncated=np.zeros(rows, np.bool_),
    )


def source_batches() -> Iterator[Tensor]:
    """Eight pieces of 129 bytes of this repository's sources, again and again others."""
    files = sorted((ROOT / "src").rglob("*.py"))
    text = np.frombuffer(b"\n".join(file.read_bytes() for file in files), np.uint8)
    while True:
        starts = torch.randint(0, len(text) - 129, (8,)).tolist()
        pieces = [text[start : start + 129].astype(np.int64) for start in starts]
        yield torch.from_numpy(np.stack(pieces))


def train_on_bytes(
    model: nn.Module,
    batches: Iterator[Tensor],
    *,
    rate: float,
    steps: int,
    after: Callable[[], object] = lambda: None,
) -> list[float]:
    """The losses of so many AdamW steps. `after` is called after each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    losses: list[float] = []
    for _ in range(steps):
        ids = next(batches)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        after()
    return losses


def versions_of(
    model: nn.Module,
    batches: Iterator[Tensor],
    *,
    rate: float,
    steps: int,
    dtype: torch.dtype = torch.float32,
) -> list[Tensors]:
    """The weights after each of so many steps, and those before them. As many steps go before,
    which let AdamW's averages settle.
    """
    made: list[Tensors] = []

    def keep() -> None:
        tensors = named_tensors(model)
        made.append({name: tensor.to(dtype, copy=True) for name, tensor in tensors.items()})

    train_on_bytes(model, batches, rate=rate, steps=2 * steps, after=keep)
    return made[-steps - 1 :]


def source_prompts(batches: Iterator[Tensor], *, number: int, length: int) -> list[list[int]]:
    """The beginnings of so many pieces of the sources."""
    prompts: list[list[int]] = []
    while len(prompts) < number:
        for row in next(batches).tolist():
            prompts.append(row[:length])
    return prompts[:number]

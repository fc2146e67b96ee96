"""What keys of old weights cost: the divergence of what `keep` samples after a commit from the
policy that it is labelled with.

A small model is trained on the bytes of this repository's sources, then takes real AdamW steps;
each step is a version. The embedded engine answers while versions are committed in the middle of
its answers, in `keep` and in `recompute`. Then `transformers` computes what the version that is
said to have sampled each token would have given it, had all keys been its own.

    python benchmarks/old_keys.py [--rates 1e-5 1e-4 4e-4] [--commits 4] [--every 64] [--answers 64]

| column | means |
|---|---|
| age | versions that the oldest keys are old |
| 1-8, 9-32, 33+ | tokens since the last commit: estimates k3 (and k1) of KL(what sampled, version it is labelled with), nats per token |
| max | the largest difference of a log-probability |
| one version | k3 of the version and the one before it, on the same tokens: what a token of age 1 costs the trainer anyway |
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import aclosing
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import torch
from delta import PRETRAIN_RATE, Tensors, batches, train, versions
from smoke import options_of
from torch import Tensor
from transformers import PreTrainedModel

from midflight.engines.embedded.engine import EmbeddedEngine
from midflight.models.creation import make_model
from midflight.models.names import assign
from midflight.text.byte_tokenizer import END, VOCAB_SIZE, byte_tokenizer
from midflight.text.tokenizer import Tokenizer
from midflight.trainer.formulas.diagnostics import k1, k3
from midflight.types import GenerateRequest, PauseMode, SamplingParams, Version
from midflight.types.facts import unheard
from midflight.weights.transports.select import publisher, receiver

DISTANCES = {"1-8": (1, 8), "9-32": (9, 32), "33+": (33, 10**9)}
PROMPT_TOKENS = 64
AT_ONCE = 32
CONTEXT = 1024
MODES = (PauseMode.KEEP, PauseMode.RECOMPUTE)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-5, 1e-4, 4e-4])
    parser.add_argument("--commits", type=int, default=4, help="in each answer")
    parser.add_argument("--every", type=int, default=64, help="tokens between them")
    parser.add_argument("--answers", type=int, default=64)
    parser.add_argument("--pretrain", type=int, default=300)
    options = options_of(parser, rates=[1e-4], commits=1, every=4, answers=8, pretrain=2)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = new_model()
    data = batches()
    loss = train(model, data, rate=PRETRAIN_RATE, steps=options.pretrain)[-1]
    start = deepcopy(model.state_dict())
    print(f"loss {loss:.2f} nats per byte after {options.pretrain} steps\n")
    print(
        f"| rate | mode | age | {' | '.join(DISTANCES)} | max | one version "
        f"|\n|---|---|---|{'---|' * len(DISTANCES)}---|---|"
    )
    for rate in options.rates:
        model.load_state_dict(start)
        made = versions(model, data, rate, options.commits, torch.float32)
        prompts = [
            row[:PROMPT_TOKENS] for _ in range(options.answers // 8) for row in next(data).tolist()
        ]
        for mode in MODES:
            answers = asyncio.run(answered(made, prompts, mode, every=options.every))
            report(rate, mode, compared(made, answers))


def new_model() -> PreTrainedModel:
    """The demo's size."""
    return make_model(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        max_context=CONTEXT,
        seed=0,
        dtype="float32",
    )


def report(rate: float, mode: PauseMode, table: Table) -> None:
    for age in sorted(set(table.age.tolist())):
        cells = [
            f"{k3(r):.1e} ({k1(r):+.1e})"
            for r in (table.log_rho[table.at(age, where)] for where in DISTANCES)
        ]
        rows = table.age == age
        largest = table.log_rho[rows].abs().max()
        print(
            (
                f"| {rate:g} | {mode.value} | {age} | {' | '.join(cells)} | {largest:.1e} | "
                f"{k3(table.one_version[rows]):.1e} |"
            ),
            flush=True,
        )


# --- Generating -----------------------------------------------------------------------------------


@dataclass
class Answer:
    """Of each token: id, log-probability when it was sampled, version, version of the oldest
    key.
    """

    prompt: list[int]
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[Version] = field(default_factory=list[Version])
    kv_versions: list[Version] = field(default_factory=list[Version])


async def answered(
    made: list[Tensors], prompts: list[list[int]], mode: PauseMode, *, every: int
) -> list[Answer]:
    """All versions go live in each answer, one after the other; `AT_ONCE` answers at a time."""
    answers = [Answer(prompt) for prompt in prompts]
    for first in range(0, len(answers), AT_ONCE):
        await answer_some(made, answers[first : first + AT_ONCE], mode, every=every, seed=first)
    return answers


async def answer_some(
    made: list[Tensors], answers: list[Answer], mode: PauseMode, *, every: int, seed: int
) -> None:
    model = new_model()
    assign(model, {name: t.clone() for name, t in made[0].items()})
    engine = EmbeddedEngine(
        model,
        tokenizer=Tokenizer(byte_tokenizer(), template=None, eos_token_ids=frozenset({END})),
        name="old-keys",
        receiver=receiver(),
        record=unheard,
        max_running=AT_ONCE,
        max_batch_tokens=2048,
        max_context=CONTEXT,
        pause_lease_seconds=60,
    )
    sampling = SamplingParams(max_tokens=every * len(made), ignore_eos=True)
    progress = asyncio.Condition()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(engine.run())
        reading = [
            tasks.create_task(read(engine, a, sampling, progress, seed=seed + i))
            for i, a in enumerate(answers)
        ]
        with (
            tempfile.TemporaryDirectory() as folder,
            publisher("shared_memory", name="midflight-old-keys", folder=Path(folder)) as sender,
        ):
            for version in range(1, len(made)):
                await engine.stage(sender.publish(version, made[version]))
                async with progress:
                    await progress.wait_for(
                        lambda: min(len(a.tokens) for a in answers) >= every * version  # noqa: B023
                    )
                await engine.pause(mode)
                await engine.commit(version)
                await engine.resume()
                sender.release(version)
        await asyncio.wait(reading)
        running.cancel()


async def read(
    engine: EmbeddedEngine,
    answer: Answer,
    sampling: SamplingParams,
    progress: asyncio.Condition,
    *,
    seed: int,
) -> None:
    request = GenerateRequest(
        str(seed), tuple(answer.prompt), len(answer.prompt), sampling.changed(seed=seed)
    )
    async with aclosing(engine.generate(request)) as chunks:
        async for chunk in chunks:
            answer.tokens += chunk.token_ids
            answer.logprobs += chunk.logprobs
            answer.versions += [chunk.version] * len(chunk.token_ids)
            answer.kv_versions += [chunk.kv_version] * len(chunk.token_ids)
            async with progress:
                progress.notify_all()


# --- Comparing ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """One row for each token after the first commit of its answer."""

    age: Tensor
    distance: Tensor
    log_rho: Tensor
    """Log-probability under the version it is labelled with, less that when it was sampled."""
    one_version: Tensor
    """The same of the version before it, less that of its version."""

    def at(self, age: int, where: str) -> Tensor:
        low, high = DISTANCES[where]
        return (self.age == age) & (self.distance >= low) & (self.distance <= high)


@torch.no_grad()
def compared(made: list[Tensors], answers: list[Answer]) -> Table:
    ids = torch.tensor([a.prompt + a.tokens for a in answers])
    sampled, version, kv_version = (
        torch.tensor([getattr(a, what) for a in answers])
        for what in ("logprobs", "versions", "kv_versions")
    )
    under = torch.stack(list(logprobs(made, ids)))
    own = under.gather(0, version[None])[0]
    before = under.gather(0, (version - 1).clamp(min=0)[None])[0]
    after = version > 0
    return Table(
        *(
            column[after]
            for column in (
                (version - kv_version),
                distances(version),
                (own - sampled).double(),
                (before - own).double(),
            )
        ),
    )


def logprobs(made: list[Tensors], ids: Tensor) -> Iterator[Tensor]:
    """Of the answers' tokens under each version, all keys its own; in `transformers`."""
    model = new_model()
    for tensors in made:
        assign(model, tensors)
        rows = [
            model(input_ids=part).logits[:, PROMPT_TOKENS - 1 : -1].log_softmax(-1)
            for part in ids.split(AT_ONCE)
        ]
        yield torch.cat(rows).gather(-1, ids[:, PROMPT_TOKENS:, None])[..., 0]


def distances(version: Tensor) -> Tensor:
    """Of each token from the first one of its version in its answer, from 1."""
    place = torch.arange(version.shape[1]).expand_as(version)
    changed = torch.cat(
        [torch.ones_like(version[:, :1], dtype=torch.bool), version[:, 1:] != version[:, :-1]], 1
    )
    return place - torch.where(changed, place, 0).cummax(1).values + 1


if __name__ == "__main__":
    main()

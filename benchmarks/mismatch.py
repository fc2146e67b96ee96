"""The difference between the log-probabilities of engine and trainer, and what it costs to make
them alike.

    python benchmarks/mismatch.py --parts keys [--rates 1e-5 1e-4 4e-4] [--commits 4] [--every 64]
    python benchmarks/mismatch.py --parts routing [--pretrain 300] [--answers 64] [--tokens 128]
    python benchmarks/mismatch.py --parts masks [--vocabulary 151936] [--rows 8]
    python benchmarks/mismatch.py --parts deterministic --engine vllm \\
        --python .venv-vllm/bin/python [--device cuda] [--dtype bfloat16]

**keys**: the divergence of what `keep` samples after a commit from the policy that it is labelled
with. A small model is trained on the bytes of this repository's sources, then takes real AdamW
steps; each step is a version. The embedded engine answers while versions are committed in the
middle of its answers, in `keep` and in `recompute`. Then `transformers` computes what the version
that is said to have sampled each token would have given it, had all keys been its own.

| column | means |
|---|---|
| age | versions that the oldest keys are old |
| 1-8, 9-32, 33+ | tokens since the last commit: estimates k3 (and k1) of KL(what sampled, version it is labelled with), nats per token |
| max | the largest difference of a log-probability |
| one version | k3 of the version and the one before it, on the same tokens: what a token of age 1 costs the trainer anyway |

**routing**: routing replay of a mixture of experts whose engine computes in half precision. A small
Qwen3-MoE is trained on the same bytes. The embedded engine samples with it in bfloat16; the trainer
computes the same tokens in float32 under the same weights, with the experts that the engine
recorded and with its own. Then the same in float32.

| column | means |
|---|---|
| other experts | share of (token, layer) for which the trainer, left alone, chooses another set than the engine |
| mean, max, k3 | of the difference of log-probabilities of sampled tokens, in nats; k3 estimates the divergence per token |
| bytes | of a token's record |

**masks**: training on truncated turns: bytes of a token's record, the engine's sampling with and
without it, the trainer's scores over it, and the mismatch that is left.

**deterministic**: the same run without and with `engine.deterministic`, in turns. Without it, what
shares a step with a token changes how the token's sums are rounded; with it, only the trainer's
other kernels are left. The servers have such kernels on GPUs alone: on a CPU only the run without
it is made, and the table says so. The mismatch is that of tokens whose keys are of one version
(`mismatch/same_keys`), in nats, the mean of the steps; tokens/s of generation.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from harness.arguments import Arguments
from harness.models import (
    PRETRAIN_RATE,
    Tensors,
    embedded_engine,
    requests,
    small_model,
    source_batches,
    source_prompts,
    train_on_bytes,
    versions_of,
)
from harness.report import Report, make_parts
from harness.rounds import timed, turns
from harness.runs import DEMO, SMALL, journal, train, train_command
from torch import Tensor
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from midflight.engines.embedded.engine import EmbeddedEngine
from midflight.engines.embedded.sampler import SamplingBatch, sample
from midflight.models.names import assign, in_dtype, named_tensors
from midflight.models.routing import Routers
from midflight.text.byte_tokenizer import VOCAB_SIZE
from midflight.trainer.formulas.diagnostics import k1, k3
from midflight.trainer.model.microbatch import Predictions, predictions_of, split
from midflight.trainer.model.policy import Policy
from midflight.trainer.model.scores import SamplingMasks, token_scores
from midflight.types import GenerateRequest, PauseMode, UInt8, Version
from midflight.types.sampling_masks import unpack_kept
from midflight.weights.transports.select import publisher

PROMPT_TOKENS = 64
AT_ONCE = 32
T = TypeVar("T")


# --- Keys of old weights --------------------------------------------------------------------------

DISTANCES = {"1-8": (1, 8), "9-32": (9, 32), "33+": (33, 10**9)}
CONTEXT = 1024


def keys(options: argparse.Namespace, report: Report) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = demo_model()
    batches = source_batches()
    losses = train_on_bytes(model, batches, rate=PRETRAIN_RATE, steps=options.pretrain)
    start = deepcopy(model.state_dict())
    report.say(f"loss {losses[-1]:.2f} nats per byte after {options.pretrain} steps")
    table = report.table("rate", "mode", "age", *DISTANCES, "max", "one version")
    for rate in options.rates:
        model.load_state_dict(start)
        versions = versions_of(model, batches, rate=rate, steps=options.commits)
        prompts = source_prompts(batches, number=options.answers, length=PROMPT_TOKENS)
        for mode in (PauseMode.KEEP, PauseMode.RECOMPUTE):
            answers = asyncio.run(answered(versions, prompts, mode, every=options.every))
            tokens = compared(versions, answers)
            for age in sorted(set(tokens.age.tolist())):
                table.row(f"{rate:g}", mode.value, age, *age_cells(tokens, age))


def demo_model() -> PreTrainedModel:
    """Makes a model of the demo's size."""
    return small_model(128, context=CONTEXT)


@dataclass
class Answer:
    """An answer has for each token: id, log-probability when it was sampled, version, version of
    the oldest key.
    """

    prompt: list[int]
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[Version] = field(default_factory=list[Version])
    kv_versions: list[Version] = field(default_factory=list[Version])


async def answered(
    versions: list[Tensors], prompts: list[list[int]], mode: PauseMode, *, every: int
) -> list[Answer]:
    """All versions go live in each answer, one after the other; `AT_ONCE` answers at a time."""
    answers = [Answer(prompt) for prompt in prompts]
    for first in range(0, len(answers), AT_ONCE):
        await answer_some(versions, answers[first : first + AT_ONCE], mode, every=every, seed=first)
    return answers


async def answer_some(
    versions: list[Tensors], answers: list[Answer], mode: PauseMode, *, every: int, seed: int
) -> None:
    model = demo_model()
    assign(model, {name: tensor.clone() for name, tensor in versions[0].items()})
    engine = embedded_engine(model, running=AT_ONCE, context=CONTEXT)
    prompts = [answer.prompt for answer in answers]
    asked = requests(prompts, answer=every * len(versions), seed=seed)
    progress = asyncio.Condition()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(engine.run())
        reading: list[asyncio.Task[None]] = []
        for request, answer in zip(asked, answers, strict=True):
            reading.append(tasks.create_task(read(engine, request, answer, progress)))
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            sender = stack.enter_context(
                publisher("shared_memory", name="midflight-keys", folder=folder)
            )
            for version in range(1, len(versions)):
                await engine.stage(sender.publish(version, versions[version]))
                await all_have(answers, every * version, progress)
                await engine.pause(mode)
                await engine.commit(version)
                await engine.resume()
                sender.release(version)
        await asyncio.wait(reading)
        running.cancel()


async def all_have(answers: list[Answer], tokens: int, progress: asyncio.Condition) -> None:
    """Waits until every answer has so many tokens; ended by that."""
    async with progress:
        await progress.wait_for(lambda: min(len(each.tokens) for each in answers) >= tokens)


async def read(
    engine: EmbeddedEngine, request: GenerateRequest, answer: Answer, progress: asyncio.Condition
) -> None:
    async with aclosing(engine.generate(request)) as chunks:
        async for chunk in chunks:
            answer.tokens += chunk.token_ids
            answer.logprobs += chunk.logprobs
            answer.versions += [chunk.version] * len(chunk.token_ids)
            answer.kv_versions += [chunk.kv_version] * len(chunk.token_ids)
            async with progress:
                progress.notify_all()


@dataclass(frozen=True)
class Tokens:
    """One row for each token after the first commit of its answer."""

    age: Tensor
    distance: Tensor
    log_rho: Tensor
    """Log-probability under the version it is labelled with, less that when it was sampled."""
    one_version: Tensor
    """Log-probability under the version before it, less that under its version."""


def age_cells(tokens: Tokens, age: int) -> list[str]:
    cells: list[str] = []
    own_age = tokens.age == age
    for low, high in DISTANCES.values():
        there = own_age & (tokens.distance >= low) & (tokens.distance <= high)
        log_rho = tokens.log_rho[there]
        cells.append(f"{k3(log_rho):.1e} ({k1(log_rho):+.1e})")
    largest = tokens.log_rho[own_age].abs().max()
    return [*cells, f"{largest:.1e}", f"{k3(tokens.one_version[own_age]):.1e}"]


@torch.no_grad()
def compared(versions: list[Tensors], answers: list[Answer]) -> Tokens:
    ids = torch.tensor([answer.prompt + answer.tokens for answer in answers])
    sampled = torch.tensor([answer.logprobs for answer in answers])
    version = torch.tensor([answer.versions for answer in answers])
    kv_version = torch.tensor([answer.kv_versions for answer in answers])
    under = torch.stack(list(logprobs(versions, ids)))
    own = under.gather(0, version[None])[0]
    before = under.gather(0, (version - 1).clamp(min=0)[None])[0]
    after = version > 0
    return Tokens(
        age=(version - kv_version)[after],
        distance=distances(version)[after],
        log_rho=(own - sampled).double()[after],
        one_version=(before - own).double()[after],
    )


def logprobs(versions: list[Tensors], ids: Tensor) -> Iterator[Tensor]:
    """Yields those of the answers' tokens under each version, all keys its own; `transformers`
    computes them.
    """
    model = demo_model()
    for tensors in versions:
        assign(model, tensors)
        rows: list[Tensor] = []
        for part in ids.split(AT_ONCE):
            logits = model(input_ids=part).logits[:, PROMPT_TOKENS - 1 : -1]
            rows.append(logits.log_softmax(-1))
        yield torch.cat(rows).gather(-1, ids[:, PROMPT_TOKENS:, None])[..., 0]


def distances(version: Tensor) -> Tensor:
    """Counts, for each token, from the first one of its version in its answer, which has 1."""
    place = torch.arange(version.shape[1]).expand_as(version)
    first = torch.ones_like(version[:, :1], dtype=torch.bool)
    changed = torch.cat([first, version[:, 1:] != version[:, :-1]], 1)
    return place - torch.where(changed, place, 0).cummax(1).values + 1


# --- Routing replay -------------------------------------------------------------------------------

MIXTURE_CONTEXT = 512


def routing(options: argparse.Namespace, report: Report) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = mixture()
    batches = source_batches()
    losses = train_on_bytes(model, batches, rate=PRETRAIN_RATE, steps=options.pretrain)
    weights = in_dtype(named_tensors(model), torch.bfloat16)
    prompts = source_prompts(batches, number=options.answers, length=PROMPT_TOKENS)
    report.say(
        f"loss {losses[-1]:.2f} nats per byte after {options.pretrain} steps; 32 experts in each "
        "of 4 layers, 4 for each token"
    )
    table = report.table(
        "engine", "replay", "other experts", "mean", "max", "k3", "bytes", "seconds"
    )
    for dtype in (torch.bfloat16, torch.float32):
        sampled = sample_mixture(with_weights(weights, dtype), prompts, num_tokens=options.tokens)
        for replays in (False, True):
            policy = Policy(with_weights(weights, torch.float32), replays=True)
            table.row(dtype, "yes" if replays else "no", *replay_cells(sampled, policy, replays))


def mixture() -> PreTrainedModel:
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_experts=32,
        num_experts_per_tok=4,
        max_position_embeddings=MIXTURE_CONTEXT,
        tie_word_embeddings=True,
        norm_topk_prob=True,
    )
    return Qwen3MoeForCausalLM(config).eval()


def with_weights(weights: dict[str, Tensor], dtype: torch.dtype) -> PreTrainedModel:
    """Rounded to bfloat16 in either precision: trainer and engine have the same weights."""
    model = mixture()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    assign(model, {name: tensor.clone() for name, tensor in weights.items()})
    return model


@dataclass
class Sampled:
    """Answers as rows, one after the other."""

    predictions: Predictions
    logprobs: Tensor
    """The engine's, one for each prediction."""


def sample_mixture(model: PreTrainedModel, prompts: list[list[int]], *, num_tokens: int) -> Sampled:
    engine = embedded_engine(model, running=AT_ONCE, context=MIXTURE_CONTEXT, records_experts=True)
    answers = engine.generate_all(requests(prompts, answer=num_tokens))
    rows: list[tuple[int, ...]] = []
    records: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    found: list[float] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        row = (*prompt, *answer.token_ids)
        rows.append(row)
        records.append(np.frombuffer(answer.experts, np.uint8).reshape(len(row), -1))
        masks.append(np.arange(len(row)) >= PROMPT_TOKENS)
        found += answer.logprobs
    predictions = predictions_of(
        np.concatenate(rows).astype(np.int32),
        np.cumsum([0, *map(len, rows)]).astype(np.int32),
        mask=np.concatenate(masks),
        experts=np.concatenate(records),
    )
    return Sampled(predictions, torch.tensor(found))


def replay_cells(sampled: Sampled, policy: Policy, replays: bool) -> list[str]:
    found = torch.zeros(len(sampled.logprobs))
    others: list[float] = []
    began = time.perf_counter()
    routers = policy.routers
    record = sampled.predictions.experts
    assert routers is not None and record is not None
    micro_batches = split(
        sampled.predictions, np.arange(len(found)), budget=4096, device=torch.device("cpu")
    )
    for micro in micro_batches:
        given = micro.experts
        asked = micro if replays else replace(micro, experts=None)
        with torch.no_grad(), routers.recording() as chosen:
            found[micro.predictions] = policy(asked, temperature=1.0)[0]
        others.append(share_of_others(routers, routers.packed(chosen), given))
    log_rho = found - sampled.logprobs
    return [
        f"{np.mean(others):.2%}",
        f"{log_rho.abs().mean():.2e}",
        f"{log_rho.abs().max():.2e}",
        f"{k3(log_rho):.2e}",
        str(record.shape[1]),
        f"{time.perf_counter() - began:.1f}",
    ]


def share_of_others(routers: Routers, ours: UInt8, theirs: UInt8 | None) -> float:
    """Share of (token, layer) whose sets of experts differ."""
    assert theirs is not None
    own = np.sort(routers.unpacked(ours), -1)
    recorded = np.sort(routers.unpacked(theirs), -1)
    differ = (own != recorded).any(-1)
    return float(differ[:, (theirs != 255).any(1)].mean())


# --- Sampling masks -------------------------------------------------------------------------------

CASES = (
    ("top-k 20", 1.0, 20, 0.0),
    ("min-p 0.05", 1.0, 0, 0.05),
    ("top-p 0.95", 0.95, 0, 0.0),
    ("top-p 0.95, top-k 50, min-p 0.01", 0.95, 50, 0.01),
    ("top-p 0.999", 0.999, 0, 0.0),
)
WIDTH = 64
"""The width of the hidden states that are scored."""


def masks(options: argparse.Namespace, report: Report) -> None:
    torch.set_num_threads(1)
    hidden, weight = output_layer(options.vocabulary, options.rows)
    table = report.table(
        "truncation",
        "ids kept, mean (most)",
        "bytes a token, mean (most)",
        "sampling ms a step",
        "with records",
        "scores and gradient ms",
        "over the sets",
        "largest difference, nats",
        "without the sets",
    )
    for name, top_p, top_k, min_p in CASES:
        plain = SamplingBatch(
            temperature=np.ones(options.rows),
            top_p=np.full(options.rows, top_p),
            top_k=np.full(options.rows, top_k),
            min_p=np.full(options.rows, min_p),
            seeds=np.arange(options.rows),
            positions=np.zeros(options.rows, dtype=np.int64),
            suppressed=None,
        )
        table.row(name, *mask_cells(plain, hidden, weight, rounds=options.rounds))


def output_layer(vocabulary: int, rows: int) -> tuple[Tensor, Tensor]:
    """Hidden states and an output layer whose logits fall off as Zipf's law does, with noise: rows
    from sure to unsure.
    """
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(vocabulary, WIDTH, generator=draw) * 0.1
    weight[:, 0] = -torch.log(torch.randperm(vocabulary, generator=draw) + 1.0)
    hidden = torch.randn(rows, WIDTH, generator=draw)
    hidden[:, 0] = torch.linspace(1.1, 3.0, rows)
    return hidden.requires_grad_(), weight.requires_grad_()


def mask_cells(plain: SamplingBatch, hidden: Tensor, weight: Tensor, *, rounds: int) -> list[str]:
    logits = (hidden @ weight.T).detach()
    wanting = replace(plain, wants_kept=np.ones(len(logits), np.bool_))
    found = sample(logits, wanting)
    records = [record or b"" for record in found.kept]
    lengths = np.array([len(record) for record in records])
    kept = SamplingMasks(*unpack_kept(np.frombuffer(b"".join(records), np.uint8), lengths))
    counts = np.diff(kept.offsets)
    targets = torch.from_numpy(found.token_ids)
    behaviour = torch.from_numpy(found.logprobs)

    def difference(over: SamplingMasks | None) -> float:
        """Computes scores and gradient over the sets, or over the whole vocabulary."""
        scores, _ = token_scores(hidden, weight, None, targets, temperature=1.0, kept=over)
        torch.autograd.backward(scores.sum())
        return float((scores.detach().double() - behaviour).abs().max())

    _, sampling = shortest(lambda: sample(logits, plain), rounds)
    _, recording = shortest(lambda: sample(logits, wanting), rounds)
    without, scoring = shortest(lambda: difference(None), rounds)
    over_sets, scoring_sets = shortest(lambda: difference(kept), rounds)
    return [
        f"{counts.mean():.0f} ({counts.max()})",
        f"{lengths.mean():.0f} ({lengths.max()})",
        f"{1e3 * sampling:.0f}",
        f"{1e3 * recording:.0f}",
        f"{1e3 * scoring:.0f}",
        f"{1e3 * scoring_sets:.0f}",
        f"{over_sets:.1e}",
        f"{without:.1e}",
    ]


def shortest(deed: Callable[[], T], rounds: int) -> tuple[T, float]:
    """The result, and the CPU seconds of the quickest round, which other programs disturb least."""
    found = [timed(deed) for _ in range(rounds)]
    return found[0][0], min(cost.cpu for _, cost in found)


# --- Deterministic kernels ------------------------------------------------------------------------

READINGS = tuple(f"mismatch/same_keys/{name}" for name in ("mean", "max", "k3"))


def deterministic(options: argparse.Namespace, report: Report) -> None:
    can = options.device != "cpu" and options.engine != "embedded"
    found: dict[bool, list[list[float]]] = {False: [], True: []}
    for switch, _ in turns((False, True) if can else (False,), rounds=options.rounds):
        found[switch].append(readings_of_run(options, switch))
    report.say(
        f"{options.engine} on {options.device}, {options.steps} steps, median of {options.rounds}"
    )
    table = report.table("engine.deterministic", "mean", "max", "k3", "tokens/s")
    for switch, rows in found.items():
        name = str(switch).lower()
        if not rows:
            table.row(name, "not run: it takes a GPU and a server", "", "", "")
            continue
        medians = [statistics.median(column) for column in zip(*rows, strict=True)]
        table.row(name, *(f"{median:.2e}" for median in medians))


def readings_of_run(options: argparse.Namespace, switch: bool) -> list[float]:
    """Mean over the steps of each reading, then generated tokens per second."""
    settings = [
        f"engine.kind={options.engine}",
        f"engine.device={options.device}",
        f"engine.deterministic={str(switch).lower()}",
        f"run.steps={options.steps}",
        "evaluation.eval_every=0",
        "warm_start.target_accuracy=0.05",
    ]
    if options.python is not None:
        settings.append(f"engine.python={options.python}")
    if options.dtype is not None:
        settings.append(f"engine.dtype={options.dtype}")
    if options.smoke:
        settings += SMALL
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        command = train_command(DEMO, settings, folder=folder)
        train(command, said=Path(place) / "said")
        steps = journal(folder, kind="step")
    means = [mean_reading(steps, name) for name in READINGS]
    return [*means, statistics.mean(step["generation_rate"] for step in steps)]


def mean_reading(steps: Sequence[dict[str, dict[str, float]]], name: str) -> float:
    return statistics.mean(step["trainer"][name] for step in steps if name in step["trainer"])


PARTS = {"keys": keys, "routing": routing, "masks": masks, "deterministic": deterministic}


def main() -> None:
    arguments = Arguments(__doc__, rounds=3)
    arguments.option("--parts", ["keys", "routing", "masks"], smoke=[*PARTS], choices=[*PARTS])
    arguments.option("--pretrain", 300, smoke=2, help="steps of training before")
    arguments.option("--answers", 64, smoke=8)
    arguments.option("--rates", [1e-5, 1e-4, 4e-4], smoke=[1e-4], help="of part `keys`")
    arguments.option("--commits", 4, smoke=1, help="in each answer of part `keys`")
    arguments.option("--every", 64, smoke=4, help="tokens between them")
    arguments.option("--tokens", 128, smoke=8, help="of an answer of part `routing`")
    arguments.option("--vocabulary", 151_936, smoke=1000, help="of part `masks`")
    arguments.option("--rows", 8, smoke=4, help="requests decoded together, of part `masks`")
    arguments.option("--engine", "vllm", smoke="embedded", choices=("embedded", "vllm", "sglang"))
    arguments.option("--python", None, help="the server's interpreter")
    arguments.option("--device", "cuda" if torch.cuda.is_available() else "cpu")
    arguments.option("--dtype", None, help="of the server; default: the configuration's")
    arguments.option("--steps", 20, smoke=3, help="of a run of part `deterministic`")
    options = arguments.parse()
    make_parts(options, PARTS)


if __name__ == "__main__":
    main()

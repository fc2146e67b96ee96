"""Our trainer against trl's `GRPOTrainer`: the step alone, and the whole way to the same reward.
Same model, batch and cores.

    python3 -m venv .venv-trl
    .venv-trl/bin/pip install -c locks/trl.txt -r benchmarks/requirements-trl.txt
    python benchmarks/training.py --trl-python .venv-trl/bin/python --json training.json

**step**: forward, backward and optimiser step on 64 written completions (8 groups of 8, prompts of
32 tokens, 3.2 M parameters with a byte vocabulary, float32, DAPO's loss). trl's preparing of inputs
is left out; ours is in. The first gradients of both are compared: what is timed is the same
mathematics. `equal` has only completions of 64 tokens, where padding costs trl nothing; `spread`
has 8 to 64, as answers do; the others the vocabularies of real models, with which memory counts.
With `--model FOLDER` it is that model, and completions have 32 to 256 tokens; trl computes 8 rows
at a time then, and accumulates their gradients.

**reward**: how long `midflight train` and trl take to the same mean reward, from the same model.
Four races: `short` is the demo's task and model, with six tokens an answer; `larger` the same with
3.2 M parameters; `vocabulary` with 32 000 rows of embeddings besides (trl takes a quarter of an
hour); `long` begins with sentences and is to write one letter, up to 150 tokens of it. Tasks,
groups, batch, learning rate, clips, sampling and seeds (one for each round) are the same for both
sides. Ours is asynchronous, with one version of lead, and uses two cores by its processes; trl's
loop generates with `transformers`, then trains, with the threads of `--trl-threads`. The clock
begins when model and libraries are loaded (the first rollouts start) and stops when the mean reward
over 20 steps reaches the target. Memory is the sum over processes, each at its peak, where pages
that several of them map (libraries, mostly) count once.

Both sides are processes of their own, in turn, each round anew: one thread each for the step. On
busy cores compare CPU seconds.

**batches**: the bytes that the second of several ranks gets of a batch, beside those of the whole
batch. Rows of 16 000 tokens in groups of 16: a prompt of 512, then one answer of two versions. A
loss that looks beyond a token needs the values of tokens in others' rows too. No clock is in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from harness.arguments import Arguments
from harness.processes import BENCHMARKS, apart, environment, output_of, side
from harness.report import Report
from harness.rounds import median_of, middle_and_range, turns
from harness.runs import train_command

from midflight.config import load_config
from midflight.config.sections import Config
from midflight.text.byte_tokenizer import VOCAB_SIZE, write_byte_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from midflight.types import PackedBatch


UNMEASURED = 2
"""Steps of a process before those that count: allocations, caches, the optimiser's first state."""
SIDES = ("midflight", "trl")
Found = dict[str, Any]
"""What a process wrote."""


# --- What both sides train on ---------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """One step to compare: a model's vocabulary, and the lengths of what it trains on, in
    tokens.
    """

    name: str
    spread: bool
    """Completions of 8 to 64 tokens, each length as likely as another; else all have 64."""
    vocab_size: int = VOCAB_SIZE
    num_groups: int = 8
    group_size: int = 8
    prompt: int = 32
    longest: int = 64
    shortest: int = 8
    at_once: int | None = None
    """Rows of a forward of trl's, where all would not fit into memory; else all."""
    model: Path | None = None
    """The folder of a model that is there, instead of a made one."""


SHAPES = (
    Shape("equal", spread=False),
    Shape("spread", spread=True),
    Shape("spread-32k", spread=True, vocab_size=32_000),
    Shape("spread-150k", spread=True, vocab_size=150_000),
    Shape("smoke", spread=True, num_groups=2, group_size=2),
)
PRETRAINED = Shape("pretrained", spread=True, longest=256, shortest=32, at_once=8)
"""The shape for `--model`. With 49,152 tokens trl's logits of all rows would take 4 GB, and so
would each of their copies.
"""


def write(shape: Shape, folder: Path) -> None:
    """The model (a given one, or one of 3.2 M parameters; float32) and the batch of a shape."""
    from harness.models import small_model

    from midflight.models.load import load_model, save_model

    if shape.model is None:
        write_byte_tokenizer(folder)
        model = small_model(vocab_size=shape.vocab_size)
        save_model(model, folder)
        known = 256
    else:
        model = load_model(shape.model, dtype="float32")
        _link(shape.model, folder)
        known = int(model.config.vocab_size)
    draw = np.random.default_rng(0)
    size = shape.num_groups * shape.group_size
    lengths = np.full(size, shape.longest)
    if shape.spread:
        lengths[1:] = draw.integers(shape.shortest, shape.longest + 1, size)[1:]
    prompts = draw.integers(0, known, (shape.num_groups, shape.prompt))
    completions = draw.integers(0, known, int(lengths.sum()))
    # In the thousands, so that the small constants which the two sides add to a group's deviation
    # don't show.
    rewards = draw.normal(0, 1000, size).astype(np.float32)
    repeated = np.repeat(prompts, shape.group_size, axis=0)
    np.savez(
        folder / "batch.npz",
        prompts=prompts,
        completions=completions,
        lengths=lengths,
        rewards=rewards,
        logprobs=_logprobs(model, repeated, completions, lengths),
    )
    (folder / "shape.json").write_text(json.dumps(asdict(shape), default=str))


def _link(model: Path, folder: Path) -> None:
    """Makes the files of a model's folder appear in `folder` too."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in model.absolute().iterdir():
        (folder / path.name).unlink(missing_ok=True)
        (folder / path.name).symlink_to(path)


def _logprobs(
    model: PreTrainedModel, prompts: np.ndarray, completions: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """Returns those of the completions' tokens, one after the other."""
    import torch

    found: list[torch.Tensor] = []
    answers = np.split(completions, np.cumsum(lengths)[:-1])
    with torch.inference_mode():
        for prompt, answer in zip(prompts, answers, strict=True):
            logits = model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0]
            scores = logits[len(prompt) - 1 : -1].log_softmax(-1)
            found.append(scores[torch.arange(len(answer)), torch.tensor(answer)])
        return torch.cat(found).numpy()


# --- The step -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepCost:
    """Medians over rounds of the medians over steps; `memory` is the largest peak during steps, in
    MiB above the loaded trainer.
    """

    tokens: int
    wall: float
    cpu: float
    memory: float

    @property
    def rate(self) -> float:
        """Completion tokens per second of wall time."""
        return self.tokens / self.wall


def step(options: argparse.Namespace, report: Report) -> None:
    shapes = [shape for shape in SHAPES if shape.name in options.shapes]
    if options.model:
        shapes = [replace(PRETRAINED, model=options.model, num_groups=options.groups)]
    found: dict[str, dict[str, StepCost]] = {}
    for shape in shapes:
        found[shape.name] = step_costs(options, shape, report)
    table = report.table(
        "step",
        "side",
        "tokens",
        "s (CPU)",
        "tokens/s",
        "memory",
        "trl's / this: s (CPU)",
        "this / trl's: memory",
    )
    kept: dict[str, Any] = {}
    report.keep("step", kept)
    for name, sides in found.items():
        for who, cost in sides.items():
            times = ""
            memory = ""
            if who == "midflight" and "trl" in sides:
                theirs = sides["trl"]
                times = f"**{theirs.wall / cost.wall:.2f}** ({theirs.cpu / cost.cpu:.2f})"
                memory = f"{cost.memory / theirs.memory:.0%}"
                report.figure(f"a step, {name}: trl's time / ours", theirs.wall / cost.wall)
            shown = f"{cost.wall:.2f} ({cost.cpu:.2f})"
            size = f"{cost.memory:,.0f} MiB"
            kept[f"{name}, {who}"] = asdict(cost)
            table.row(name, who, cost.tokens, shown, f"{cost.rate:,.0f}", size, times, memory)


def step_costs(options: argparse.Namespace, shape: Shape, report: Report) -> dict[str, StepCost]:
    """Measures each side. Prints the share of matrix products in ours, and how far the gradients
    differ.
    """
    folder = options.folder / shape.name
    folder.mkdir(parents=True, exist_ok=True)
    apart(write, shape, folder)
    steps = options.unmeasured + options.steps
    commands: dict[str, list[str]] = {}
    for who in options.sides:
        out = folder / f"{who}.json"
        if who == "trl":
            python = options.trl_python.absolute()
            commands[who] = side("trl_trainer", "step", folder, out, steps, python=python)
        else:
            commands[who] = side("trainer_steps", folder, out, steps, *options.set)
    runs: dict[str, list[Found]] = {who: [] for who in commands}
    for who, _ in turns(commands, rounds=options.rounds):
        (folder / f"{who}.npz").unlink(missing_ok=True)
        output_of(commands[who], environ=environment(PYTHONWARNINGS="ignore"))
        runs[who].append(json.loads((folder / f"{who}.json").read_text()))
    costs = {who: step_cost(found, options.unmeasured) for who, found in runs.items()}
    if "midflight" in runs:
        say_products(shape.name, runs["midflight"], costs["midflight"], options, report)
    if len(costs) == len(SIDES):
        differ = gradient_difference(folder / "midflight.npz", folder / "trl.npz")
        report.say(f"{shape.name}: gradients differ by {differ:.1e} of their norm")
    return costs


def step_cost(runs: Sequence[Found], unmeasured: int) -> StepCost:
    return StepCost(
        tokens=int(runs[0]["tokens"]),
        wall=median_of(runs, lambda run: statistics.median(run["wall"][unmeasured:])),
        cpu=median_of(runs, lambda run: statistics.median(run["cpu"][unmeasured:])),
        memory=max(run["peak_mib"] - run["loaded_mib"] for run in runs),
    )


def say_products(
    name: str, runs: Sequence[Found], cost: StepCost, options: argparse.Namespace, report: Report
) -> None:
    """The share of our step that its matrix products take."""
    counted = slice(options.unmeasured, None)
    linear = median_of(runs, lambda run: statistics.median(run["floor"][counted]))
    inside = median_of(runs, lambda run: statistics.median(run["attention"][counted]))
    share = linear / cost.cpu
    report.say(
        f"{name}: matrix products alone {linear:.3f} s of CPU, {share:.0%} of our step's "
        f"{cost.cpu:.3f}; with those inside attention {(linear + inside) / cost.cpu:.0%}"
    )
    report.figure(f"a step, {name}: its matrix products, in percent", 100 * share)
    for what, kept in (
        ("the digests of its rollouts and of the step", "digests"),
        ("the fingerprint of its weights", "fingerprint"),
    ):
        took = median_of(runs, lambda run, kept=kept: statistics.median(run[kept][counted]))
        report.say(
            f"{name}: {what} {1e3 * took:.2f} ms of CPU, {took / cost.cpu:.2%} of our step's"
        )


def gradient_difference(ours: Path, theirs: Path) -> float:
    """Norm of the difference of two gradients over the norm of one."""
    own = np.load(ours)
    other = np.load(theirs)
    if set(own) != set(other):
        named = sorted(set(own) ^ set(other))
        raise SystemExit(f"the sides train different parameters: {named}")
    difference = 0.0
    norm = 0.0
    for name in own:
        difference += float(np.sum((own[name] - other[name]) ** 2, dtype=np.float64))
        norm += float(np.sum(other[name] ** 2, dtype=np.float64))
    return float(np.sqrt(difference / norm))


# --- To the same reward ---------------------------------------------------------------------------

WINDOW = 20
"""Steps, as in `run.stop_at_reward`."""


@dataclass(frozen=True)
class Race:
    """A task, the supervised warm start that makes the model of both sides, and the mean reward to
    reach from there.
    """

    warm_start: tuple[str, ...] = ("target_accuracy=0.42", "evaluate_every=5")
    config: Path = BENCHMARKS / "sides" / "race.toml"
    hidden_size: int = 128
    """The width of four layers; the feed-forward parts are three times as wide."""
    vocab_size: int = VOCAB_SIZE
    """Beyond the tokenizer's 262 tokens lie rows that are never right, as in models with a padded
    vocabulary.
    """
    target: float = 0.6
    steps: int = 400
    """The largest number of steps."""
    more: tuple[str, ...] = ()
    """Other settings."""


RACES: Mapping[str, Race] = {
    "short": Race(),
    "larger": Race(hidden_size=256),
    "vocabulary": Race(hidden_size=256, vocab_size=32_000),
    # It learns what sentences look like; the reward asks for something else.
    "long": Race(
        ("target_accuracy=0.99", "max_steps=40", "evaluate_every=50"),
        BENCHMARKS / "sides" / "race_long.toml",
    ),
    "smoke": Race(
        ("target_accuracy=0.99", "max_steps=2", "evaluate_every=50"),
        hidden_size=32,
        steps=2,
        more=(
            "environment.sources.0.heldout=4",
            "rollout.groups_per_step=2",
            "rollout.group_size=2",
        ),
    ),
}


def reward(options: argparse.Namespace, report: Report) -> None:
    kept: dict[str, Any] = {}
    for name in options.races:
        rounds = run_race(options, name)
        print_race(name, rounds, report)
        kept[name] = rounds
    report.keep("reward", kept)


def run_race(options: argparse.Namespace, name: str) -> list[dict[str, Found]]:
    """Both sides in turn, `options.reward_rounds` times: what every side found in each round."""
    race = RACES[name]
    folder = (options.folder / name).absolute()
    model = race_model(folder, race)
    plan = folder / "plan"
    rounds: list[dict[str, Found]] = []
    for seed in range(options.reward_rounds):
        write_plan(name, race_config(race, folder / "ours", model, seed=seed), plan, model)
        found: dict[str, Found] = {}
        for who in options.sides:
            out = folder / f"{who}.json"
            command = side("race", plan, out)
            # Ours sets the threads of its processes by its configuration: one each.
            threads = 1
            if who == "trl":
                python = options.trl_python.absolute()
                command = side("trl_trainer", "reward", plan, out, python=python)
                threads = options.trl_threads
            output_of(command, environ=environment(threads=threads, PYTHONWARNINGS="ignore"))
            found[who] = json.loads(out.read_text())
        rounds.append(found)
    return rounds


def print_race(name: str, rounds: list[dict[str, Found]], report: Report) -> None:
    table = report.table(
        f"{name}: to a mean reward of {RACES[name].target}",
        "seconds (spread)",
        "steps",
        "s/step",
        "CPU s/step",
        "memory",
    )
    for who in rounds[0]:
        runs = [found[who] for found in rounds]
        table.row(
            who,
            middle_and_range([run["seconds"] for run in runs], digits=1),
            f"{median_of(runs, lambda run: run['steps']):g}",
            f"{median_of(runs, lambda run: run['seconds'] / run['steps']):.2f}",
            f"{median_of(runs, lambda run: run['cpu'] / run['steps']):.2f}",
            f"{max(run['peak_mib'] for run in runs):,.0f} MiB",
        )
    words: list[str] = []
    if len(rounds[0]) == len(SIDES):
        ratio = median_of(rounds, lambda f: f["trl"]["seconds"] / f["midflight"]["seconds"])
        words.append(f"{ratio:.1f} times as fast")
        report.figure(f"to the same reward, {name}: trl's time / ours", ratio)
    for found in rounds:
        if not all(run["reached"] for run in found.values()):
            words.append("NOT ALL RUNS REACHED IT")
            break
    report.say("\n" + "; ".join(words))


def race_config(race: Race, folder: Path, model: Path, *, seed: int) -> Config:
    settings = [
        f"run.folder={folder}",
        f"run.seed={seed}",
        f"run.stop_at_reward={race.target}",
        f"run.steps={race.steps}",
        f"model.path={model}",
        *race.more,
    ]
    return load_config(race.config, settings)


def race_model(folder: Path, race: Race) -> Path:
    """Made once: random weights, then the warm start."""
    start = folder / "first" / "start"
    if not (start / "config.json").exists():
        apart(write_random, race, folder / "random")
        settings = [f"warm_start.{option}" for option in race.warm_start]
        settings += [f"model.path={folder / 'random'}", "run.steps=1", *race.more]
        command = train_command(race.config, settings, folder=folder / "first")
        output_of([*command, "--overwrite"])
    return start


def write_random(race: Race, folder: Path) -> None:
    from harness.models import small_model

    from midflight.models.load import save_model

    write_byte_tokenizer(folder)
    save_model(small_model(race.hidden_size, vocab_size=race.vocab_size, context=384), folder)


def write_plan(race: str, config: Config, plan: Path, model: Path) -> None:
    """Writes tasks and numbers for the side that has no Midflight."""
    from midflight.environments.sources import load_sources

    tasks = load_sources(config.environment.sources, seed=config.run.seed)[0].training
    pairs = [[task.data["question"], task.data["answer"]] for task in tasks]
    numbers = {
        "model": str(model),
        "groups": config.rollout.groups_per_step,
        "group_size": config.rollout.group_size,
        "max_tokens": config.environment.max_tokens,
        "learning_rate": config.trainer.learning_rate,
        "warmup_steps": config.trainer.warmup_steps,
        "race": race,
        "seed": config.run.seed,
        "steps": config.run.steps,
        "target": config.run.stop_at_reward,
        "window": WINDOW,
    }
    plan.mkdir(parents=True, exist_ok=True)
    (plan / "config.json").write_text(config.model_dump_json())
    (plan / "tasks.json").write_text(json.dumps(pairs))
    (plan / "numbers.json").write_text(json.dumps(numbers))


# --- What a rank gets -----------------------------------------------------------------------------

LONG_ROW = 16_000
LONG_PROMPT = 512
LONG_GROUP = 16


def batches(options: argparse.Namespace, report: Report) -> None:
    from midflight.trajectories.packing import to_bytes

    batch = long_batch(options.rows)
    whole = len(to_bytes(batch))
    report.say(f"{options.rows} rows of {LONG_ROW} tokens: {whole / 1e6:.1f} MB")
    table = report.table("ranks", "MB", "share", "looks beyond: MB", "share")
    for ranks in options.ranks:
        own, beyond = (len(rows_of_second(batch, ranks, beyond=b)) for b in (False, True))
        table.row(
            str(ranks),
            f"{own / 1e6:.1f}",
            f"{own / whole:.1%}",
            f"{beyond / 1e6:.1f}",
            f"{beyond / whole:.1%}",
        )


def rows_of_second(batch: PackedBatch, ranks: int, *, beyond: bool) -> bytes:
    """What the second of these ranks gets, as the trainer makes it."""
    import torch

    from midflight.trainer.credit import Scoring
    from midflight.trainer.model.microbatch import dealt
    from midflight.trainer.own_rows import encode_own_rows
    from midflight.trainer.tokens import step_tokens

    tokens = step_tokens(
        batch,
        Scoring(),
        max_staleness=4,
        max_missing_share=0.1,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    rank_of_row = dealt(tokens.predictions, [np.arange(tokens.num_tokens)], size=ranks)
    predictions = replace(tokens.predictions, rank_of_row=rank_of_row)
    tokens = replace(tokens, predictions=predictions)
    return encode_own_rows(tokens, 1, version=1, looks_beyond=beyond)


def long_batch(num_rows: int) -> PackedBatch:
    """A batch of version 1. Half of each answer is of version 0."""
    from midflight.types import PackedBatch

    draw = np.random.default_rng(0)
    ids = draw.integers(0, 150_000, (num_rows, LONG_ROW), dtype=np.int32)
    ids[:, :LONG_PROMPT] = np.repeat(ids[::LONG_GROUP, :LONG_PROMPT], LONG_GROUP, axis=0)
    trained = np.broadcast_to(np.arange(LONG_ROW) >= LONG_PROMPT, ids.shape)
    versions = np.broadcast_to((np.arange(LONG_ROW) >= LONG_ROW // 2).astype(np.int32), ids.shape)
    return PackedBatch(
        lease=1,
        train_version=1,
        token_ids=ids.ravel(),
        loss_mask=trained.ravel(),
        logprobs=-draw.random(ids.size, dtype=np.float32),
        versions=versions.ravel(),
        kv_versions=versions.ravel(),
        row_offsets=np.arange(0, ids.size + 1, LONG_ROW, dtype=np.int32),
        row_rollout=np.arange(num_rows, dtype=np.int32),
        rewards=draw.random(num_rows, dtype=np.float32),
        rollout_group=np.repeat(np.arange(num_rows // LONG_GROUP, dtype=np.int32), LONG_GROUP),
        truncated=np.zeros(num_rows, np.bool_),
    )


PARTS = {"step": step, "reward": reward, "batches": batches}


def main() -> None:
    names = [shape.name for shape in SHAPES]
    arguments = Arguments(__doc__, rounds=3)
    arguments.option("--trl-python", Path(".venv-trl/bin/python"), help="interpreter with trl")
    arguments.option("--parts", ["step", "reward"], smoke=[*PARTS], choices=[*PARTS])
    arguments.option("--sides", [*SIDES], smoke=["midflight"], choices=SIDES)
    arguments.option("--shapes", names[:-1], smoke=["smoke"], choices=names)
    arguments.option(
        "--model",
        None,
        type=Path,
        help="a folder for part `step`: completions of 32 to 256 tokens, in place of the shapes",
    )
    arguments.option("--groups", 8, help="of 8 completions each, with --model")
    arguments.option(
        "--set",
        [],
        metavar="OPTION",
        help="of our side in part `step`, such as trainer.compile=true",
    )
    arguments.option(
        "--races", [*RACES][:-1], smoke=["smoke"], choices=[*RACES], help="of part `reward`"
    )
    arguments.option("--rows", 1024, smoke=32, help="of part `batches`, groups of 16")
    arguments.option("--ranks", [2, 4, 8], help="of part `batches`")
    arguments.option("--reward-rounds", 1, help="rounds of part `reward`, some minutes each")
    arguments.option("--steps", 5, smoke=1, help="measured steps of each round, part `step`")
    arguments.option("--unmeasured", UNMEASURED, help="steps before those, part `step`")
    arguments.option(
        "--trl-threads", 1, help="of trl in part `reward`; more made it slower on busy cores"
    )
    arguments.option("--folder", Path("runs/training"), smoke=Path("runs/smoke/training"))
    options = arguments.parse()
    report = Report(options)
    for name, part in PARTS.items():
        if name in options.parts:
            part(options, report)
    report.close()


if __name__ == "__main__":
    main()

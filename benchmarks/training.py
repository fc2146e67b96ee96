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

**reward**: see `training_reward.py`.

Both sides are processes of their own, in turn, each round anew: one thread each for the step. On
busy cores compare CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HERE = Path(__file__).parent
os.environ.update(
    OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", PYTHONWARNINGS="ignore"
)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
sys.path.insert(0, str(HERE))

import numpy as np  # noqa: E402
from smoke import options_of  # noqa: E402
from training_both import apart  # noqa: E402

from midflight.text.byte_tokenizer import VOCAB_SIZE, write_byte_tokenizer  # noqa: E402

UNMEASURED = 2
"""Steps of a process before those that count: allocations, caches, the optimiser's first state."""


@dataclass(frozen=True)
class Side:
    """Medians over rounds of the medians over steps; `memory` is the largest peak during steps, in
    MiB above the loaded trainer.
    """

    tokens: int
    wall: float
    cpu: float
    memory: float
    peak: float

    @property
    def rate(self) -> float:
        """Completion tokens per second of wall time."""
        return self.tokens / self.wall


def main() -> None:
    options = _options()
    found: dict[str, Any] = {}
    if "step" in options.parts:
        shapes = (
            [replace(PRETRAINED, model=options.model, num_groups=options.groups)]
            if options.model
            else [shape for shape in SHAPES if shape.name in options.shapes]
        )
        found["step"] = [_step(options, shape) for shape in shapes]
        print(_step_table(found["step"]), flush=True)
    if "reward" in options.parts:
        from training_reward import compare, table

        found["reward"] = {name: compare(options, name) for name in options.races}
        for name, rounds in found["reward"].items():
            print(table(name, rounds))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trl-python", type=Path, default=Path(".venv-trl/bin/python"), help="interpreter with trl"
    )
    parser.add_argument(
        "--parts", nargs="+", choices=("step", "reward"), default=("step", "reward")
    )
    names = [shape.name for shape in SHAPES]
    parser.add_argument(
        "--sides", nargs="+", choices=("midflight", "trl"), default=("midflight", "trl")
    )
    parser.add_argument("--shapes", nargs="+", default=names[:-1], choices=names)
    parser.add_argument(
        "--model",
        type=Path,
        help=(
            "a folder of your own for part `step`: completions of 32 to 256 tokens, in place of "
            "the shapes"
        ),
    )
    parser.add_argument("--groups", type=int, default=8, help="of 8 completions each, with --model")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of part `step`")
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="OPTION",
        help="of our side in part `step`, such as trainer.compile=true",
    )
    parser.add_argument(
        "--races",
        nargs="+",
        default=("short", "larger", "vocabulary", "long"),
        choices=("short", "larger", "vocabulary", "long", "smoke"),
        help="of part `reward`",
    )
    parser.add_argument(
        "--reward-rounds", type=int, default=1, help="rounds of part `reward`, some minutes each"
    )
    parser.add_argument(
        "--steps", type=int, default=5, help="measured steps of each round, part `step`"
    )
    parser.add_argument(
        "--unmeasured", type=int, default=UNMEASURED, help="steps before those, part `step`"
    )
    parser.add_argument(
        "--trl-threads",
        type=int,
        default=1,
        help="of trl in part `reward`; more made it slower on busy cores",
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/training"))
    parser.add_argument("--json", type=Path, default=None)
    return options_of(
        parser,
        sides=["midflight"],
        shapes=["smoke"],
        races=["smoke"],
        rounds=1,
        steps=1,
        folder=Path("runs/smoke/training"),
    )


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
    """Instead of a made one."""


SHAPES = (
    Shape("equal", spread=False),
    Shape("spread", spread=True),
    Shape("spread-32k", spread=True, vocab_size=32_000),
    Shape("spread-150k", spread=True, vocab_size=150_000),
    Shape("smoke", spread=True, num_groups=2, group_size=2),
)
PRETRAINED = Shape("pretrained", spread=True, longest=256, shortest=32, at_once=8)
"""Of `--model`. With 49,152 tokens trl's logits of all rows would take 4 GB, and so would each of
their copies.
"""


def write(shape: Shape, folder: Path) -> None:
    """The model (a given one, or one of 3.2 M parameters with a byte vocabulary; float32) and the
    batch of a shape.
    """
    from midflight.models.creation import make_model
    from midflight.models.load import load_model, save_model

    if shape.model is None:
        write_byte_tokenizer(folder)
        model = make_model(
            vocab_size=shape.vocab_size,
            hidden_size=256,
            intermediate_size=768,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            max_context=256,
            seed=0,
            dtype="float32",
        )
        save_model(model, folder)
    else:
        model = load_model(shape.model, dtype="float32")
        _linked(shape.model, folder)
    known = 256 if shape.model is None else int(model.config.vocab_size)
    draw = np.random.default_rng(0)
    size = shape.num_groups * shape.group_size
    lengths = (
        draw.integers(shape.shortest, shape.longest + 1, size)
        if shape.spread
        else np.full(size, shape.longest)
    )
    lengths[0] = shape.longest
    prompts = draw.integers(0, known, (shape.num_groups, shape.prompt))
    completions = draw.integers(0, known, int(lengths.sum()))
    # In the thousands, so that the small constants which the two sides add to a group's deviation
    # don't show.
    rewards = draw.normal(0, 1000, size).astype(np.float32)
    logprobs = _logprobs(model, np.repeat(prompts, shape.group_size, axis=0), completions, lengths)
    np.savez(
        folder / "batch.npz",
        prompts=prompts,
        completions=completions,
        lengths=lengths,
        rewards=rewards,
        logprobs=logprobs,
    )
    (folder / "shape.json").write_text(json.dumps(asdict(shape), default=str))


def _linked(model: Path, folder: Path) -> None:
    """The files of a model's folder, in `folder` too."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in model.absolute().iterdir():
        (folder / path.name).unlink(missing_ok=True)
        (folder / path.name).symlink_to(path)


def _logprobs(
    model: PreTrainedModel, prompts: np.ndarray, completions: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    import torch

    found = []
    with torch.inference_mode():
        for prompt, answer in zip(
            prompts, np.split(completions, np.cumsum(lengths)[:-1]), strict=True
        ):
            logits = model(input_ids=torch.tensor([[*prompt, *answer]])).logits[
                0, len(prompt) - 1 : -1
            ]
            found.append(logits.log_softmax(-1)[torch.arange(len(answer)), torch.tensor(answer)])
        return torch.cat(found).numpy()


# --- The step -------------------------------------------------------------------------------------


def _step(options: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    folder = options.folder / shape.name
    apart(write, shape, folder)
    every = {
        "midflight": [sys.executable, HERE / "training_ours.py"],
        "trl": [options.trl_python, HERE / "training_trl.py", "step"],
    }
    commands = {name: every[name] for name in options.sides}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
    for _ in range(options.rounds):
        for name, command in commands.items():
            more = options.set if name == "midflight" else []
            found = _measured(
                [
                    *command,
                    folder,
                    folder / f"{name}.json",
                    options.unmeasured + options.steps,
                    *more,
                ],
                folder / f"{name}.json",
            )
            runs[name].append(found)
    sides = {name: _side(found, unmeasured=options.unmeasured) for name, found in runs.items()}
    if "midflight" in runs:
        cpu = sides["midflight"].cpu
        linear, inside = (
            statistics.median(
                statistics.median(run[kind][options.unmeasured :]) for run in runs["midflight"]
            )
            for kind in ("floor", "attention")
        )
        words = (
            f"matrix products alone {linear:.3f} s of CPU, {linear / cpu:.0%} of our step's "
            f"{cpu:.3f}"
        )
        print(
            f"{shape.name}: {words}; with those inside attention {(linear + inside) / cpu:.0%}",
            flush=True,
        )
    found: dict[str, Any] = {
        "shape": shape.name,
        **{name: vars(side) | {"rate": side.rate} for name, side in sides.items()},
    }
    if len(sides) == 2:
        found["gradients_differ"] = _difference(*(folder / f"{name}.npz" for name in commands))
        print(
            f"{shape.name}: gradients differ by {found['gradients_differ']:.1e} of their norm",
            flush=True,
        )
    return found


def _measured(command: Sequence[object], result: Path) -> dict[str, Any]:
    result.with_suffix(".npz").unlink(missing_ok=True)
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"{command[0]} {command[1]} ended with {done.returncode}:\n{done.stderr[-3000:]}"
        )
    return json.loads(result.read_text())


def _side(runs: Sequence[dict[str, Any]], *, unmeasured: int) -> Side:
    return Side(
        tokens=runs[0]["tokens"],
        wall=statistics.median(statistics.median(run["wall"][unmeasured:]) for run in runs),
        cpu=statistics.median(statistics.median(run["cpu"][unmeasured:]) for run in runs),
        memory=max(run["peak_mib"] - run["loaded_mib"] for run in runs),
        peak=max(run["peak_mib"] for run in runs),
    )


def _difference(ours: Path, theirs: Path) -> float:
    """Norm of the difference of two gradients over the norm of one."""
    a = np.load(ours)
    b = np.load(theirs)
    if set(a) != set(b):
        raise SystemExit(f"the sides train different parameters: {sorted(set(a) ^ set(b))}")
    squares = [
        (np.sum((a[k] - b[k]) ** 2, dtype=np.float64), np.sum(b[k] ** 2, dtype=np.float64))
        for k in a
    ]
    return float(np.sqrt(np.sum(squares, axis=0)[0] / np.sum(squares, axis=0)[1]))


def _step_table(found: Sequence[dict[str, Any]]) -> str:
    lines = [
        (
            "| step | side | tokens | s (CPU) | tokens/s | memory | trl's / this: s (CPU) | this / "
            "trl's: memory |"
        ),
        "|---" * 8 + "|",
    ]
    for row in found:
        for name, side in ((name, row[name]) for name in ("midflight", "trl") if name in row):
            ratios = _ratios(row["trl"], side) if "trl" in row and name != "trl" else " | "
            lines.append(
                f"| {row['shape']} | {name} | {side['tokens']} | {side['wall']:.2f} "
                f"({side['cpu']:.2f}) | {side['rate']:,.0f} | {side['memory']:,.0f} MiB | {ratios} "
                "|"
            )
    return "\n" + "\n".join(lines) + "\n"


def _ratios(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    times = f"**{theirs['wall'] / ours['wall']:.2f}** ({theirs['cpu'] / ours['cpu']:.2f})"
    return f"{times} | {ours['memory'] / theirs['memory']:.0%}"


if __name__ == "__main__":
    main()

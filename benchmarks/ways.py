"""What two cores do with each way of training a model that people know: a few steps by each.

    python benchmarks/ways.py [--model FOLDER] [--only lora ...] [--steps 4] [--set OPTION ...]

Every way is a `midflight train` of a file of `configs/` with the options that the table shows, from
the model as it is: of word problems from a file, by rewards from a file that differ within nearly
every group, so that a step has all of its work. Of sums most groups are alike at first, and then
neither time nor memory says what a step takes. An evaluation of four tasks goes before, and
training is measured from its end to the end of the last step:

| column | |
|---|---|
| wall, CPU | seconds a step, of the clock and of all processes of the run: generation, training and versions, the first step too |
| gap | mean of abs(log trainer - log engine) over tokens that the newest version sampled by keys of its own (`train/mismatch/same_keys/mean`), the largest of all steps |
| moved | numbers of the exported model that differ from those it began with |
| memory | the peak of all processes' proportional set sizes, and what the dry run estimates, in GB |

Before the table stands the memory of each kind of process, looked at four times a second, beside
what the dry run estimates: the least, with one group whose rewards differ and empty slots, and the
most, with the longest rows that the run can have. `--only defaults` is the sums with every default:
16 groups of 8, 64 slots, a context by the machine's memory, and answers of at most `--answer`
tokens.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.arguments import Arguments
from harness.memory import Estimate, MemoryPeaks, estimated
from harness.pretrained import MODEL, OWN, SMALL, SUMS, require_model
from harness.processes import BENCHMARKS, ROOT, cpu_seconds_with_ended, family
from harness.report import Report
from harness.runs import journal, train, train_command

HELD_OUT = "environment.sources.0.heldout=4"


@dataclass(frozen=True)
class Way:
    """`settings`: options of a command line, in which MODEL is the model's folder."""

    name: str
    what: str
    settings: tuple[str, ...] = ()
    config: Path = OWN

    def overrides(self, model: Path) -> list[str]:
        own = [setting.replace("MODEL", str(model)) for setting in self.settings]
        return [f"model.path={model}", *own]


WAYS = (
    Way("sums", "all weights, on sums", (), SUMS),
    Way("own", "all weights, by own tasks and own rewards, each from a file"),
    Way("lora", "adapters", ("lora.rank=16",)),
    Way("ranks", "a trainer of two processes", ("trainer.ranks=2",)),
    Way("distilled", "the model before training is its teacher", ("distillation.teacher=MODEL",)),
    Way("served", "trained in float32, served in bfloat16", ("engine.dtype=bfloat16",)),
    Way(
        "computed",
        "weights in float32, computed and served in bfloat16",
        ("trainer.compute_dtype=bfloat16", "engine.dtype=bfloat16"),
    ),
    Way("bfloat16", "weights and moments in bfloat16", ("model.dtype=bfloat16",)),
)


def defaults(answer: int) -> Way:
    """The sums with every default."""
    config = BENCHMARKS / "sides" / "defaults.toml"
    settings = (f"environment.max_tokens={answer}",)
    return Way("defaults", "all weights, on sums, with every default", settings, config)


@dataclass(frozen=True)
class Outcome:
    """What a run of a way took, and what it wrote."""

    way: Way
    steps: Sequence[dict[str, Any]]
    """Its journal's lines."""
    summary: dict[str, Any]
    said: str
    wall_seconds: float
    """The time of a step."""
    cpu_seconds: float
    """The CPU time of a step."""
    estimated: dict[str, Estimate]
    """By kind of process."""
    measured: dict[str, int]
    """Bytes by kind of process."""
    moved: float

    @property
    def gap(self) -> float:
        found = [step["trainer"].get("mismatch/same_keys/mean") for step in self.steps]
        return max((gap for gap in found if gap is not None), default=float("nan"))

    @property
    def estimate(self) -> Estimate:
        """Of all processes together."""
        return sum(self.estimated.values(), Estimate(0, 0))

    @property
    def cells(self) -> list[str]:
        settings = ", ".join(self.way.settings) or self.way.config.name
        held = sum(self.measured.values()) / 1e9
        return [
            f"{self.way.what} (`{settings}`)",
            f"{self.wall_seconds:.1f}",
            f"{self.cpu_seconds:.1f}",
            f"{self.gap:.1e}",
            f"{self.moved:.1%}",
            f"{held:.1f} of {self.estimate.least / 1e9:.1f} to {self.estimate.most / 1e9:.1f}",
        ]


class Watched(MemoryPeaks):
    """Keeps also the processor time of a run's processes when a line came into its journal."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self.marks: dict[int, tuple[float, float]] = {}
        """Clock and processor time by the number of steps that were made, 0 when the evaluation
        before had ended.
        """

    def look(self, launcher: int) -> None:
        super().look(launcher)
        kinds = [line["kind"] for line in journal(self._folder)]
        number = kinds.count("step")
        if number not in self.marks and ("evaluation" in kinds or number):
            used = sum(cpu_seconds_with_ended(pid) for pid in family(launcher))
            self.marks[number] = (time.monotonic(), used)

    def seconds_per_step(self, number: int) -> tuple[float, float]:
        """Returns seconds of the clock, and of processors, up to that step; not a number where
        either moment passed between two looks.
        """
        if not {0, number} <= self.marks.keys():
            return float("nan"), float("nan")
        began = self.marks[0]
        ended = self.marks[number]
        return (ended[0] - began[0]) / number, (ended[1] - began[1]) / number


def run_way(
    way: Way, model: Path, folder: Path, *, steps: int, settings: Sequence[str] = ()
) -> Outcome:
    """Makes the run in that folder. Waits for it; ends it with whatever ends the wait. `SystemExit`
    where it fails.
    """
    overrides = [*way.overrides(model), f"run.steps={steps}", HELD_OUT, *settings]
    os.chdir(ROOT)  # where configurations find their files and rewards
    estimate = estimated(way.config, overrides, folder)
    said = folder.with_name(f"{folder.name}.txt")
    watched = Watched(folder)
    train(train_command(way.config, overrides, folder=folder), said=said, look=watched.look)
    wall, cpu = watched.seconds_per_step(steps)
    return Outcome(
        way,
        journal(folder, kind="step"),
        json.loads((folder / "summary.json").read_text()),
        said.read_text(),
        wall,
        cpu,
        estimate,
        {kind: watched.peaks.get(kind, 0) for kind in estimate},
        share_moved(model, folder / "model"),
    )


def share_moved(before: Path, after: Path) -> float:
    """The share of a model's numbers that are others in the second folder. As they are stored
    there: bfloat16 is compared with bfloat16.
    """
    old = _tensors(before)
    new = _tensors(after)
    moved = sum(int((old[name].to(tensor.dtype) != tensor).sum()) for name, tensor in new.items())
    return moved / sum(tensor.numel() for tensor in new.values())


def _tensors(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def memory_table(outcome: Outcome) -> str:
    lines = [
        (
            f"{outcome.way.name}: MB of each kind of process: least and most estimated, measured, "
            "and 1 or the multiple of the nearer end"
        )
    ]
    for kind, estimate in outcome.estimated.items():
        found = outcome.measured[kind]
        lines.append(
            f"  {kind:14} {estimate.least / 1e6:8,.0f} {estimate.most / 1e6:8,.0f} "
            f"{found / 1e6:8,.0f} {estimate.share_of(found):6.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    names = [way.name for way in WAYS]
    smoke = Path("runs/smoke/ways")
    arguments = Arguments(__doc__)
    arguments.option("--model", MODEL, smoke=smoke / "model", help="a model folder")
    arguments.option("--only", names, smoke=["own", "lora"], choices=[*names, "defaults"])
    arguments.option("--steps", 4, smoke=2)
    arguments.option("--answer", 256, help="most tokens of an answer of `defaults`")
    arguments.option(
        "--keep",
        None,
        type=Path,
        metavar="FOLDER",
        help="where the runs' folders stay; else they are removed",
    )
    arguments.option("--set", [], smoke=[*SMALL], metavar="OPTION", help="of every run")
    options = arguments.parse()
    model = options.model.absolute()
    require_model(model, makes_tiny=options.smoke)
    report = Report(options)
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory(prefix="midflight-") as place:
        parent = (options.keep or Path(place)).absolute()
        for way in (*WAYS, defaults(options.answer)):
            if way.name not in options.only:
                continue
            folder = parent / way.name
            outcome = run_way(way, model, folder, steps=options.steps, settings=options.set)
            report.say(memory_table(outcome))
            rows.append(outcome.cells)
            if options.keep is None:
                shutil.rmtree(folder)  # gigabytes
    table = report.table("way", "wall", "CPU", "gap", "moved", "memory")
    for cells in rows:
        table.row(*cells)
    report.close()


if __name__ == "__main__":
    main()

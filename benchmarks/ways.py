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
| memory | the peak of all processes' proportional set sizes, in GB, and its share of what the dry run says; see `memory.py` |
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from memory import Looked, estimated, train  # noqa: E402
from pretrained_model import MODEL, OWN, ROOT, SMALL, SUMS, make_tiny  # noqa: E402
from smoke import options_of  # noqa: E402

from midflight.config.memory import MemoryItem  # noqa: E402
from midflight.observe.memory import PROC, descendants  # noqa: E402

TICK = os.sysconf("SC_CLK_TCK")
HELD_OUT = "environment.sources.0.heldout=4"


@dataclass(frozen=True)
class Way:
    """`settings`: options of a command line, in which MODEL is the model's folder."""

    name: str
    what: str
    settings: tuple[str, ...] = ()
    config: Path = OWN

    def overrides(self, model: Path) -> list[str]:
        return [
            f"model.path={model}",
            *(setting.replace("MODEL", str(model)) for setting in self.settings),
        ]


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


@dataclass(frozen=True)
class Outcome:
    """What a run of a way took, and what it wrote."""

    way: Way
    steps: Sequence[dict[str, Any]]
    """Its journal's lines."""
    summary: dict[str, Any]
    said: str
    wall_seconds: float
    """Of a step."""
    cpu_seconds: float
    """Of a step."""
    estimated: dict[str, int]
    """Bytes by kind of process."""
    measured: dict[str, int]
    moved: float

    @property
    def gap(self) -> float:
        found = (step["trainer"].get("mismatch/same_keys/mean") for step in self.steps)
        return max((gap for gap in found if gap is not None), default=float("nan"))

    @property
    def memory_share(self) -> float:
        """Of all processes, measured by estimated."""
        return sum(self.measured.values()) / sum(self.estimated.values())

    @property
    def row(self) -> str:
        settings = ", ".join(self.way.settings) or self.way.config.name
        held = sum(self.measured.values()) / 1e9
        times = f"{self.wall_seconds:.1f} | {self.cpu_seconds:.1f}"
        return (
            f"| {self.way.what} (`{settings}`) | {times} | {self.gap:.1e} | {self.moved:.1%} | "
            f"{held:.1f}, {self.memory_share:.2f} |"
        )


class Watched(Looked):
    """Also the processor time of a run's processes, as it was when a line came into its journal."""

    def __init__(self, launcher: int, folder: Path) -> None:
        super().__init__(launcher)
        self._journal = folder / "metrics.jsonl"
        self._pid = launcher
        self.marks: dict[int, tuple[float, float]] = {}
        """Clock and processor time by the number of steps that were made, 0 when the evaluation
        before had ended.
        """

    def look(self) -> None:
        super().look()
        kinds = [line["kind"] for line in lines_of(self._journal)]
        number = kinds.count("step")
        if number not in self.marks and ("evaluation" in kinds or number):
            self.marks[number] = (
                time.monotonic(),
                sum(_cpu_seconds(pid) for pid in descendants(self._pid)),
            )

    def seconds_per_step(self, number: int) -> tuple[float, float]:
        """Of the clock, and of processors, up to that step; not a number where either moment passed
        between two looks.
        """
        if not {0, number} <= self.marks.keys():
            return float("nan"), float("nan")
        began = self.marks[0]
        ended = self.marks[number]
        return (ended[0] - began[0]) / number, (ended[1] - began[1]) / number


def lines_of(journal: Path) -> list[dict[str, Any]]:
    """Whole ones: the last may be written at this moment."""
    whole = journal.read_bytes().split(b"\n")[:-1] if journal.exists() else []
    return [json.loads(line) for line in whole]


def _cpu_seconds(pid: int) -> float:
    """The process' own, and those of its children that have ended; 0 where it is gone."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(int(ticks) for ticks in fields[11:15]) / TICK


def run_way(
    way: Way, model: Path, folder: Path, *, steps: int, settings: Sequence[str] = ()
) -> Outcome:
    """Makes the run in that folder. Waits for it; ends it with whatever ends the wait. `SystemExit`
    where it fails.
    """
    overrides = [*way.overrides(model), f"run.steps={steps}", HELD_OUT, *settings]
    os.chdir(ROOT)  # where configurations find their files and rewards
    by_kind = _by_kind(estimated(way.config, overrides, folder)[0])
    said = folder.with_name(f"{folder.name}.txt")
    said.parent.mkdir(parents=True, exist_ok=True)
    watched = train(
        way.config, overrides, folder, said=said, looking=partial(Watched, folder=folder)
    )
    lines = [line for line in lines_of(folder / "metrics.jsonl") if line["kind"] == "step"]
    wall, cpu = watched.seconds_per_step(steps)
    summary = json.loads((folder / "summary.json").read_text())
    measured = {kind: watched.peaks.get(kind, 0) for kind in by_kind}
    return Outcome(
        way,
        lines,
        summary,
        said.read_text(),
        wall,
        cpu,
        by_kind,
        measured,
        share_moved(model, folder / "model"),
    )


def _by_kind(items: Sequence[MemoryItem]) -> dict[str, int]:
    """Bytes by kind of process."""
    by_kind: dict[str, int] = defaultdict(int)
    for item in items:
        # their command lines are alike
        where = "engines" if item.where == "teacher" else item.where
        by_kind[where] += item.num_bytes
    return {where: num_bytes for where, num_bytes in by_kind.items() if num_bytes}


def share_moved(before: Path, after: Path) -> float:
    """The share of a model's numbers that are others in the second folder. As they are stored
    there: bfloat16 is compared with bfloat16.
    """
    old, new = (_tensors(folder) for folder in (before, after))
    moved = sum(int((old[name].to(tensor.dtype) != tensor).sum()) for name, tensor in new.items())
    return moved / sum(tensor.numel() for tensor in new.values())


def _tensors(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def memory_table(outcome: Outcome) -> str:
    lines = [
        (
            f"{outcome.way.name}: MB of each kind of process, estimated, measured, and measured by "
            "estimated"
        )
    ]
    for kind, estimate in outcome.estimated.items():
        found = outcome.measured[kind]
        lines.append(
            f"  {kind:14} {estimate / 1e6:8,.0f} {found / 1e6:8,.0f} {found / estimate:6.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    names = [way.name for way in WAYS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=MODEL, help="a model folder")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="where the runs' folders stay; else they are removed",
    )
    parser.add_argument("--set", nargs="+", default=[], metavar="OPTION", help="of every run")
    smoke = Path("runs/smoke/ways")
    options = options_of(
        parser, model=smoke / "model", steps=2, set=list(SMALL), only=["own", "lora"]
    )
    options.model = options.model.absolute()
    if options.smoke:
        make_tiny(options.model)
    if not options.model.exists():
        raise SystemExit(
            f"there is no model in {options.model}: midflight fetch-model smollm2-135m "
            f"{options.model}"
        )
    rows: list[str] = []
    with tempfile.TemporaryDirectory(prefix="midflight-") as place:
        for way in WAYS:
            if way.name in options.only:
                folder = (options.keep or Path(place)).absolute() / way.name
                outcome = run_way(
                    way, options.model, folder, steps=options.steps, settings=options.set
                )
                print(memory_table(outcome), flush=True)
                rows.append(outcome.row)
                if options.keep is None:
                    shutil.rmtree(folder)  # gigabytes
    print("\n| way | wall | CPU | gap | moved | memory |\n|---|---|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()

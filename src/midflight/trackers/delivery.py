"""Sends the lines of a run's journal to a tracker, and records which lines were sent, so that a run
that goes on sends nothing twice.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import msgspec

from midflight.config.sections import Config
from midflight.observe.lines import (
    AlarmLine,
    CheckpointLine,
    CompletionsLine,
    EvaluationLine,
    Line,
    ResumeLine,
    StepLine,
)
from midflight.observe.metrics import metrics_of
from midflight.trackers.tracker import TrackedRun, Tracker
from midflight.types import Json

COLUMNS = ("source", "task", "reward", "prompt", "completion")


class DeliveryLog:
    """The lines that were sent to one tracker. It is a file in the run's folder with a line for
    each, such as `step 12`. The first line is `id` with the key by which the tracker finds the run
    again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.id: str | None = None
        self.timeline = 0
        """The number of lines of the timeline that were sent."""
        self._keys: dict[str, int] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                self._take(line)

    @property
    def is_new(self) -> bool:
        return not self._path.exists()

    def _take(self, line: str) -> None:
        kind, _, rest = line.partition(" ")
        if kind == "id":
            self.id = rest
        elif kind == "timeline":
            self.timeline = int(rest)
        elif kind == "rewound":
            last = int(rest)
            self._keys = {
                key: step
                for key, step in self._keys.items()
                if step <= last or key.startswith("resume ")
            }
        else:
            self._keys[line] = int(rest.partition(" ")[0])

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def add(self, line: str) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(line + "\n")
        self._take(line)


def key_of(line: Line) -> str | None:
    """Returns the key of a line in the log, with the step after the first blank, or None for lines
    that are not sent.
    """
    match line:
        case StepLine():
            return f"step {line.step}"
        case EvaluationLine():
            return f"evaluation {line.step} {line.version} {line.source}"
        case CompletionsLine():
            return f"completions {line.step}"
        case AlarmLine():
            return f"alarm {line.step} {line.name} {line.seconds}"
        case CheckpointLine() if line.digest:
            return f"checkpoint {line.step}"
        case ResumeLine():
            return f"resume {line.step} {line.seconds}"
        case _:
            return None


def tell(tracker: Tracker, line: Line, told: DeliveryLog) -> None:
    """Tells a line once. The line counts as sent before it is sent: a tracker that fails on a line,
    or is killed over it, lacks that line, and has none twice.
    """
    key = key_of(line)
    if key is None or key in told:
        return
    told.add(key)
    match line:
        case ResumeLine():
            if tracker.rewind(line.step):
                told.add(f"rewound {line.step}")
        case CompletionsLine():
            rows = [
                (one.source, one.task_id, one.reward, one.prompt, one.completion)
                for one in line.rollouts
            ]
            #: `rollout/samples`, `digests`, `alarms`: Tables in trackers: completions
            #: (`rollout.show_every`), digests of checkpoints, and alarms.
            tracker.table(line.step, "rollout/samples", COLUMNS, rows)
        case CheckpointLine():
            row = (str(line.version), line.digest)
            tracker.table(line.step, "digests", ("version", "digest"), [row])
        case AlarmLine():
            tracker.table(line.step, "alarms", ("alarm", "text"), [(line.name, line.text)])
        case StepLine() | EvaluationLine():
            tracker.scalars(line.step, metrics_of(line))
            if isinstance(line, StepLine):
                for name, edges, counts in histograms(line):
                    tracker.histogram(line.step, name, edges, counts)
        case _:
            pass


def histograms(line: StepLine) -> Iterator[tuple[str, list[float], list[int]]]:
    """The histograms of a step: name, edges, of which there is one more than bins, and counts."""
    for name, found in (line.histograms or {}).items():
        family = "train" if name == "trained_length" else "rollout"
        #: `rollout/reward_histogram`, `rollout/generated_length_histogram`,
        #: `rollout/truncated_length_histogram`, `train/trained_length_histogram`,
        #: `train/staleness_histogram`: Histograms in trackers: rewards; output tokens of all
        #: rollouts, and of those cut short; trainable tokens of a rollout, and by age (versions).
        yield f"{family}/{name}_histogram", list(found.edges), list(found.counts)
    if line.staleness and any(line.staleness.values()):
        youngest = min(line.staleness)
        oldest = max(line.staleness)
        edges = [age - 0.5 for age in range(youngest, oldest + 2)]
        counts = [line.staleness.get(age, 0) for age in range(youngest, oldest + 1)]
        yield "train/staleness_histogram", edges, counts


def tracked(config: Config, folder: Path, *, id: str | None = None) -> TrackedRun:
    return TrackedRun(config.run.name, config.observe.project, folder, flat(config), id)


def flat(config: Config) -> Mapping[str, Json]:
    """Every option by its key. Lists and tables of the user's own become JSON texts, because not
    every service takes them.
    """
    sections = cast("dict[str, dict[str, Json]]", config.model_dump(mode="json"))
    plain: dict[str, Json] = {}
    for section, options in sections.items():
        for name, value in options.items():
            if isinstance(value, list | dict):
                value = msgspec.json.encode(value).decode()
            plain[f"{section}.{name}"] = value
    return plain


def flat_summary(path: Path) -> Mapping[str, float | str]:
    """The numbers and texts of a summary, without those in lists."""
    if not path.exists():
        return {}
    said = cast("dict[str, object]", msgspec.json.decode(path.read_bytes()))
    return {
        name: value
        for name, value in said.items()
        if isinstance(value, int | float | str) and not isinstance(value, bool)
    }

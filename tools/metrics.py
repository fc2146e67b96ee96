"""Writes docs/metrics.md: what every figure of a run means.

    python tools/metrics.py docs/metrics.md

The meanings stand beside the figures in the code. A field of `metrics.jsonl` or `summary.json` has a docstring, a
metric for Prometheus its help text; other names and alarms have a comment that begins with `#:`, on the lines before
them. A name that the code puts together, and names or fields that share a meaning, stand in backquotes before it.
Where a meaning has "Healthy:", what follows is the value in a run that learns.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path

from midflight.config.reference import attribute_texts
from midflight.observe.lines import EvaluationLine, StepLine
from midflight.observe.metrics import FAMILIES, STEP, SUMS
from midflight.observe.status import LearningStatus, Status, Totals
from midflight.observe.summary import Summary

SOURCE = Path(__file__).parents[1] / "src" / "midflight"
TRAINER = ("trainer/report.py", "trainer/formulas/diagnostics.py", "trainer/critic.py")
RUN = ("observe/metrics.py", "observe/learning.py", "trackers/delivery.py")
ALARMS = (
    "observe/alarms.py",
    "observe/learning_alarms.py",
    "run/rollout/rollout_process.py",
    "run/rollout/claim_watch.py",
    "run/rollout/system.py",
)
"""The files whose comments `#:` are read, in the order of the page."""

SAID = re.compile(r'((?: *#: .*\n)+)[^"]*"([^"]+)"')
"""Lines of a comment `#:`, and the first text below them."""
NAMED = re.compile(r"(?:^|(?<=\n))(`[^`]+`(?:,\s`[^`]+`)*): ")
"""Names in backquotes before the meaning that they share."""
RECENT = ("midflight_reward_component", "midflight_environment_metric")
AS_IN_A_STEP = (
    "As in a step's line, of recent rollouts and groups; the last two are `components` and `metrics`, "
    "by `name`."
)
"""The meaning of `RECENT`, and of the metrics that have the names of keys of a step's line."""
IN_EVERY_LINE = ("step", "version", "seconds")
"""Keys of all lines, which the page explains once."""

Row = tuple[str, str]
"""Names in backquotes, and their meaning."""

PAGE = """\
# What a run measures

*A page to look things up in.*

Made from the code by `python tools/metrics.py docs/metrics.md`; edit the sentences there.

A run writes `metrics.jsonl` while it goes and `summary.json` at its end. A key without a value is absent or `null`, never zero. Times are seconds, memory is MB of 2^20 bytes. Evaluations count only in `generated_tokens` and `failures`. [Staleness](staleness.md) says what the *age* of a token is, and [what to watch](algorithms.md#what-to-watch) where to look first.

## Trackers

```toml
[observe]
trackers = ["tensorboard"]  # or "wandb", "mlflow", "trackio", "otel"
project = "spelling"
```

Each is an extra: `pip install 'midflight[tensorboard]'`. They write into the run's folder, unless a variable of theirs names a service: `MLFLOW_TRACKING_URI`, `TRACKIO_DIR`, a key of wandb or `WANDB_MODE` (what is offline is sent by `wandb sync --append`). `otel` sends each rollout as a trace to `OTEL_EXPORTER_OTLP_ENDPOINT`, or port 4318.

A tracker that fails costs the run nothing; `logs/trackers.log` has its errors. One of your own is `"module:Class"`:

```python
from midflight.trackers import Tracker


class Printed(Tracker):
    def scalars(self, step, numbers):
        print(step, numbers.get("rollout/reward_mean"))
```

## Alarms

Before each update the trainer looks at `rho/mean`, `rho/ess`, `rho/k1` and `rho/std`. If one is out of its bounds (below), `trainer.on_alarm` says whether the update is counted (`warn`) or not made (`skip`), or the run ends (`stop`).

## Prometheus, Grafana and logs

`ops/prometheus/prometheus.yml` reads `/metrics`, with alerts in `ops/prometheus/alerts.yml`; `ops/grafana/midflight.json` is a board to import (untested in Grafana). `--log-format json` makes every log a JSON object a line.

## Names for dashboards

Trackers and `Trainer.frame()` use these names. A step's line in `metrics.jsonl` has the key in brackets. A healthy value is in bold. A share is from 0 to 1. Rollouts and groups are those that ended since the step before.

{names}
## `metrics.jsonl`

Each line is a JSON object with `kind`, `step`, `version` and `seconds`, which the run has run over all its starts. Other kinds than those below are `completions` (with `rollout.show_every`), `checkpoint`, `engine` (it `joined` or `left`) and `resume`.

### `"kind": "step"`: one step of the trainer

The line has the version that the step made, the keys in brackets above, and these:

{step}
### `"kind": "evaluation"`: one source of tasks in one evaluation

The line has the version that answered, and the step after which it began.

{evaluation}
### `"kind": "alarm"`: what somebody should look at

An alarm has a `name` and a `text`.

{alarms}
## `summary.json`

{summary}
## `/metrics`

These are there while a run or `midflight serve` is up. Counters end in `_total`, histograms in `_bucket`, `_sum` and `_count`. Recent rollouts and groups are the last 256 of training.

{prometheus}
An embedded engine has a `/metrics` of its own:

{engine}"""


def page() -> str:
    return PAGE.format(
        names=_table(("name", "meaning (unit)"), _names()),
        step=_table(("key", "meaning"), _step_keys()),
        evaluation=_table(("key", "meaning"), _fields(EvaluationLine, without=IN_EVERY_LINE)),
        alarms=_table(("`name`", "said when"), _comments(ALARMS)),
        summary=_table(("key", "meaning"), _summary_keys()),
        prometheus=_table(("name", "meaning, by label"), _metrics("observe/prometheus.py")),
        engine=_table(("name", "meaning"), _metrics("engines/app.py")),
    )


def _names() -> Iterator[Row]:
    """Each number for dashboards."""
    yield from _comments(TRAINER, prefix="train/")
    known = _known(StepLine)
    for meaning, pairs in groupby(STEP.items(), lambda pair: known[pair[1]]):
        yield ", ".join(f"`{name}` (`{field}`)" for name, field in pairs), meaning
    for beginning, field in FAMILIES.items():
        if field not in ("trainer", "curriculum"):  # their names have meanings of their own
            yield f"`{beginning}<name>`", known[field]
    yield from _comments(RUN)


def _step_keys() -> Iterator[Row]:
    """The keys of a step that stand beside no name for dashboards."""
    named = {*STEP.values(), *SUMS.values(), *FAMILIES.values(), "metrics"}
    yield from _fields(StepLine, without={*IN_EVERY_LINE, *named})
    yield (
        _code(FAMILIES.values()),
        f"The numbers whose names begin with {_code(FAMILIES)}, by the rest of the name.",
    )


def _summary_keys() -> Iterator[Row]:
    known = _known(Summary)
    of_step = _known(StepLine)
    same = [
        name
        for name in inspect.get_annotations(Summary)
        if name in StepLine.__struct_fields__ and known[name] == of_step[name]
    ]
    yield from _fields(Summary, without=same)
    yield _code(same), "As in a step's line."


def _comments(files: Iterable[str], *, prefix: str = "") -> Iterator[Row]:
    """What has a comment `#:` in these files."""
    for file in files:
        for comment, literal in SAID.findall((SOURCE / file).read_text()):
            text = re.sub(r"^ *#: ", "", comment, flags=re.MULTILINE)
            _, *parts = NAMED.split(text)
            if not parts:
                name = re.sub(r"\{(?:\w+\.)*(\w+)\}", r"<\1>", literal)
                parts = [f"`{name}`", text]
            for names, said in zip(parts[::2], parts[1::2], strict=True):
                yield _code(f"{prefix}{name}" for name in _in_backquotes(names)), _meaning(said)


def _fields(owner: type, *, without: Iterable[str] = ()) -> Iterator[Row]:
    """The fields of a class. Those that share a meaning are in one row, in its order."""
    known = _known(owner)
    rows: dict[str, list[str]] = {}
    for name in inspect.get_annotations(owner):
        if name not in without:
            rows.setdefault(known[name], []).append(name)
    for meaning, names in rows.items():
        yield _code(sorted(names, key=list(known).index)), meaning


def _known(owner: type) -> Mapping[str, str]:
    """The meaning of each field. One without a docstring has that of its name in the snapshot that it is
    taken from.
    """
    known: dict[str, str] = {}
    for each in (LearningStatus, Status, Totals, owner):
        for name, text in _texts(each).items():
            _, *shared = NAMED.split(text)
            names, said = shared or (f"`{name}`", text)
            known.update(dict.fromkeys(_in_backquotes(names), _meaning(said)))
    return known


def _texts(owner: type) -> dict[str, str]:
    (node,) = ast.parse(inspect.getsource(owner)).body
    assert isinstance(node, ast.ClassDef)
    return dict(attribute_texts(node))


def _in_backquotes(names: str) -> list[str]:
    return re.findall("`([^`]+)`", names)


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _meaning(said: str) -> str:
    """A meaning, with the healthy value in bold. Pages that are named become links."""
    meaning, _, healthy = " ".join(said.split()).partition(" Healthy: ")
    meaning = re.sub(r"\bdocs/([\w-]+)\.md((?:#[\w-]+)?)", r"[\1](\1.md\2)", meaning)
    return f"{meaning} **{healthy.removesuffix('.')}**" if healthy else meaning


def _metrics(file: str) -> Iterator[Row]:
    """The metrics for Prometheus that a file makes. Those that mean the same by the same labels are in one
    row.
    """
    rows: dict[str, list[str]] = {}
    for _, name, text in sorted(_made(file)):
        rows.setdefault(text, []).append(name)
    for text, names in rows.items():
        yield _code(names), text


def _made(file: str) -> Iterator[tuple[int, str, str]]:
    """Line, name and meaning of each metric. Its labels are marked in its help text, or follow it."""
    for node in ast.walk(ast.parse((SOURCE / file).read_text())):
        match node:
            case ast.Call(args=[ast.Constant(str(name)), ast.Constant(str(text)), *more]):
                if not name.startswith("midflight_"):
                    continue
                labels = _labels([*more, *(keyword.value for keyword in node.keywords)])
                is_recent = name in RECENT
                yield node.lineno, name, AS_IN_A_STEP if is_recent else _with_labels(text, labels)
            case ast.Tuple(elts=[_, ast.Constant(str(name)), ast.Constant(str())]):
                yield node.lineno, name, AS_IN_A_STEP
            case _:
                pass


def _labels(arguments: Iterable[ast.expr]) -> list[str]:
    lists = [argument for argument in arguments if isinstance(argument, ast.List)]
    return [name for one in lists for name in ast.literal_eval(one)]


def _with_labels(text: str, labels: Iterable[str]) -> str:
    others: list[str] = []
    for label in labels:
        word = label.replace("_", " ")
        if re.search(rf"\b{word}\b", text):
            text = re.sub(rf"\b{word}\b", f"`{label}`", text, count=1)
        else:
            others.append(f"`{label}`")
    return f"{text.removesuffix('.')}, by {' and '.join(others)}." if others else text


def _table(header: Row, rows: Iterable[Row]) -> str:
    lines = [f"| {' | '.join(header)} |", "|---|---|"]
    for names, meaning in rows:
        shown = meaning.replace("|", "\\|")
        lines.append(f"| {names} | {shown} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path, help="what is written, such as docs/metrics.md")
    parser.parse_args().page.write_text(page())


if __name__ == "__main__":
    main()

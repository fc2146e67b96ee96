"""Writes docs/metrics.md: what every figure of a run means.

    python tools/metrics.py docs/metrics.md

The meanings stand beside the figures in the code. A field of `metrics.jsonl` or `summary.json` has a docstring, a
metric for Prometheus its help text; other names and alarms have a comment that begins with `#:`, on the lines before
them. A name that the code puts together stands in backquotes before its meaning. Where a meaning has "Healthy:", what
follows is the value in a run that learns.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from midflight.config.reference import attribute_texts
from midflight.observe.lines import EvaluationLine, StepLine
from midflight.observe.metrics import FAMILIES, STEP
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
NAMED = re.compile(r"(?:^|(?<=\n))`([^`]+)`: ")

PAGE = """\
# What a run measures

*A page to look things up in.*

Made from the code by `python tools/metrics.py docs/metrics.md`; edit the sentences there.

A run writes `metrics.jsonl` while it goes and `summary.json` at its end. A key without a value is absent or `null`, never zero. Times are seconds, memory is MB of 2^20 bytes. Evaluations count only in `generated_tokens` and `failures`. [Staleness](staleness.md) says what the *age* of a token is.

`metrics.jsonl` has a JSON object a line, of the kinds `step`, `evaluation`, `alarm`, `completions` (with `rollout.show_every`), `checkpoint`, `engine` (it `joined` or `left`) and `resume`.

The [names for dashboards](#names-for-dashboards) are those of trackers and `Trainer.frame()`. [What to watch](algorithms.md#what-to-watch) says where to look first.

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

Before each update the trainer looks at `rho/mean`, `rho/ess`, `rho/k1` and `rho/std`. If one is out of its bounds (below), `trainer.on_alarm` says what happens: `warn` (default) counts it; `skip` does not make the update; `stop` ends the run.

## Prometheus, Grafana and logs

`ops/prometheus/prometheus.yml` reads `/metrics`, with alerts in `ops/prometheus/alerts.yml`; `ops/grafana/midflight.json` is a board to import (untested in Grafana). `--log-format json` makes every log a JSON object a line.

## Names for dashboards

A share is from 0 to 1. What counts rollouts or groups covers those since the step before.

{names}
## `metrics.jsonl`

### `"kind": "step"`: one step of the trainer

{step}
### `"kind": "evaluation"`: one source of tasks in one evaluation

{evaluation}
### `"kind": "alarm"`: what somebody should look at

An alarm has `name`, `text`, `step`, `version` and `seconds`.

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
        names=_table(("name", "meaning (unit)", "healthy"), _names()),
        step=_table(("key", "meaning"), _two(_fields(StepLine))),
        evaluation=_table(("key", "meaning"), _two(_fields(EvaluationLine))),
        alarms=_table(("`name`", "said when"), _two(_comments(ALARMS))),
        summary=_table(("key", "meaning"), _two(_fields(Summary))),
        prometheus=_table(("name", "labels", "meaning"), _metrics("observe/prometheus.py")),
        engine=_table(("name", "meaning"), _engine_metrics()),
    )


def _names() -> Iterator[tuple[str, str, str]]:
    """Name, meaning and healthy value of each number for dashboards."""
    yield from _comments(TRAINER, prefix="train/")
    meanings = {name: (meaning, healthy) for name, meaning, healthy in _fields(StepLine)}
    for name, field in STEP.items():
        yield (name, *meanings[field])
    for beginning, field in FAMILIES.items():
        if field not in ("trainer", "curriculum"):  # their names have meanings of their own
            yield (f"{beginning}<name>", *meanings[field])
    yield from _comments(RUN)


def _comments(files: Iterable[str], *, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Name, meaning and healthy value of what has a comment `#:` in these files."""
    for file in files:
        for comment, literal in SAID.findall((SOURCE / file).read_text()):
            text = re.sub(r"^ *#: ", "", comment, flags=re.MULTILINE)
            _, *parts = NAMED.split(text)
            if not parts:
                parts = [re.sub(r"\{(?:\w+\.)*(\w+)\}", r"<\1>", literal), text]
            for name, said in zip(parts[::2], parts[1::2], strict=True):
                yield (f"{prefix}{name}", *_with_health(said))


def _fields(owner: type) -> Iterator[tuple[str, str, str]]:
    """Name, meaning and healthy value of each field. One without a docstring has that of its name in
    the snapshot that it is taken from.
    """
    known: dict[str, str] = {}
    for each in (LearningStatus, Status, Totals, owner):
        known.update(_texts(each))
    for name in inspect.get_annotations(owner):
        yield (name, *_with_health(known[name]))


def _texts(owner: type) -> dict[str, str]:
    (node,) = ast.parse(inspect.getsource(owner)).body
    assert isinstance(node, ast.ClassDef)
    return dict(attribute_texts(node))


def _with_health(said: str) -> tuple[str, str]:
    """A meaning and the healthy value. Pages that are named become links."""
    meaning, _, healthy = " ".join(said.split()).partition(" Healthy: ")
    meaning = re.sub(r"\bdocs/([\w-]+)\.md((?:#[\w-]+)?)", r"[\1](\1.md\2)", meaning)
    return meaning, healthy.removesuffix(".")


def _two(rows: Iterable[tuple[str, str, str]]) -> Iterator[tuple[str, str]]:
    for name, meaning, _ in rows:
        yield name, meaning


def _metrics(file: str) -> Iterator[tuple[str, str, str]]:
    """Name, labels and help text of each metric for Prometheus that a file makes."""
    found: list[tuple[int, str, str, str]] = []
    for node in ast.walk(ast.parse((SOURCE / file).read_text())):
        match node:
            case ast.Call(args=[ast.Constant(str(name)), ast.Constant(str(text)), *more]):
                labels = [*more, *(keyword.value for keyword in node.keywords)]
            case ast.Tuple(elts=[_, ast.Constant(str(name)), ast.Constant(str(text))]):
                labels = []
            case _:
                continue
        if name.startswith("midflight_"):
            found.append((node.lineno, name, _labels(labels), text))
    for _, name, labels, text in sorted(found):
        yield name, labels, text


def _labels(arguments: Iterable[ast.expr]) -> str:
    lists = [argument for argument in arguments if isinstance(argument, ast.List)]
    return ", ".join(f"`{name}`" for one in lists for name in ast.literal_eval(one))


def _engine_metrics() -> Iterator[tuple[str, str]]:
    for name, _, text in _metrics("engines/app.py"):
        yield name, text


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [" | ".join(header), "|".join("---" for _ in header)]
    for name, *cells in rows:
        lines.append(" | ".join([f"`{name}`", *(cell.replace("|", "\\|") for cell in cells)]))
    head, rule, *body = lines
    return "\n".join([f"| {head} |", f"|{rule}|", *(f"| {line} |" for line in body), ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path, help="what is written, such as docs/metrics.md")
    parser.parse_args().page.write_text(page())


if __name__ == "__main__":
    main()

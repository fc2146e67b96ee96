"""A run, or several, as a page to attach to a result: HTML in one file that loads nothing from a
network, or Markdown with its plots beside it.
"""

import base64
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import jinja2
import msgspec

from midflight.archive.conversation import conversation_of
from midflight.archive.ledger import Ledger, ledger_of
from midflight.archive.phases import RunPhase, phases_of
from midflight.archive.runs import ArchivedRun, differences, flat, open_runs
from midflight.archive.samples import SampleChoice, chosen, in_words
from midflight.errors import ConfigError, MidflightError
from midflight.observe import plot
from midflight.observe.atomic_write import write_whole
from midflight.observe.history import JournalHistory
from midflight.observe.machine import MACHINE
from midflight.observe.readable import UNKNOWN, duration, number, table_cell
from midflight.observe.summary import SUMMARY
from midflight.types import Json

FORMATS = {".html": "page.html", ".md": "page.md"}
MAX_SAMPLES = 3
"""The number of samples of each kind that are shown: a page is read by people."""
LED_BY = ("reward, last step", "steps", "state")
"""The figures at the top of the page, after the held-out scores."""
VERDICT = ("who was busy", "advice")
"""The sentences below them."""
SHOWN = {
    "best": "reward was highest",
    "worst": "reward was lowest",
    "failed": "there was no reward",
}


@dataclass(frozen=True, slots=True)
class ReportSample:
    """A rollout as text, and why it is shown."""

    why: str
    text: str


@dataclass(frozen=True, slots=True)
class RunReport:
    """The contents of the page about one run."""

    title: str
    folder: str
    numbers: tuple[tuple[str, str], ...]
    phases: tuple[RunPhase, ...]
    heldout: tuple[tuple[str, ...], ...]
    alarms: tuple[tuple[str, str], ...]
    samples: tuple[ReportSample, ...]
    ledger: tuple[tuple[str, str, str], ...]
    balance: str
    options: Mapping[str, Json]
    machine: Mapping[str, str]
    loss: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """The parts that could not be shown, and the reasons."""

    @property
    def lead(self) -> list[tuple[str, str]]:
        """The numbers that a reader looks for first, and the number of alarms."""
        texts = dict(self.numbers)
        scores = [(label, text) for label, text in self.numbers if label.startswith("held-out ")]
        others = [(label, texts[label]) for label in LED_BY if label in texts]
        verdict = [(label, texts[label]) for label in VERDICT if label in texts]
        alarms = ("alarms", str(len(self.alarms)) if self.alarms else "none")
        return [*scores, *others, alarms, *verdict]


@dataclass(slots=True)
class _Missing:
    """Collects the parts of a run that could not be read, each with its reason. The rest is
    shown.
    """

    notes: list[str] = field(default_factory=list[str])

    def tried(self, what: str, look: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return look()
        except MidflightError as error:
            self.notes.append(f"no {what}: {error}")
            return otherwise


def write_report(folders: Sequence[Path], out: Path) -> list[Path]:
    """Writes the page, and returns the files that were written. Raises `ConfigError` before
    anything is touched, if there is no run, a run without steps, another ending than .html and .md,
    or a file that cannot be written.
    """
    if out.suffix not in FORMATS:
        raise ConfigError(
            f"writing {out}: a report is {' or '.join(FORMATS)}; give --out a name that ends so."
        )
    if out.is_dir() or not out.absolute().parent.is_dir():
        why = "it is a folder" if out.is_dir() else "its folder is not there"
        raise ConfigError(f"writing {out}: {why}; give --out a file in a folder that is.")
    runs = open_runs(folders)
    for run in runs:
        if not run.journal().past.steps:
            raise ConfigError(
                f"{run.folder} has no steps yet, so that there is nothing to report; wait for the "
                "first, or give another run."
            )
    titles = [run.slug for run in runs]
    if len(runs) == 1:
        titles = [runs[0].describe().name]
    reports = [report_of(run, title) for run, title in zip(runs, titles, strict=True)]
    missing = _Missing()
    pasts = {title: run.journal().past for run, title in zip(runs, titles, strict=True)}
    pictures = cast("dict[str, bytes]", missing.tried("plots", lambda: _pictures(pasts), {}))
    beside: dict[str, bytes] = {}
    shown: dict[str, str] = {}
    for name, png in pictures.items():
        if out.suffix == ".html":
            shown[name] = _inlined(png)
        else:
            shown[name] = f"{out.stem}-{name}.png"
            beside[shown[name]] = png
    options = differences([run.config() for run in runs]) if len(runs) > 1 else {}
    template = _environment().get_template(FORMATS[out.suffix])
    text = template.render(
        reports=reports, pictures=shown, differences=options, notes=missing.notes
    )
    try:
        for name, png in beside.items():
            write_whole(out.with_name(name), png)
        write_whole(out, text.encode())
    except OSError as error:
        raise ConfigError(
            f"writing {out}: {error.strerror or error}; choose another --out, or make its folder "
            "writable."
        ) from error
    return [out] + [out.with_name(name) for name in beside]


def report_of(run: ArchivedRun, title: str) -> RunReport:
    """The report of one run. Its notes say why a part that could not be read is missing."""
    missing = _Missing()
    described = run.describe()
    past = run.readings.past
    summary = described.summary
    folder = run.folder
    if summary.peak_memory_mb is None:
        missing.notes.append(
            f"no {SUMMARY}: the run has not ended in order, and numbers are those of its last step"
        )
    ledger = cast("Ledger | None", missing.tried("ledger", lambda: ledger_of(folder), None))
    machine = _read(folder / MACHINE)
    if not machine:
        missing.notes.append(
            f"no {MACHINE}: the run was made by an older Midflight, which did not write down where "
            "it ran"
        )
    return RunReport(
        title=title,
        folder=str(folder),
        numbers=tuple(described.rows()),
        phases=tuple(phases_of(past, summary)),
        heldout=tuple(_heldout(past)),
        alarms=tuple((f"step {alarm.step}: {alarm.name}", alarm.text) for alarm in past.alarms),
        samples=tuple(_samples(folder, missing)),
        ledger=() if ledger is None else tuple(_ledger(ledger)),
        balance="" if ledger is None else ledger.balance,
        options=flat(run.config()),
        machine={name: str(value) for name, value in machine.items()},
        loss=summary.loss,
        notes=tuple(missing.notes),
    )


def _read(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file. It is empty if there is none, or if the file is being
    written.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return {}


def _heldout(past: JournalHistory) -> Iterator[tuple[str, ...]]:
    for line in past.evaluations:
        mark = " (do not compare)" if line.incomplete else ""
        yield (
            line.source,
            str(line.version),
            number(line.mean_reward) + mark,
            str(line.num_tasks),
            str(line.num_failed),
        )


def _samples(folder: Path, missing: _Missing) -> Iterator[ReportSample]:
    for kind, why in SHOWN.items():
        choice = SampleChoice(
            number=MAX_SAMPLES, best=kind == "best", worst=kind == "worst", failed=kind == "failed"
        )
        try:
            keys = chosen(folder, choice)
        except MidflightError:
            continue  # there is no such rollout, for instance because none failed
        for key in keys:
            seen = missing.tried(
                f"sample {key}",
                lambda key=key: conversation_of(folder, key, with_advantages=False),
                None,
            )
            if seen is not None:
                yield ReportSample(why, in_words(seen))


def _ledger(ledger: Ledger) -> Iterator[tuple[str, str, str]]:
    for name, *_, tokens, meaning in ledger.token_rows():
        yield name, tokens, meaning


def _pictures(pasts: Mapping[str, JournalHistory]) -> dict[str, bytes]:
    """The plots as PNGs, by name."""
    title = " and ".join(pasts)
    with tempfile.TemporaryDirectory(prefix="midflight-") as place:
        reward = Path(place) / "reward.png"
        work = Path(place) / "work.png"
        if len(pasts) == 1:
            plot.draw_history(next(iter(pasts.values())), reward, title=title)
        else:
            plot.draw_comparison(pasts, reward, title=title)
        plot.draw_work(pasts, work, title="tokens per second, and length of rollouts")
        return {"reward": reward.read_bytes(), "work": work.read_bytes()}


def _inlined(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _environment() -> jinja2.Environment:
    """The templates. Text of models and users is escaped in HTML, and fenced in Markdown."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("midflight.report", "."),
        autoescape=jinja2.select_autoescape(["html"]),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    made.filters |= {"duration": duration, "fenced": fenced, "cell": cell, "option": _option}
    return made


def fenced(text: str) -> str:
    """A block of code, with a fence that the text does not have."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"


def cell(text: object) -> str:
    """The text of a cell in a table of Markdown."""
    return UNKNOWN if text is None else table_cell(str(text))


def _option(value: Json) -> str:
    return "(unset)" if value is None else msgspec.json.encode(value).decode()

"""A report: everything that it must show, in one file, and escaped; and what it refuses."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.archive.stores import Recorded
from tests.archive.test_runs import made_run, score_line, step_line
from tests.archive.test_trace import LINES, written

from midflight.cli import main
from midflight.errors import ConfigError, MidflightError
from midflight.observe import plot
from midflight.report.page import cell, fenced, write_report

SUMMARY = {
    "steps": 5,
    "version": 5,
    "training_seconds": 80.0,
    "peak_memory_mb": 512.0,
    "sources": {"sums": {"num_heldout": 8, "heldout_before": 0.125, "heldout_after": 0.875}},
    "overlap_share": 0.375,
    "seconds": 90.0,
    "heldout_before": 0.125,
    "heldout_after": 0.875,
    "bound": "generation-bound",
    "advice": "the trainer is idle 60%: more engine.count",
    "engine_busy": 0.9,
    "trainer_busy": 0.4,
    "loss": ["loss = -log p * A"],
}
MACHINE = {"midflight": "0.2.0 (commit 0123456789ab)", "torch": "2.13.0", "processors": "2 x some"}


class Page(HTMLParser):
    """The text that a reader sees, and every address that a browser would ask."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.said: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.asked += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        assert tag != "script"
        if tag not in ("meta", "img", "br", "!doctype"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.said.append(data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two groups, the first trained in step 5; a rollout failed; a model that writes HTML."""
    run = made_run(tmp_path / "run", score_line(0, 0.125), step_line(1, 0.25), step_line(5, 0.75, seconds=7.0), score_line(5, 0.875))
    with Recorded(run) as store:
        store.train(store.group(0, (1.0, 0.0), said="<img src=http://evil.example/x> {sample}"), version=5)
        store.group(1, (0.25, None), source="sums", error="KeyError: 'answer'")
    written(tmp_path / "timeline", LINES)
    (tmp_path / "timeline" / "timeline.jsonl").rename(run / "timeline.jsonl")
    (run / "summary.json").write_text(json.dumps(SUMMARY))
    (run / "machine.json").write_text(json.dumps(MACHINE))
    return run


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures that cost nothing."""
    for name in ("draw_history", "draw_comparison", "draw_work"):
        monkeypatch.setattr(plot, name, lambda _, picture, *, title: picture.write_bytes(b"\x89PNG" + title.encode()))


def test_a_page_is_one_file_that_asks_nobody_and_shows_everything(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert main(["report", str(folder), "--out", str(out)]) == 0
    page = Page(out.read_text())
    assert len(page.asked) == 2 and all(address.startswith("data:image/png;base64,iVBORw0KGgo") for address in page.asked)
    said = "".join(page.said)
    for shown in (
        *("generation-bound: engines busy 90%, trainer busy 40%", "more engine.count", "0.125", "0.875", "1 min 30 s"),
        *("training", "The ledger: it balances", "KeyError: 'answer'", "<img src=http://evil.example/x> 0", "reward 1.000", "reward 0.000"),
        *("loss = -log p * A", "commit 0123456789ab", "2 x some", "run.steps"),
    ):
        assert shown in said, shown


def test_markdown_has_its_plots_beside_it_and_fences_what_models_say(folder: Path, tmp_path: Path, undrawn: None) -> None:
    out = tmp_path / "out" / "result.md"
    out.parent.mkdir()
    assert main(["report", str(folder), "--out", str(out)]) == 0
    assert sorted(path.name for path in out.parent.iterdir()) == ["result-reward.png", "result-work.png", "result.md"]
    text = out.read_text()
    assert "![" in text and "(result-reward.png)" in text and "| who was busy | generation-bound: engines busy 90%" in text
    assert "| held-out sums | 0.125 → 0.875 (8 tasks) |" in text and "```text\n0-0-0-0: letters" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in rows)


def test_several_runs_are_compared_by_the_options_that_differ(folder: Path, tmp_path: Path, undrawn: None) -> None:
    other = made_run(tmp_path / "other", step_line(1, 0.5), options="steps = 9")
    out = tmp_path / "both.html"
    assert main(["report", str(folder), str(other), "--out", str(out)]) == 0
    said = "".join(Page(out.read_text()).said)
    assert "Options that differ" in said and "run.steps" in said and "other" in said
    assert "no summary.json" in said and "no ledger" in said and "no machine.json" in said  # of the other, which has none


def test_without_matplotlib_there_is_a_page_that_says_so(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise ConfigError("no plot was drawn: pip install 'midflight[plot]'")

    monkeypatch.setattr(plot, "draw_history", refuses)
    (out,) = write_report([folder], tmp_path / "report.html")
    page = Page(out.read_text())
    assert not page.asked and "midflight[plot]" in "".join(page.said)


def test_what_cannot_be_reported_is_refused_before_anything_is_written(folder: Path, tmp_path: Path, undrawn: None) -> None:
    empty = made_run(tmp_path / "empty")
    good = tmp_path / "report.html"
    for folders, out, remedy in (
        ([folder], tmp_path / "report.pdf", r"\.html or \.md"),
        ([folder], tmp_path / "missing" / "report.html", "its folder is not there"),
        ([tmp_path / "nothing"], good, "midflight runs DIR"),
        ([empty], good, "has no steps yet.*wait for the first"),
    ):
        with pytest.raises(MidflightError, match=remedy):
            write_report(folders, out)
    assert not good.exists()


def test_texts_can_not_leave_their_cell_or_their_fence() -> None:
    assert cell("a|b\n<c>") == "a\\|b<br>&lt;c>"
    assert fenced("```\nescaped") == "````text\n```\nescaped\n````"

"""summary.json and the table that ends a run."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
from rich.console import Console

from midflight.observe.history import JournalHistory
from midflight.observe.lines import StepLine
from midflight.observe.status import Bound, IdleTime, LearningStatus, SourceStatus, Status, Totals
from midflight.observe.summary import StartNotes, past_seconds, summarise, summary_of, write_summary
from midflight.observe.summary_table import summary_table
from midflight.types import Accounts

STATUS = Status(
    name="demo",
    step=300,
    version=300,
    sources=(
        SourceStatus("spell_backward", 0.91, 30_000, 256, 0.5, 0.94),
        SourceStatus("chain_sum", 0.4, 5000, 36, 0.2, failed_before=4, incomplete=True),
    ),
    training_seconds=150.0,
    totals=Totals(900_000, 400_000, 35_000, 3, 12_000, 0, 300, 4),
    overlap_share=0.87,
    engine_busy=0.95,
    trainer_busy=0.9,
    bound=Bound.BALANCED,
    advice="more engines",
    failures={"ToolError": 7, "no reward": 1},
    learning=LearningStatus(12.3, 11.0, 0.25, 0.4, 0.125),
    waits=(IdleTime("trainer", "engines", 4.5, 0.03),),
    accounts=Accounts(submitted=613, running=1, waiting=2, leased=3, trained=600, dropped={"stale": 3, "requeued": 4}),
)
SAID = StartNotes(loss=("loss = -r A [1]",), notes=("too few cores",))
SUMMARY = summarise(STATUS, primary="spell_backward", seconds=200.0004, before=50.0, peak_memory_mb=1234.56, said=SAID)


def test_the_summary_holds_every_number_by_which_a_run_is_judged(tmp_path: Path) -> None:
    write_summary(SUMMARY, tmp_path / "run" / "summary.json")
    found = json.loads((tmp_path / "run" / "summary.json").read_text())
    expected = {
        "heldout_before": 0.5,
        "heldout_after": 0.94,
        "seconds": 250.0,
        "start_seconds": 200.0,
        "training_seconds": 150.0,
        "peak_memory_mb": 1234.6,
        "weight_updates": 300,
        "rollouts_spanning_versions": 12_000,
        "failed_requests": 0,
        "trained_tokens": 400_000,
        "max_token_staleness": 4,
        "overlap_share": 0.87,
    }
    assert {key: found[key] for key in expected} == expected
    assert found["sources"]["chain_sum"] == {
        "name": "chain_sum",
        "num_rollouts": 5000,
        "heldout_before": 0.2,
        "heldout_after": None,
        "num_heldout": 36,
        "reward": 0.4,
        "failed_before": 4,
        "failed_after": 0,
        "incomplete": True,
    }
    assert (found["advice"], found["loss"], found["notes"]) == ("more engines", ["loss = -r A [1]"], ["too few cores"])
    assert found["failures"] == {"ToolError": 7, "no reward": 1}
    assert (found["learning"]["truncated_share"], found["learning"]["reward_spread"]) == (0.25, 0.4)
    assert found["waits"] == {"trainer for engines": 4.5}
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["summary.json"]


def test_a_run_that_goes_on_has_run_for_as_long_as_its_summary_says_or_its_journal_where_it_was_killed_since(tmp_path: Path) -> None:
    assert past_seconds(tmp_path) == 0.0
    write_summary(SUMMARY, tmp_path / "summary.json")
    assert past_seconds(tmp_path) == 250.0
    line = {"kind": "evaluation", "version": 0, "step": 0, "seconds": 260.5, "source": "a", "num_tasks": 1, "mean_reward": 0.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert past_seconds(tmp_path) == 260.5


def test_a_summary_is_read_as_it_was_written_until_the_run_makes_a_further_step(tmp_path: Path) -> None:
    write_summary(SUMMARY, tmp_path / "summary.json")
    line = StepLine(
        step=300, version=300, seconds=240.0, step_seconds=1.0, tokens=9, rollouts=1, generation_rate=1.0, training_rate=1.0,
        totals=Totals(trained_tokens=400_000), training_seconds=140.0, trainer_busy=0.5, waits={"trainer for engines": 7.0},
    )  # fmt: skip
    assert summary_of(tmp_path, JournalHistory(steps=(line,))) == SUMMARY
    further = msgspec.structs.replace(line, step=301, version=301)
    found = summary_of(tmp_path, JournalHistory(steps=(line, further)))
    assert (found.steps, found.seconds, found.trained_tokens, found.peak_memory_mb) == (301, 240.0, 400_000, None)
    assert (found.trainer_busy, found.training_seconds, found.waits) == (0.5, 140.0, {"trainer for engines": 14.0})


def test_a_summary_of_an_earlier_version_is_read_and_one_that_is_being_written_is_none(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"name": "old", "steps": 3, "version": 3, "sources": {"a": {"heldout_before": 0.5}}}')
    found = summary_of(tmp_path, JournalHistory())
    assert (found.steps, found.sources["a"].heldout_before, found.training_seconds) == (3, 0.5, 0.0)
    (tmp_path / "summary.json").write_text('{"name": "ol')
    assert summary_of(tmp_path, JournalHistory()).steps == 0


def test_without_an_evaluation_the_scores_are_null_not_zero() -> None:
    summary = summarise(Status(), primary="spell_backward", seconds=1.0, peak_memory_mb=1.0)
    assert (summary.heldout_before, summary.heldout_after, summary.overlap_share) == (None, None, None)


def test_the_table_shows_scores_and_counts() -> None:
    console = Console(record=True, width=140, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(summary_table(SUMMARY, STATUS))
    text = console.export_text()
    for words in (
        "demo: 300 steps",
        "4 min 10 s",
        "trainer for engines 3%",
        "0.500 → 0.940 (256 tasks)",
        "0.200 (4 of 40 tasks failed: do not compare)",
        "12,000 of 35,000",
        "7 ToolError, 1 no reward",
        "spread 0.400, 12% of groups all alike",
        "12 tokens a rollout, 11 trained, 25% cut short",
        "4 versions",
        "87%",
        "more engines",
        "1,235 MB",
        "loss = -r A [1]",
        "too few cores",
        "600 trained, 6 not yet, 7 dropped",
    ):
        assert words in text, words

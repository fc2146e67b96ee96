"""The runs of `make pretrained`: made once, resumed, refused where others lie in their place, and added up. On a model of seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from harness.run_tables import Outcome, Recipe, shortfalls, table_of  # noqa: E402
from learning import difference  # noqa: E402

from midflight.observe.history import read_journal  # noqa: E402
from pretrained import columns_of, write_docs  # noqa: E402

SUMS = ("--smoke", "--only", "sums")


def started(place: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(BENCHMARKS / "pretrained.py"), *words]
    return subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def done(place: Path, *words: str) -> tuple[int, str, str]:
    """Status, output and errors."""
    process = started(place, *words)
    said, errors = process.communicate(timeout=280)
    return process.returncode, said, errors


def test_a_finished_run_is_not_made_again_and_not_mistaken_for_one_with_other_settings(tmp_path: Path) -> None:
    folder = tmp_path / "runs/smoke/pretrained/sums-0"
    status, first, errors = done(tmp_path, *SUMS)
    assert status == 0, first + errors
    journal = (folder / "metrics.jsonl").read_bytes()
    assert "1/1 sums, seed 0" in first and not (folder / "checkpoints").exists()
    assert json.loads((folder / "used.json").read_text())["cpu_seconds"] > 1
    status, second, errors = done(tmp_path, *SUMS)
    assert (status, (folder / "metrics.jsonl").read_bytes()) == (0, journal), errors
    assert "1/1" not in second and second.splitlines()[-3:] == first.splitlines()[-3:]
    status, _, errors = done(tmp_path, *SUMS, "--set", "run.steps=3", "environment.sources.0.size=40", "environment.sources.0.heldout=4")
    assert status == 1 and "holds a finished run with run.steps = 2, and 3 is asked for" in errors


def test_a_run_that_was_interrupted_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    small = ("environment.sources.0.size=40", "environment.sources.0.heldout=4", "rollout.groups_per_step=2", "rollout.group_size=2")
    words = (*SUMS, "--set", "run.steps=60", "trainer.checkpoint_every=2", "environment.max_tokens=8", *small)
    folder = tmp_path / "runs/smoke/pretrained/sums-0"
    process = started(tmp_path, *words)
    assert process.stdout is not None
    for _ in process.stdout:
        if any((folder / "checkpoints").glob("version-*")):
            break
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143 and not (folder / "model").exists()
    used = json.loads((folder / "used.json").read_text())["cpu_seconds"]
    status, said, errors = done(tmp_path, *words)
    assert status == 0, said + errors
    history = read_journal(folder / "metrics.jsonl")
    assert [line.step for line in history.steps] == list(range(1, 61)) and history.resumes
    assert json.loads((folder / "used.json").read_text())["cpu_seconds"] > used > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--only", "products"), "there is no 'products' in the table; there are sums, calculator."),
        (("--model", "nowhere"), "nowhere: midflight fetch-model smollm2-135m"),
        (("--set", "run.stepz=3"), "run.stepz"),
    ],
)
def test_bad_input_is_refused_in_a_sentence_before_anything_starts(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    status, _, errors = done(tmp_path, *words)
    assert status == 1 and said in errors and "Traceback" not in errors
    assert not (tmp_path / "runs").exists()


# --- What is made of their numbers -----------------------------------------------------------------------------------


def outcome(seed: int, before: float, after: float, *, promised: float | None = 0.4, untrained: float | None = None) -> Outcome:
    recipe = Recipe("sums", Path("sums.toml"), "sums", "sums", promised=promised)
    rewards, heldout = [(30.0, before), (60.0, after)], [(10.0, before), (70.0, after)]
    return Outcome(
        recipe, seed, untrained, before, after, 64, 90.0, 120.0, 0.5, 2, 100, 10, 0, 0.8, 7000.0, rewards=rewards, heldout=heldout
    )


def test_the_table_has_the_mean_of_the_seeds_and_its_standard_error() -> None:
    found = [outcome(0, 0.1, 0.4), outcome(1, 0.1, 0.6)]
    row = table_of(found, columns_of(found)).splitlines()[-1]
    # The mean of 0.4 and 0.6 is 0.5; their standard deviation 0.1414, over the root of 2: 0.1.
    assert row.startswith("| sums | 2 | 0.100 ± 0.000 | **0.500 ± 0.100** | 0.400 ± 0.100 | 1.5 ± 0.0 | 2.0 ± 0.0 |")
    assert "| 20 of 200 |" in row


def test_a_score_before_the_warm_start_has_a_column_of_its_own() -> None:
    found = [outcome(0, 0.3, 0.6, untrained=0.05)]
    head, _, row = table_of(found, columns_of(found)).splitlines()
    assert head.startswith("| run | seeds | before the warm start | held out before |") and row.startswith("| sums | 1 | 0.050 | 0.300 |")


def test_what_rises_by_less_than_is_promised_is_named() -> None:
    assert shortfalls([outcome(0, 0.1, 0.4), outcome(1, 0.1, 0.7)]) == []
    assert shortfalls([outcome(0, 0.1, 0.4)]) == ["sums: the held-out score rises by 0.300 in the mean of 1 seeds, 0.4 is promised."]
    assert shortfalls([outcome(0, 0.1, 0.1, promised=None)]) == []


def test_the_page_gets_table_and_picture_between_its_comments(tmp_path: Path) -> None:
    page = tmp_path / "pretrained.md"
    page.write_text("before\n<!-- tasks: begin -->\nwas here\n<!-- tasks: end -->\nafter\n")
    write_docs("tasks", [outcome(0, 0.1, 0.6)], tmp_path)
    written = page.read_text()
    assert (
        written.startswith("before\n<!-- tasks: begin -->\n![")
        and written.endswith("<!-- tasks: end -->\nafter\n")
        and "was here" not in written
    )
    assert (tmp_path / "images/pretrained-tasks.svg").read_text().count("<svg") == 1
    with pytest.raises(SystemExit, match="ages: begin"):
        write_docs("ages", [outcome(0, 0.1, 0.6)], tmp_path)


def test_a_difference_of_scores_is_held_against_the_noise_of_both() -> None:
    # One seed each: the noise is that of 64 tasks, the root of 0.5 * 0.5 / 64 for both: 0.0625, together 0.0884.
    its, others = outcome(0, 0.1, 0.5), outcome(0, 0.1, 0.5)
    its, others = replace(its, after=0.5, training_seconds=43.0), replace(others, after=0.5, training_seconds=50.0)
    assert difference([its], [others]) == "+0.000 held out, +0.0 times the noise of 0.088: **within noise**, in **0.86** of the wall time."
    assert "**NOT within noise**" in difference([replace(its, after=0.9)], [others])

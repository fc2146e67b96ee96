"""Runs are found and described by what lies in their folders, in whatever state that is."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from midflight.archive.runs import RunCondition, differences, open_run, open_runs, runs_under
from midflight.cli import main
from midflight.errors import NoRun, RunGone


def step_line(step: int, reward: float | None, *, seconds: float = 1.0) -> str:
    line = {"kind": "step", "step": step, "version": step, "seconds": seconds * step, "step_seconds": 0.5, "tokens": 10, "rollouts": 4,
            "generation_rate": 1.0, "training_rate": 1.0, "totals": {"trained_tokens": 10 * step}}  # fmt: skip
    return json.dumps({**line, "reward": reward} if reward is not None else line) + "\n"


def score_line(step: int, score: float) -> str:
    return json.dumps({"kind": "evaluation", "version": step, "step": step, "seconds": float(step), "source": "sums", "num_tasks": 8, "mean_reward": score}) + "\n"  # fmt: skip


def made_run(folder: Path, *lines: str, options: str = "steps = 4", name: str = "sums") -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(lines))
    (folder / "config.toml").write_text(f'[run]\nname = "{name}"\nfolder = "{folder}"\n{options}\n')
    return folder


def lock(folder: Path, *, pid: int, started: str) -> None:
    (folder / "lock").write_text(json.dumps({"pid": pid, "started": started, "since": "2026-11-22 10:00:00", "command": "midflight train"}))


def test_a_run_is_described_by_its_journal_and_its_configuration(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "a", score_line(0, 0.25), step_line(1, 0.5), step_line(2, None, seconds=3.0), score_line(2, 0.75))
    found = open_run(folder).describe()
    assert (found.name, found.steps, found.reward, found.heldout, found.summary.seconds) == ("sums", "2 of 4", 0.5, 0.75, 6.0)


@pytest.mark.parametrize(
    ("lock_of", "products", "steps", "expected"),
    [
        ("us", (), 1, RunCondition.RUNNING),
        ("a dead process", (), 1, RunCondition.CRASHED),
        ("nobody", (), 1, RunCondition.STOPPED),
        ("nobody", (), 4, RunCondition.FINISHED),
        ("nobody", ("model",), 1, RunCondition.FINISHED),
    ],
)
def test_the_state_of_a_run_is_told_by_its_lock_and_its_products(
    tmp_path: Path, lock_of: str, products: tuple[str, ...], steps: int, expected: RunCondition
) -> None:
    folder = made_run(tmp_path / "a", *(step_line(step + 1, 0.5) for step in range(steps)))
    for name in products:
        (folder / name).mkdir()
    if lock_of != "nobody":
        started = Path(f"/proc/{os.getpid()}/stat").read_text().rpartition(")")[2].split()[19]
        lock(folder, pid=os.getpid(), started=started if lock_of == "us" else "1")
    assert open_run(folder).describe().condition is expected


def test_runs_are_found_at_any_of_three_depths_and_never_inside_another(tmp_path: Path) -> None:
    for inner in ("b", "a/deep/er", "a/deep/er/checkpoints/c", "too/far/down/below"):
        made_run(tmp_path / inner)
    assert [run.folder.relative_to(tmp_path).as_posix() for run in runs_under(tmp_path)] == ["a/deep/er", "b"]
    assert [run.slug for run in runs_under(tmp_path / "b")] == ["b"]


def test_folders_of_one_name_get_addresses_of_their_own(tmp_path: Path) -> None:
    folders = [made_run(tmp_path / one / "my run") for one in ("x", "y")]
    assert [run.slug for run in open_runs([*folders, folders[0]])] == ["my-run", "my-run-2"]


def test_a_folder_that_is_no_run_is_refused_with_the_runs_below_it(tmp_path: Path) -> None:
    made_run(tmp_path / "runs" / "a")
    with pytest.raises(NoRun, match=r"is no run: it has neither metrics\.jsonl nor store\.sqlite\. There are runs below it: runs/a\."):
        open_run(tmp_path)
    with pytest.raises(NoRun, match="is not a folder"):
        open_run(tmp_path / "nowhere")


def test_a_run_that_is_deleted_while_it_is_looked_at_says_so(tmp_path: Path) -> None:
    run = open_run(made_run(tmp_path / "a", step_line(1, 0.5)))
    assert run.describe().summary.steps == 1
    (run.folder / "metrics.jsonl").unlink()  # half of the way
    assert run.describe().summary.steps == 0
    shutil.rmtree(run.folder)
    for look in (run.describe, run.config):
        with pytest.raises(RunGone, match="was deleted or moved"):
            look()


def test_configurations_differ_by_option_and_by_table_and_not_by_where_the_run_lies() -> None:
    one = {"run": {"folder": "a", "seed": 0}, "environment": {"sources": [{"weight": 0.5}]}}
    other = {"run": {"folder": "b", "seed": 1}, "environment": {"sources": [{"weight": 0.5}, {"weight": 0.25}]}}
    assert differences([one, other]) == {"run.seed": [0, 1], "environment.sources.1.weight": [None, 0.25]}


def test_the_commands_list_and_compare_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made_run(tmp_path / "runs" / "a", score_line(0, 0.25), step_line(1, 0.125))
    made_run(tmp_path / "runs" / "b", step_line(1, 0.5), options="steps = 5")
    assert main(["runs"]) == 0
    first = capsys.readouterr().out.splitlines()[3]
    assert first.split()[:7] == ["runs/a", "stopped", "1", "of", "4", "0.125", "0.250"]
    assert main(["compare", "runs/a", "runs/b"]) == 0
    out = capsys.readouterr().out
    assert "run.steps" in out and ["steps", "1", "of", "4", "1", "of", "5"] in [line.split() for line in out.splitlines()]
    assert (tmp_path / "compare.png").stat().st_size > 1000
    assert main(["compare", "runs/a"]) == 2 and "give the folders of two runs" in capsys.readouterr().err

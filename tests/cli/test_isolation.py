"""A run whose programs cannot be isolated is refused before it begins, by a start, its dry run and `midflight doctor` alike."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from tests.cli.test_one_list import quick, refused_by_all, said  # noqa: F401 (quick is a fixture)

from midflight.adapters import harbor
from midflight.cli import main
from midflight.environments.sandboxes import choice

LATE = """
async def play(task, client):
    from midflight import sandbox as box
    return float((await box(seconds=5).python("print(1)")).ok)

async def elsewhere(task, client):
    import midflight
    try:
        midflight.sandbox()
    except Exception:
        return 0.0
    return midflight.sandbox(kind=task.data["kind"])
"""
MISSING = "which is not installed: install bubblewrap (apt-get install bubblewrap)"
REWARD = 'environment.rewards=[{entry="code_rewards:passes"}]'


@pytest.fixture(autouse=True)
def written(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    Path("code_rewards.py").write_text("async def passes(completion, sandbox):\n    return 1.0\n")
    Path("early.py").write_text("import midflight\nbox = midflight.sandbox(seconds=5)\nasync def play(task, client):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    Path("late.py").write_text(LATE)
    for name in ("code_rewards", "early", "late"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has everything but bubblewrap."""
    found = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, *more, **others: None if name == "bwrap" else found(name, *more, **others))


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize(
    "options",
    [
        [REWARD],
        [REWARD, "environment.sandbox.seconds=5"],
        ["environment.sandbox.seconds=5"],
        ["environment.entry=early:play"],
        ["environment.entry=late:play"],
    ],
    ids=["a reward that asks", "and sets limits", "limits alone", "an agent that makes one at once", "and one in a rollout"],
)
def test_without_bubblewrap_nothing_is_touched(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert MISSING in refused_by_all(capsys, *options)
    assert not Path("run").exists()


def test_tasks_of_harbor_are_refused_too_after_others_had_their_sandbox(
    capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    if shutil.which("bwrap"):
        harbor._sandbox("{}")
    request.getfixturevalue("without")
    task = Path("tasks/answer")
    for name in ("environment", "tests"):
        (task / name).mkdir(parents=True)
    (task / "instruction.md").write_text("Write 42 into answer.txt.")
    (task / "task.toml").write_text('schema_version = "1.1"\n')
    (task / "tests" / "test.sh").write_text("true")
    source = '{entry="midflight.adapters.harbor:tasks", options={path="tasks"}}'
    assert MISSING in refused_by_all(capsys, "environment.entry=midflight.adapters.harbor:play", f"environment.sources=[{source}]")


@pytest.mark.usefixtures("without")
def test_an_agent_that_has_another_way_is_not_refused(capsys: pytest.CaptureFixture[str]) -> None:
    text = LATE.replace("async def play", "async def unused").replace("box(seconds=5)", "box(**task.data)")
    Path("late.py").write_text(text)
    status, words = said(capsys, "train", "run.toml", "--dry-run", "--set", "environment.entry=late:elsewhere")
    assert status == 0 and "bubblewrap" not in words, words


@pytest.mark.usefixtures("without")
def test_a_run_without_a_sandbox_needs_none(capsys: pytest.CaptureFixture[str]) -> None:
    status, words = said(capsys, "train", "run.toml", "--dry-run")
    assert status == 0 and "bubblewrap" not in words


def test_a_group_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "which is no group of this machine" in refused_by_all(capsys, "run.share_with_group=nobodies")


def test_what_a_sandbox_does_not_hold_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "sandbox_of", lambda section: None)
    status, words = said(capsys, "train", "run.toml", "--dry-run", "--set", "environment.sandbox.kind=trusted")
    assert status == 0 and "its programs run as you, with your files and your network" in " ".join(words.split())
    monkeypatch.setattr(choice, "found_hierarchies", lambda: None)
    status, words = said(capsys, "train", "run.toml", "--dry-run", "--set", "environment.sandbox.seconds=5")
    assert status == 0 and "no control group can be had here" in " ".join(words.split())
    assert main(["train", "run.toml", "--dry-run"]) == 0 and "control group" not in capsys.readouterr().out

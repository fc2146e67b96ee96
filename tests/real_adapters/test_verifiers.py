"""Tasksets of verifiers, unmodified, are trained: one as an author writes it, and the games that verifiers ships. In verifiers' interpreter."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.pages.blocks import blocks_of
from tests.real.adapted import adapted
from tests.real.processes import ENVIRON, journal, steps

from midflight.adapters import verifiers
from midflight.errors import ConfigError

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).parents[2]

LETTERS = """
entry = "midflight.adapters.verifiers:play"
max_tokens = 6
[[environment.sources]]
entry = "midflight.adapters.verifiers:tasks"
content = "key"
heldout = 4
options = { taskset = "letters-tasks", options = { count = 60 } }
"""
HANGMAN = """
entry = "midflight.adapters.verifiers:play"
max_tokens = 6
[[environment.sources]]
entry = "midflight.adapters.verifiers:tasks"
content = "key"
heldout = 4
options = { taskset = "textarena", size = 40, options = { game = "Hangman-v0" } }
"""
NO_REWARDS = """
import verifiers.v1 as vf

class Silent(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        yield vf.Task(vf.TaskData(prompt="Say a."), self.config.task)

__all__ = ["Silent"]
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With the author's taskset, and the words that a game draws from where nltk looks for them."""
    shutil.copy(Path(__file__).with_name("letters_tasks.py"), tmp_path)
    words = tmp_path / "nltk" / "corpora" / "words"
    words.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (words / name).write_text("".join(f"{word}\n" for word in ("tree", "stone", "letter", "east", "rose", "note", "seat")))
    (words / "README").write_text("")
    monkeypatch.setitem(ENVIRON, "NLTK_DATA", str(tmp_path / "nltk"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_taskset_is_trained_and_the_parts_of_its_rubric_are_in_the_journal(place: Path) -> None:
    summary = adapted(place, LETTERS, forked=False, seconds=250)
    measured = [step for step in steps(place / "run") if step["rollouts"]]  # of rollouts that ended since the step before
    assert measured
    for step in measured:
        assert set(step["components"]) == {"even", "has"}
        assert sum(step["components"].values()) == pytest.approx(step["reward"])  # each with its weight: they are 1 and a half
        assert step["metrics"]["length"] > 0
    assert 0 <= summary["heldout_after"] <= 1.5
    scores = [line for line in journal(place / "run") if line["kind"] == "evaluation"]
    assert [(line["num_tasks"], line["num_failed"]) for line in scores] == [(4, 0)] * 2


def test_the_games_that_verifiers_ships_are_trained_over_several_turns(place: Path) -> None:
    adapted(place, HANGMAN, forked=False, seconds=250)
    measured = [step for step in steps(place / "run") if step["rollouts"]]
    assert measured and all(step["turns_mean"] >= 2 and set(step["components"]) == {"game_reward"} for step in measured)


def test_what_the_clients_of_agents_look_for_is_loaded_before_a_taskset_is_imported_in_a_thread() -> None:
    """The SDK takes a package for whole that a thread is still importing: rollouts that began meanwhile failed."""
    said = "import asyncio, sys; from midflight.environments.agents import SharedClients\nasync def main(): SharedClients()\nasyncio.run(main()); print('httpx2' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", said], env=ENVIRON, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


@pytest.mark.timeout(1800)
def test_a_taskset_of_somebody_elses_package_is_learnt_with_held_out_tasks_of_its_own(tmp_path: Path) -> None:
    """As its page says it, whole: minutes on two quiet cores. Of 128 tasks, a score has a standard deviation of 0.045 at most."""
    for name in ("configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    told = [line for block in blocks_of(ROOT / "docs" / "adapters" / "verifiers.md") if block.tried == "run" for line in block.commands()]
    assert [line.split()[0] for line in told] == ["python", "midflight"]
    for line in told:
        words = [sys.executable, *(["-m"] if line.startswith("midflight") else []), *line.removeprefix("python ").split()]
        done = subprocess.run(
            words, cwd=tmp_path, env={**ENVIRON, "PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / "marble" / "run"
    scores = [line for line in journal(run) if line["kind"] == "evaluation"]
    assert [(line["num_tasks"], line["num_failed"]) for line in scores] == [(128, 0)] * 2
    before, after = (line["mean_reward"] for line in scores)
    assert after > before + 0.2
    measured = [step for step in steps(run) if step["rollouts"]]
    assert all(set(step["components"]) == {"scored"} and set(step["metrics"]) == {"answered_legally", "closeness"} for step in measured)
    assert all(step["components"]["scored"] == pytest.approx(step["reward"]) for step in measured)


def test_what_cannot_be_trained_is_said_before_a_run(place: Path) -> None:
    (place / "silent_tasks.py").write_text(NO_REWARDS)
    with pytest.raises(ConfigError, match=r"the taskset 'silent-tasks' has no rewards.*@vf\.reward"):
        verifiers.tasks("silent-tasks")
    with pytest.raises(ConfigError, match=r"makes nothing of the taskset 'no-such-tasks'.*install its package"):
        verifiers.tasks("no-such-tasks")
    with pytest.raises(ConfigError, match=r"agents .*, and all would be trained as one"):
        verifiers.tasks("letters-tasks", env="agentic-judge")

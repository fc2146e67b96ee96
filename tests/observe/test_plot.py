"""The picture of a run."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.observe.facts import batch, rollout, step

from midflight.errors import ConfigError
from midflight.observe.journal import Journal
from midflight.observe.observers import Observers
from midflight.observe.plot import draw_in_process, draw_plot, moving_average
from midflight.observe.run_state import RunState
from midflight.types.facts import Evaluated


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    state = RunState()
    run = Observers([state.apply, Journal(tmp_path / "metrics.jsonl", state).apply])
    run.apply(Evaluated(version=0, source="spell_backward", num_tasks=256, mean_reward=0.4))
    for version in range(1, 30):
        rollout(run, version / 30)
        if version % 2:
            rollout(run, 0.5, source="chain_sum")
        batch(run, version - 1, {0: 5, version % 4: 3})
        step(run, version)
    run.apply(Evaluated(version=29, source="spell_backward", num_tasks=256, mean_reward=0.9))
    return tmp_path / "metrics.jsonl"


def test_the_picture_is_a_png_and_nothing_else_is_left(journal: Path, tmp_path: Path) -> None:
    draw_plot(journal, tmp_path / "plot.png", title="demo")
    data = (tmp_path / "plot.png").read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 20_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "plot.png", "timeline.jsonl"]


def test_a_run_that_made_no_step_has_an_empty_picture(tmp_path: Path) -> None:
    draw_plot(tmp_path / "none.jsonl", tmp_path / "plot.png", title="demo")
    assert (tmp_path / "plot.png").exists()


def test_without_matplotlib_the_remedy_is_named(journal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "matplotlib", raising=False)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"pip install 'midflight\[plot\]'"):
        draw_plot(journal, tmp_path / "plot.png", title="demo")
    assert not (tmp_path / "plot.png").exists()


def test_the_moving_average_starts_with_what_there_is() -> None:
    assert moving_average([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]


def test_a_plot_that_takes_long_is_given_up_by_the_clock_or_by_what_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is a Python that sleeps or computes."""
    program, python = tmp_path / "python", sys.executable
    monkeypatch.setattr(sys, "executable", str(program))

    def draws(body: str) -> None:
        program.write_text(f"#!{python}\nimport sys, time\n{body}\n")
        program.chmod(0o755)

    draws("end = time.process_time() + 1.5\nwhile time.process_time() < end: pass")
    assert draw_in_process(tmp_path, title="x", seconds=0.5, patient=True) is None
    assert "no plot was drawn within 0.5 s" in (draw_in_process(tmp_path, title="x", seconds=0.5) or "")
    draws("time.sleep(1e9)")
    assert "no plot was drawn within 0.5 s" in (draw_in_process(tmp_path, title="x", seconds=0.5, patient=True) or "")
    draws("sys.exit('matplotlib is not installed')")
    assert "matplotlib is not installed" in (draw_in_process(tmp_path, title="x", seconds=60, patient=True) or "")

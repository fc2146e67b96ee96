"""How often the launcher begins anew: a death costs a restart, wherever in an attempt it comes."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from midflight.config.load import load_config
from midflight.errors import RunFailed
from midflight.observe.terminal import Terminal
from midflight.run.endpoint import ControlToken
from midflight.run.launcher.run import Run
from midflight.run.places.port import PartFailed

LOST = PartFailed("rollout did not get its seat: ActorDiedError: its machine has died", part="rollout")


def attempted(folder: Path, *ends: BaseException | None) -> tuple[list[bool], str]:
    """Whether each attempt resumed, and what was said."""
    config = load_config(None, [f"run.folder={folder}", "run.restarts=1"])
    said, left, resumed = io.StringIO(), list(ends), list[bool]()

    class Ended:
        async def run(self, purpose: object, *, resume: bool) -> None:
            resumed.append(resume)
            if (end := left.pop(0)) is not None:
                raise end

    with Terminal(Console(file=said, width=200)) as terminal:
        run: Any = Run(config, terminal, ControlToken("token", is_new=False), io.BytesIO())
        run._ring = lambda *given, **named: Ended()
        asyncio.run(run._attempts(resume=False))
    return resumed, said.getvalue()


@pytest.mark.parametrize("end", [LOST, BaseExceptionGroup("parts ended", [LOST])], ids=["alone", "beside others"])
def test_a_machine_that_dies_before_anything_runs_there_costs_a_restart_and_not_the_run(tmp_path: Path, end: BaseException) -> None:
    resumed, said = attempted(tmp_path, end, None)
    assert resumed == [False, False]
    assert "its machine has died" in said and "The run goes on from the beginning; 0 restarts are left." in said


def test_what_begins_again_from_nothing_has_what_it_was_given(tmp_path: Path) -> None:
    for name in ("data.jsonl", "posted.jsonl", "store.sqlite", "start"):
        (tmp_path / name).mkdir() if name == "start" else (tmp_path / name).write_text("rows")
    attempted(tmp_path, LOST, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl", "posted.jsonl"]


def test_what_no_restart_mends_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="has waited"):
        attempted(tmp_path, RunFailed("rollout has waited 1800 s for 1 x a machine with CPU: 1"))
    with pytest.raises(PartFailed, match="its machine has died"):
        attempted(tmp_path, LOST, LOST)

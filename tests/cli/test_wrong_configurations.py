"""What cannot work is refused by the checks, in a sentence that names it, and no traceback is seen."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from midflight.config import load_config
from midflight.errors import MidflightError
from midflight.run.launcher.checks import devices, engines, table
from midflight.run.launcher.checks.check import About, Caller, Check, Plan, TorchFound

from .wrong_configurations import WRONG, write_files

ROOT = Path(__file__).parents[2]


def torch(plan: Plan) -> None:
    """It sees no GPU."""
    plan.loaded.torch = TorchFound("2.13.0", None, ())


def trial(plan: Plan, *, meanwhile: Callable[[], None] = lambda: None) -> list[object]:
    meanwhile()
    return [*table.ask(plan, table.IN_TRIAL)]


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The files of the configurations. The trial is in this process, and torch is not asked in one of its own."""
    beside = [check for check in table.BESIDE_TRIAL if check.look not in (devices.torch, engines.servers)]
    monkeypatch.setattr(table, "BESIDE_TRIAL", [Check(torch, About.MACHINE), *beside])
    monkeypatch.setattr(table, "trial", trial)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)  # with one, sets of texts have one order in all processes
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(ROOT))
    write_files(tmp_path)


@pytest.fixture
def ports() -> Iterator[dict[str, str]]:
    """One that is taken, and one that was free just now."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with socket.create_server(("127.0.0.1", 0)) as free:
            number = free.getsockname()[1]
        yield {"TAKEN": str(taken.getsockname()[1]), "FREE": str(number)}


def said_of(settings: tuple[str, ...], words: dict[str, str]) -> str:
    """The refusal, or an empty text."""
    written = list(settings)
    for word, value in words.items():
        written = [setting.replace(word, value) for setting in written]
    try:
        found = table.look(Plan(load_config("run.toml", written), Caller.DRY_RUN))
    except MidflightError as refused:
        return str(refused)
    return "\n".join(found.problems)


@pytest.mark.parametrize(("words", "settings"), WRONG, ids=[" ".join(settings)[:90] for _, settings in WRONG])
def test_what_cannot_work_is_refused_by_its_name(words: str, settings: tuple[str, ...], ports: dict[str, str]) -> None:
    said = said_of(settings, ports)
    assert words in said
    assert "Traceback" not in said


def test_the_configuration_that_they_change_is_sound() -> None:
    assert said_of((), {}) == ""

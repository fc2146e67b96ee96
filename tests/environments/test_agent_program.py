"""Environments are found by name, and what is none is refused where it is named."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from midflight.config.environment import EnvironmentSection
from midflight.environments import single_turn
from midflight.environments.agent_program import AgentProgram, environment, environment_name, load_environment
from midflight.errors import ConfigError

from .fakes import FakeClient, task

SOURCE = """
from midflight.environments.agent_program import environment

@environment(name="called by class")
class Judge:
    async def __call__(self, task, client):
        return 0.5

class NeedsArguments:
    def __init__(self, model): ...
    async def __call__(self, task, client): ...

async def one_argument(task): ...
def plain_function(task, client): return 0.75
class NoCall: ...
async def plain(task, client): return 0.25
value = 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_environments.py").write_text(SOURCE)
    (tmp_path / "broken_environments.py").write_text("import json\nimport no_such_package_anywhere\n")
    (tmp_path / "failing_environments.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    for name in ("my_environments", "broken_environments", "failing_environments"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_the_default_entry_loads():
    assert load_environment("midflight.environments.single_turn:answer") is single_turn.answer
    assert environment_name(single_turn.answer) == "answer"


@pytest.mark.usefixtures("here")
def test_functions_and_classes_of_the_current_folder_load_and_run():
    plain, judge = load_environment("my_environments:plain"), load_environment("my_environments:Judge")
    client = FakeClient()
    assert asyncio.run(plain(task(), client)) == 0.25  # type: ignore[arg-type]
    assert asyncio.run(judge(task(), client)) == 0.5  # type: ignore[arg-type]
    assert (environment_name(plain), environment_name(judge)) == ("plain", "called by class")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("my_environments", "expected `module:function`"),
        ("my_environments:", "expected `module:function`"),
        (":plain", "expected `module:function`"),
        ("no_such_environments:plain", "there is no module 'no_such_environments' here"),
        ("midflight.environments.single_tern:answer", "there is no module 'midflight.environments.single_tern' here"),
        ("my_environments:plan", "my_environments has no 'plan'. Did you mean 'plain'"),
        (
            "broken_environments:x",
            "importing broken_environments failed with ModuleNotFoundError: No module named 'no_such_package_anywhere'",
        ),
        ("failing_environments:x", "importing failing_environments failed with ZeroDivisionError"),
        ("my_environments:value", "is int 3, which cannot be run: an environment is `async def name(task, client) -> reward`"),
        ("my_environments:NoCall", "NoCall is type"),
        ("my_environments:one_argument", "cannot be called with (task, client): too many positional arguments"),
        ("my_environments:NeedsArguments", "cannot be called with (task, client): missing a required argument: 'model'"),
    ],
)
def test_what_cannot_be_loaded_is_named_with_its_remedy(entry: str, message: str):
    with pytest.raises(ConfigError) as caught:
        load_environment(entry)
    assert message in str(caught.value) and entry in str(caught.value)


def test_the_decorator_checks_at_once_and_keeps_the_function():
    @environment
    async def scored(task, client):
        return 1.0

    @environment(name="other")
    async def named(task, client):
        return 1.0

    assert (environment_name(scored), environment_name(named)) == ("scored", "other")
    with pytest.raises(ConfigError, match="cannot be run"):

        @environment
        def several(task, client):
            yield 1.0


RETURNING = """
from __future__ import annotations
from typing import Optional

async def a_float(task, client) -> float: return 1.0
def perhaps(task, client) -> float | None: return 1.0
async def optional(task, client) -> Optional[int]: return 1
class Called:
    async def __call__(self, task, client) -> float: return 1.0

async def unsaid(task, client): return 1.0
async def a_list(task, client) -> list[float]: return [1.0]
async def or_more(task, client) -> float | dict: return 1.0
async def unknown(task, client) -> Nowhere: return 1.0
"""
NUMBERS = ("a_float", "perhaps", "optional", "Called")
OTHERS = ("unsaid", "a_list", "or_more", "unknown")


@pytest.fixture
def returning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "returning.py").write_text(RETURNING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "returning", raising=False)


def program_scored_by(reward: str, name: str) -> AgentProgram:
    rewards = [{"entry": f"tests.environments.some_tools:{reward}"}]
    return AgentProgram(EnvironmentSection.model_validate({"entry": f"returning:{name}", "rewards": rewards}))


@pytest.mark.usefixtures("returning")
@pytest.mark.parametrize("name", NUMBERS)
def test_a_reward_that_asks_for_the_conversation_of_an_agent_that_returns_a_number_is_refused(name: str):
    found = program_scored_by("correct", name)
    with pytest.raises(ConfigError, match=f"asks for 'completion', and returning:{name} says that it returns a number"):
        found.check_columns([task()])


@pytest.mark.usefixtures("returning")
@pytest.mark.parametrize("name", OTHERS)
def test_an_agent_that_may_return_more_than_a_number_is_not(name: str):
    program_scored_by("correct", name).check_columns([task()])

"""Every block of docs/environments.md: the modules are imported, the configurations checked with them, and all of it used."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from midflight.config import load_config
from midflight.environments.agent_program import AgentProgram
from midflight.testing.virtual_time import run_virtual
from midflight.types import Task

from .talking import Gateway, Session, result, says

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
PYTHON = re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.DOTALL)
TOML = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, code in PYTHON:
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name, _ in PYTHON:
        sys.modules.pop(name, None)


def test_every_block_is_one_of_these() -> None:
    assert PAGE.count("```") == 2 * (len(PYTHON) + len(TOML)) and len(PYTHON) == 4 and len(TOML) == 5


@pytest.mark.parametrize("text", TOML)
def test_every_configuration_of_the_page_can_be_run(text: str, tmp_path: Path) -> None:
    path = tmp_path / "page.toml"
    path.write_text(text)
    config = load_config(path)
    found = AgentProgram(config.environment)
    found.check_columns([Task("1", "a", {"question": "?", "answer": "5", "secret": 4})])


def section(number: int) -> dict:
    return tomllib.loads(TOML[number])["environment"]


def test_the_rewards_of_the_page_score() -> None:
    one = run_virtual(
        lambda: result(Gateway([says("5")]), Task("1", "a", {"question": "?", "answer": "5"}), rewards=section(0)["rewards"][:2])
    )
    assert (one.reward, one.components) == (1.0 + 0.2 * 1.0, {"correct": 1.0, "polite/thanks": 0.0, "polite/short": 1.0})


def test_the_tools_of_the_page_answer() -> None:
    gateway = Gateway([says("", ("multiply", {"a": 2, "b": 3.5})), says("It is 7.0")])
    found = run_virtual(lambda: result(gateway, Task("1", "a", {"question": "?", "answer": "7"}), **section(1)))
    assert found.reward == 1.0
    assert [m["content"] for m in gateway.asked[1]["messages"][2:]] == ["7.0"]
    assert gateway.asked[0]["chat_template_kwargs"] == {"enable_thinking": False}


def test_the_game_of_the_page_is_played() -> None:
    import my_game  # type: ignore[import-not-found]

    gateway = Gateway([says("", ("guess", {"number": 3})), says("", ("guess", {"number": 4})), says("It is 4.")])
    found = run_virtual(lambda: result(gateway, Task("1", "a", {"question": "Guess.", "secret": "4"}), stateful=my_game.Guess))
    assert found.reward == pytest.approx(0.9) and found.components["environment/quick"] == pytest.approx(-0.1)


def test_the_agent_of_the_page_says_more_than_a_number_and_is_scored_by_a_function_too() -> None:
    from types import SimpleNamespace

    from midflight.environments.agent_program import ScoredAgents

    from .fakes import FakeClient, Rig

    config = AgentProgram(load_config(None, ["environment.entry=my_agent:ask"]).environment)
    rig = Rig(config.environment, client=FakeClient("olleh!"))
    agents = ScoredAgents(rig.agents(), AgentProgram(_section_of(4)).rewards)
    found = run_virtual(lambda: agents.run(Task("1", "a", {"question": "?", "answer": "olleh"}), SimpleNamespace(**vars(Session()))))
    assert found.reward == 1.0 + 1.0 + 0.5 * 0.0 and found.components == {"right": 1.0, "short": 1.0, "calm": 0.0}


def _section_of(number: int):
    path = Path("page.toml")
    path.write_text(TOML[number])
    return load_config(path).environment

"""Reward functions before a run starts, beside an environment of the user's, and for a whole group at once."""

from __future__ import annotations

import asyncio

import pytest
from tests.environments import some_tools

from midflight import Result
from midflight.config.agents import SandboxSection
from midflight.config.sections import EnvironmentSection
from midflight.environments.agent_program import AgentProgram, ScoredAgents
from midflight.environments.group import GroupRunner
from midflight.environments.result_checks import UnscoredRollout
from midflight.environments.reward_functions import Dialogue, Rewards
from midflight.errors import BadReward, ConfigError, EnvironmentFailed, SandboxUnavailable, TaskFieldMissing
from midflight.testing.virtual_time import run_virtual
from midflight.types import GroupKey, Task

from .fakes import FakeFates, Rig, task

MADE = "tests.environments.some_tools"


def program(**section) -> AgentProgram:
    return AgentProgram(EnvironmentSection.model_validate(section))


def rewards_of(*names: str, **options) -> Rewards:
    return Rewards(
        EnvironmentSection.model_validate({"rewards": [{"entry": f"{MADE}:{name}", **options} for name in names]}).rewards,
        SandboxSection(kind="trusted"),
    )


def line_of(name: str) -> str:
    return f"some_tools.py:{getattr(some_tools, name).__code__.co_firstlineno})"


def test_a_column_that_no_source_has_is_refused_with_file_line_function_and_remedy():
    found = program(rewards=[{"entry": f"{MADE}:wants_more"}])
    with pytest.raises(ConfigError) as raised:
        found.check_columns([Task("1", "a", {"question": "?", "dificulty": 3}), Task("1", "b", {"question": "?"})])
    said = str(raised.value)
    assert "wants_more (" in said and line_of("wants_more") in said and "'difficulty', which is a column of no source" in said
    assert "Did you mean 'dificulty'?" in said and "give it a default" in said
    found.check_columns([Task("1", "a", {"difficulty": 3}), Task("1", "b", {})])  # one source has it


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"tools": [f"{MADE}:untyped"]}, "has no type for 'a'; write it as `a: str`"),
        ({"tools": [f"{MADE}:odd_type"]}, "has a parameter whose type has no JSON schema"),
        ({"tools": [f"{MADE}:any_number"]}, "which a model cannot call by name"),
        ({"tools": [f"{MADE}:NOT_CALLABLE"]}, "which cannot be called"),
        ({"tools": [f"{MADE}:ad"]}, "Did you mean 'add'?"),
        ({"tools": [f"{MADE}:add", f"{MADE}:add"]}, "two tools called 'add'"),
        ({"tools": [f"{MADE}:Counter", f"{MADE}:Counter"]}, "two environments with state called Counter"),
        ({"tools": [f"{MADE}:NeedsAnArgument"]}, "cannot be made without arguments"),
        ({"rewards": [{"entry": f"{MADE}:NOT_CALLABLE"}]}, "which cannot be called; a reward is"),
        ({"rewards": [{"entry": f"{MADE}:corect"}]}, "Did you mean 'correct'?"),
        ({"rewards": [{"entry": f"{MADE}:correct", "options": {"strict": True}}]}, "has no 'strict' for its option"),
        ({"tools": [f"{MADE}:add"], "rewards": []}, "nothing scores the rollouts"),
    ],
)
def test_what_cannot_be_used_is_refused_before_a_run_starts(section, said):
    section.setdefault("rewards", [{"entry": f"{MADE}:correct"}])
    with pytest.raises(ConfigError) as raised:
        program(**section)
    assert said in str(raised.value)
    if "untyped" in str(section):
        assert line_of("untyped") in str(raised.value)


# --- Beside an environment of the user's ------------------------------------------------------------------------------


def scored(returned, *names: str):
    async def environment(task, client):
        return returned

    rig = Rig(environment)
    host = ScoredAgents(rig.agents(), rewards_of(*names))
    return run_virtual(lambda: host.run(task(), None))  # type: ignore[arg-type]


def test_reward_functions_get_the_environments_fields_and_its_own_number_is_a_component():
    said = Result(
        0.25, metrics={"letters": 2}, fields={"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "olleh"}]}
    )
    found = scored(said, "correct")
    assert isinstance(found, Result)
    assert (found.reward, found.components) == (1.25, {"environment": 0.25, "correct": 1.0})
    assert found.metrics["letters"] == 2 and "messages" in found.fields


def test_i10_an_environment_that_says_none_is_not_scored_by_functions():
    found = scored(None, "correct")
    assert isinstance(found, Result) and found.reward is None and not found.components


def test_i10_a_function_that_wants_the_conversation_of_an_environment_that_does_not_give_it_scores_nothing():
    with pytest.raises(TaskFieldMissing, match=r'asks for .completion.*let it return Result\(\.\.\., fields=\{"messages"'):
        scored(Result(1.0, fields={"log": "x"}), "correct")


# --- A whole group ----------------------------------------------------------------------------------------------------


class OfGroups:
    """An agent that says what is in line, after a time of its own; and scores groups."""

    def __init__(self, *said: str | Exception, functions: Rewards | None = None) -> None:
        self.said, self.group_results = list(said), 0
        self._rewards = functions or rewards_of("of_group")

    async def run(self, task, session):
        said = self.said.pop(0)
        await asyncio.sleep(len(self.said))
        if isinstance(said, Exception):
            raise said
        return UnscoredRollout(
            [{"role": "user", "content": "?"}, {"role": "assistant", "content": said}], 1, [], {}, {"letters": len(said)}, {"own": 0.125}
        )

    async def judge(self, task, attempts, *, name):
        from midflight.environments.built_in_loop import group_results

        self.group_results += 1
        return await group_results(self._rewards, task, attempts)

    def tool_seconds(self, session_id):
        return 0.0

    def excused(self, session_id):
        return 0.0


def run_group(agents: OfGroups, *, size: int, retries: int = 1):
    rig = Rig(lambda task, client: None)

    async def main():
        runner = rig.runner(agents=agents)
        groups = GroupRunner(rollouts=runner, slots=asyncio.Semaphore(99), fates=FakeFates(), group_size=size, retries=retries)
        return await groups.run(GroupKey(0, 0), task())

    some_tools.GROUPS.clear()
    return run_virtual(main)


def test_functions_of_trls_shape_are_called_once_for_a_group_when_all_of_it_has_ended():
    agents = OfGroups("olleh", "zzz", "a")
    found = run_group(agents, size=3)
    assert some_tools.GROUPS == [["olleh", "zzz", "a"]] and agents.group_results == 1
    assert [t.reward for t in found] == [1.125, 0.625, 0.125]  # right; the largest; neither; and what was known of each
    assert found[1].components == {"own": 0.125, "of_group": 0.5} and found[1].metrics == {"letters": 3.0}


def test_a_rollout_that_is_tried_again_is_waited_for():
    agents = OfGroups("olleh", EnvironmentFailed("no"), "zzz", "again")
    found = run_group(agents, size=3)
    assert [sorted(group) for group in some_tools.GROUPS] == [["again", "olleh", "zzz"]]
    assert all(t.reward is not None for t in found)


def test_a_group_goes_on_without_a_rollout_that_failed_for_good():
    found = run_group(OfGroups("olleh", EnvironmentFailed("no"), "zzz"), size=3, retries=0)
    assert len(some_tools.GROUPS[0]) == 2 and [t.reward is None for t in found] == [False, True, False]


def test_i10_a_function_that_returns_too_few_numbers_scores_none_of_the_group():
    found = run_group(OfGroups("olleh", "zzz", functions=rewards_of("too_few")), size=2, retries=0)
    assert [t.reward for t in found] == [None, None]
    assert "expected a list of 2 numbers, one for each of completions" in (found[0].error or "") and BadReward.__name__ in (
        found[0].error or ""
    )


def test_a_reward_function_that_asks_for_a_sandbox_gets_one_and_others_need_none() -> None:
    section = EnvironmentSection.model_validate({"rewards": [{"entry": f"{MADE}:passes"}], "sandbox": {"kind": "trusted"}})
    rewards = Rewards(section.rewards, section.sandbox)
    assert rewards.functions[0].columns == ("tests",)

    def scored(said: str) -> object:
        messages = [{"role": "user", "content": "2 * 4"}, {"role": "assistant", "content": said}]
        attempt = Dialogue(task(question="2 * 4", tests="assert found == 8"), messages, 1)
        return asyncio.run(rewards.score(attempt))

    assert scored("found = 2 * 4") == {"passes": 1.0}
    assert scored("found = 7") == {"passes": 0.0}


def test_a_sandbox_that_cannot_be_made_is_said_before_the_run_and_only_where_it_is_asked_for(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    section = EnvironmentSection.model_validate({"rewards": [{"entry": f"{MADE}:passes"}]})
    with pytest.raises(SandboxUnavailable, match="not installed"):
        Rewards(section.rewards, section.sandbox)
    Rewards(EnvironmentSection.model_validate({"rewards": [{"entry": f"{MADE}:correct"}]}).rewards, section.sandbox)

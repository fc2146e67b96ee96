"""The built-in loop: one turn, or turns while tools are called; what the tools' errors and deadlines become; how it is scored."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from tests.environments import some_tools

from midflight.environments import tools as tools_module
from midflight.errors import BadReward, EnvironmentFailed, TaskFieldMissing
from midflight.testing.virtual_time import run_virtual
from midflight.types import Result, Task
from midflight.wire.client import HttpAnswer

from .talking import Gateway, Session, loop_over, result, says

TOOLS = "tests.environments.some_tools"
TASK = Task("17", "spell", {"question": "What is 2 + 3?", "answer": "5"})


def run(gateway: Gateway, task: Task = TASK, **section):
    section.setdefault("rewards", [{"entry": f"{TOOLS}:correct"}])
    return run_virtual(lambda: result(gateway, task, **section))


def tools(*names: str) -> list[str]:
    return [f"{TOOLS}:{name}" for name in names]


def test_without_tools_the_prompt_is_asked_once_and_the_answer_scored():
    gateway = Gateway([says("5")])
    system = {"role": "system", "content": "Be short."}
    found = run(gateway, replace(TASK, data={**TASK.data, "messages": [system, *TASK.messages]}))
    assert (found.reward, found.components) == (1.0, {"correct": 1.0})
    (asked,) = gateway.asked
    assert asked == {
        "model": "policy",
        "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is 2 + 3?"}],
    }
    assert gateway.paths == ["/s/s.secret/v1/chat/completions"]


def test_it_goes_on_while_tools_are_called_and_every_call_is_answered_in_its_order():
    gateway = Gateway([says("", ("shout", {"text": "go"}), ("add", {"a": 2, "b": 3})), says("5")])
    found = run(gateway, tools=tools("add", "shout"))
    assert found.reward == 1.0
    first, second = gateway.asked
    assert [tool["function"]["name"] for tool in first["tools"]] == ["add", "shout"]
    prompt, call, *answers = second["messages"]
    assert prompt["role"] == "user" and [c["id"] for c in call["tool_calls"]] == ["c0", "c1"]
    assert answers == [
        {"role": "tool", "tool_call_id": "c0", "name": "shout", "content": "GO"},
        {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "5"},
    ]
    shown = {name: found.metrics[f"tools/{name}"] for name in ("calls", "failures", "add/calls", "shout/calls", "unknown", "exhausted")}
    assert shown == {"calls": 2.0, "failures": 0.0, "add/calls": 1.0, "shout/calls": 1.0, "unknown": 0.0, "exhausted": 0.0}


def test_schemas_come_from_signatures_and_docstrings_of_either_style():
    gateway = Gateway([says("5")])
    run(gateway, tools=tools("add", "shout"))
    add, shout = (tool["function"] for tool in gateway.asked[0]["tools"])
    assert add == {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "the first"},
                "b": {"type": "integer", "description": "the second,\nwhich may be left out"},
            },
            "required": ["a"],
            "additionalProperties": False,
        },
    }
    assert shout["description"] == "Says it loudly."
    assert shout["parameters"]["properties"] == {"text": {"type": "string", "description": "what to say"}}


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (("breaks", {"text": "x"}), "error: KeyError: 'x'"),
        (("waits_for_ever", {}), "error: waits_for_ever gave no answer within 3 s"),
        (("ad", {"a": 1}), "error: there is no tool 'ad'. Did you mean 'add'?"),
        (("add", {"a": "many"}), "error: add was called wrongly: a: Input should be a valid integer"),
        (("add", {"a": 1, "c": 2}), "error: add was called wrongly: c: Extra inputs are not permitted"),
        (("add", "{"), "error: the arguments of add are no JSON"),
        (("add", "[1]"), "error: the arguments of add are [1], expected an object"),
    ],
)
def test_what_goes_wrong_in_a_call_is_told_to_the_model_and_counted(call, answer):
    gateway = Gateway([says("", call), says("5")])
    found = run(gateway, tools=tools("add", "breaks", "waits_for_ever"), tool_seconds=3.0)
    assert gateway.asked[1]["messages"][-1]["content"].startswith(answer)
    assert found.metrics["tools/failures"] == 1.0 and found.metrics["tools/unknown"] == float(call[0] == "ad")


def test_the_time_in_tools_is_told_as_far_as_their_limits_go():
    """Two calls of a tool that takes 2 s, at once; then one that hangs, until its limit of 3 s."""
    gateway = Gateway([says("", ("shout", {"text": "a"}), ("shout", {"text": "b"})), says("", ("waits_for_ever", {})), says("5")])

    async def main():
        told = []
        options = {"tools": tools("shout", "waits_for_ever"), "rewards": [{"entry": f"{TOOLS}:correct"}], "tool_seconds": 3.0}
        async with loop_over(gateway, **options) as loop:
            loop.on_tools = lambda session_id, limit: told.append((session_id, limit, loop.tool_seconds("s")))
            await loop.run(TASK, Session())
            assert loop.tool_seconds("s") == 0.0
        return told

    begun = ("s", 0.0, 0.0), ("s", None, 0.0)  # servers of tools, of which there are none
    assert run_virtual(main) == [*begun, ("s", 6.0, 0.0), ("s", None, 2.0), ("s", 3.0, 2.0), ("s", None, 5.0)]


def test_i10_plain_tools_that_hang_are_counted_until_they_end_and_too_many_of_them_fail_rollouts(monkeypatch):
    monkeypatch.setattr(tools_module, "MAX_HUNG", 1)
    some_tools.HELD.clear()
    gateways = [Gateway([says("", ("hangs", {})), says("5")]) for _ in range(3)]
    asked = {"tools": tools("hangs"), "tool_seconds": 3.0}
    try:
        run(gateways[0], **asked)
        assert gateways[0].asked[1]["messages"][-1]["content"] == "error: hangs gave no answer within 3 s"
        with pytest.raises(EnvironmentFailed, match=r"1 calls of hangs .*some_tools.py:\d+. still run though their deadlines are over"):
            run(gateways[1], **asked)
    finally:
        some_tools.HELD.set()
    for thread in threading.enumerate():
        if thread.name == "agent":
            thread.join(5)
    run(gateways[2], **asked)
    assert gateways[2].asked[1]["messages"][-1]["content"] == "late"


def test_i10_a_tool_that_says_that_the_environment_failed_fails_the_rollout():
    with pytest.raises(EnvironmentFailed, match="the database is gone"):
        run(Gateway([says("", ("offline", {})), says("5")]), tools=tools("offline"))


def test_the_loop_ends_at_max_turns_and_says_so():
    gateway = Gateway([says("", ("add", {"a": 1}))])
    found = run(gateway, tools=tools("add"), max_turns=3)
    assert len(gateway.asked) == 3 and found.reward == 0.0
    assert (found.metrics["tools/exhausted"], found.metrics["tools/calls"]) == (1.0, 2.0)  # those of the last answer are not made


FULL = HttpAnswer(400, b'{"error": {"code": "context_length_exceeded", "message": "too long"}}')


def test_a_conversation_that_fills_the_context_is_scored_as_it_is():
    found = run(Gateway([says("5", ("add", {"a": 1})), FULL]), tools=tools("add"))
    assert found.reward == 1.0


@pytest.mark.parametrize("refused", [FULL, HttpAnswer(500, b"broken")])
def test_i10_a_first_request_that_is_refused_is_no_reward(refused):
    with pytest.raises(EnvironmentFailed, match=f"the gateway answered {refused.status}"):
        run(Gateway([refused]))


def test_a_busy_gateway_is_asked_again():
    assert run(Gateway([HttpAnswer(429, b""), HttpAnswer(503, b""), says("5")])).reward == 1.0


def test_a_full_gateway_is_asked_until_it_has_room_and_one_without_engines_three_times():
    assert run(Gateway([HttpAnswer(429, b"")] * 50 + [says("5")])).reward == 1.0
    with pytest.raises(EnvironmentFailed, match="the gateway answered 503"):
        run(Gateway([HttpAnswer(503, b"")] * 3))


# --- Environments with state ------------------------------------------------------------------------------------------


def test_a_class_with_reset_gives_tools_an_observation_and_a_reward():
    task = Task("1", "count", {"question": "Go.", "goal": 3})
    calls = says("", ("up", {"by": 1}), ("up", {"by": 2}))
    gateway = Gateway([calls, says("done")])
    found = run(gateway, task, stateful=some_tools.Counter, rewards=[])
    assert found.reward == 2.0 and found.components == {"environment/there": 1.0, "environment/said": 1.0}
    assert gateway.asked[0]["messages"] == [{"role": "user", "content": "Go. Count to 3."}]
    assert [tool["function"]["name"] for tool in gateway.asked[0]["tools"]] == ["up"]
    assert [message["content"] for message in gateway.asked[1]["messages"][2:]] == ["now 1", "now 3"]  # in their order, on one object


def test_every_rollout_has_an_object_of_its_own_also_where_tools_name_the_class():
    for _ in range(2):
        gateway = Gateway([says("", ("up", {"by": 3})), says("done")])
        assert run(gateway, Task("1", "count", {"question": "Go."}), tools=tools("Counter", "add"), rewards=[]).reward == 2.0


# --- Rewards ----------------------------------------------------------------------------------------------------------


def test_components_are_weighed_and_one_that_does_not_apply_is_left_out():
    rewards = [
        {"entry": f"{TOOLS}:correct", "weight": 2.0, "name": "right"},
        {"entry": f"{TOOLS}:tokens", "weight": 0.5, "options": {"weight": 3.0}},
        {"entry": f"{TOOLS}:silent"},
    ]
    found = run(Gateway([says("5")]), rewards=rewards)
    assert found.components == {"right": 1.0, "tokens/messages": 6.0}  # of two messages; source and silence do not apply
    assert found.reward == 2.0 * 1.0 + 0.5 * 6.0


def test_i10_a_rollout_that_no_function_applies_to_has_no_reward():
    assert run(Gateway([says("5")]), rewards=[{"entry": f"{TOOLS}:silent"}]).reward is None


def test_i10_a_reward_that_returns_text_names_task_file_line_function_and_remedy():
    with pytest.raises(BadReward) as raised:
        run(Gateway([says("5")]), rewards=[{"entry": f"{TOOLS}:text"}])
    said, line = str(raised.value), some_tools.text.__code__.co_firstlineno
    assert said.startswith("scoring task 17 of spell: what text (") and f"some_tools.py:{line}) returned was 'good'" in said
    assert "return a float, or None" in said


def test_i10_a_task_without_the_column_that_a_reward_needs_is_not_scored():
    with pytest.raises(TaskFieldMissing, match=r"wants_more .* needs the column 'difficulty', and the task has answer, question; add it"):
        run(Gateway([says("5")]), rewards=[{"entry": f"{TOOLS}:wants_more"}])


class Left:
    def reset(self) -> str:
        return " go left"

    def step_left(self) -> str:
        return "left"

    def reward(self) -> float:
        return 1.0


class Right:
    environment_name = "right"

    def reset(self) -> str:
        return " go right"

    def step_right(self) -> str:
        return "right"

    def reward(self) -> float:
        return 2.0


def test_of_several_environments_with_state_the_task_names_one_whose_tools_alone_are_shown() -> None:
    tools = [f"{__name__}:Left", f"{__name__}:Right"]

    async def main() -> tuple[Result, Gateway]:
        gateway = Gateway([says("", ("step_right", {})), says("done")])
        return await result(gateway, Task("1", "s", {"question": "?", "environment": "right"}), tools=tools), gateway

    found, gateway = run_virtual(main, seed=0)
    assert found.reward == 2.0 and gateway.asked[0]["messages"][-1]["content"] == "? go right"
    assert [tool["function"]["name"] for tool in gateway.asked[0]["tools"]] == ["step_right"]
    with pytest.raises(TaskFieldMissing, match=r"has 'up' in the column 'environment', which must name one of Left, right"):
        run_virtual(lambda: result(Gateway([says("x")]), Task("1", "s", {"question": "?", "environment": "up"}), tools=tools), seed=0)

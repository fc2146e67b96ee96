"""The calculator's job: its tool, its conversations, and a configuration that can be run from the folder of the checkout."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from midflight.config import load_config
from midflight.environments.agent_program import AgentProgram
from midflight.testing.virtual_time import run_virtual
from midflight.types import Task

from .talking import Gateway, result, says

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))


def test_the_job_calls_its_tool_and_scores_what_is_said_then() -> None:
    section = load_config(ROOT / "configs" / "calculator.toml").environment
    AgentProgram(section).check_columns([Task("1", "chain_sum", {"question": "12 - 30 =", "answer": "-18"})])
    gateway = Gateway([says("", ("calc", {"e": "12 - 30"})), says("-18")])
    options = {name: getattr(section, name) for name in ("tools", "rewards", "template_options", "max_turns")}
    found = run_virtual(lambda: result(gateway, Task("1", "chain_sum", {"question": "12 - 30 =", "answer": "-18"}), **options))
    assert gateway.asked[1]["messages"][-1]["content"] == "-18" and gateway.asked[0]["chat_template_kwargs"] == {"list_tools": False}
    assert (found.reward, found.components) == (1.0, {"right": 1.0})


def test_the_conversations_of_its_warm_start_show_the_call_that_answers(tmp_path: Path) -> None:
    from examples import calculator

    path = tmp_path / "calls.jsonl"
    subprocess.run([sys.executable, ROOT / "examples" / "calculator.py", path, "20"], check=True, timeout=60)
    lines = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
    assert [len(line) for line in lines] == [4, 6] * 10  # two numbers and three: one call for each sign
    for question, *calls, said in lines:
        answer = question["content"].removesuffix(" =")
        for call, found in zip(calls[::2], calls[1::2], strict=True):
            written = json.loads(call["tool_calls"][0]["function"]["arguments"])["e"]
            assert found["content"] == str(eval(written))
        assert said["content"] == found["content"] == str(eval(answer))
    assert calculator.calc("2 * -3") == "-6"
    for refused in ("2 ** 99", "1 + 2 + 3", "2"):
        with pytest.raises(ValueError, match="no single"):
            calculator.calc(refused)
    assert calculator.expression(random.Random(1), num_terms=3).count(" ") == 4


def test_a_pretrained_model_starts_from_conversations_that_the_example_writes_and_that_look_like_its_tasks(tmp_path: Path) -> None:
    written, config = tmp_path / "calls.jsonl", load_config(ROOT / "configs" / "pretrained-calculator.toml")
    asked = [
        sys.executable,
        ROOT / "examples" / "calculator.py",
        written,
        "32",
        "--terms",
        "3",
        "--digits",
        "3",
        "--system",
        config.environment.sources[0].system,
    ]
    subprocess.run(asked, check=True, timeout=60)
    assert config.warm_start.data is not None and (ROOT / config.warm_start.data).read_text() == written.read_text()
    messages = json.loads(written.read_text().splitlines()[0])["messages"]
    source = config.environment.sources[0]
    prompt = source.prompt.format(expression="964 + 494 - 876")
    assert messages[:2] == [{"role": "system", "content": source.system}, {"role": "user", "content": prompt}]

"""Agents that block, exit, raise and fail cost their own rollout and one worker at most. Real processes."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.observe.ops import asked, expressions, series_of

from .processes import CONFIG, Command, alive, children, steps
from .test_train import at_step, check_no_step_twice, check_store

ASKED = "c = {wait}client.chat.completions.create(model='policy', messages=[{{'role': 'user', 'content': 'a'}}])"
BEGIN = f"""
import openai, os, sys, threading, time
async def asked(client):
    {ASKED.format(wait="await ")}
    return sum(map(ord, c.choices[0].message.content))
"""
AGENTS = (
    BEGIN
    + f"""
class Odd(BaseException): pass

async def every_fault(task, client):
    assert "seen" not in task.data, "another rollout's task"
    task.data["seen"] = True
    n = await asked(client) % 12
    if n == 0: os._exit(3)
    if n == 1: raise Odd("odd")
    if n == 2: sys.exit(4)
    if n == 3: await client.close()
    if n == 4: time.sleep(3600)
    if n == 5: threading.Thread(target=time.sleep, args=(3600,)).start()
    if n == 6: print("x" * 100_000_000)
    if n == 7: openai.OpenAI(base_url=client.base_url, api_key=client.api_key).models.list()  # on the loop
    return float(n % 2)

async def blocks(task, client):
    open("blocked", "w").close()
    time.sleep(3600)

def plain(task, client):
    {ASKED.format(wait="")}
    assert "MIDFLIGHT_CONTROL_TOKEN" not in os.environ
    print("said by", task.id)
    return float(len(c.choices[0].message.content) % 2)

async def two_turns(task, client):
    return float((await asked(client) + await asked(client)) % 2)
"""
)


FEW = "environment.sources.0.heldout=4"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[type[Command]]:
    started: list[Command] = []
    (tmp_path / "small.toml").write_text(CONFIG)
    (tmp_path / "agents.py").write_text(AGENTS)

    def start(entry: str, *sets: str) -> Command:
        overrides = [x for one in (f"environment.entry=agents:{entry}", *sets) for x in ("--set", one)]
        started.append(Command("train", "small.toml", "--folder", "run", "--set", "run.steps=3", *overrides, folder=tmp_path))
        return started[-1]

    yield start  # type: ignore[misc]
    for command in started:
        command.end()


def test_i10_every_fault_of_an_agent_costs_its_rollout_and_the_run_goes_on(run, tmp_path: Path) -> None:
    command = run("every_fault", "environment.rollout_seconds=3", "run.steps=2", "rollout.max_staleness=1", FEW)
    assert command.wait(150) == 0, command.said
    assert len(steps(tmp_path / "run")) == 2
    assert "worker" in command.said and "is started again" in command.said
    assert "another rollout's task" not in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_health_answers_within_a_tenth_of_a_second_while_agents_block_and_a_stop_takes_five(run, tmp_path: Path) -> None:
    command = run("blocks")
    command.until((tmp_path / "blocked").exists, "a blocked agent")
    command.until((tmp_path / "run" / "endpoint.json").exists, "the address")
    url = json.loads((tmp_path / "run" / "endpoint.json").read_text())["url"]
    taken = []
    for _ in range(20):
        began = time.monotonic()
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/health") as answer:
            assert answer.status == 200
        taken.append(time.monotonic() - began)
        time.sleep(0.05)
    assert sorted(taken)[-2] < 0.1, taken
    parts = children(command.process.pid)
    command.process.send_signal(signal.SIGINT)
    assert command.wait(6) == 130
    assert not [pid for pid in parts if alive(pid)]


def test_a_plain_function_gets_a_plain_client_a_thread_and_a_log_with_its_workers_name(run, tmp_path: Path) -> None:
    command = run("plain", "environment.workers=1", "run.steps=1", FEW)
    assert command.wait() == 0, command.said
    assert "said by" in (tmp_path / "run" / "logs" / "worker0.log").read_text()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["failed_rollouts"] == 0
    options = ("--set", "environment.entry=agents:plain", "--set", "run.folder=other", "--set", "environment.workers=1", "--set", FEW)
    evaluated = Command("evaluate", "run/model", "--config", "small.toml", *options, folder=tmp_path)
    try:
        assert evaluated.wait() == 0, evaluated.said
        assert "spell_backward: " in evaluated.said and "(4 tasks)" in evaluated.said
        assert "is started again" not in evaluated.said and "step 0/" not in evaluated.said, "it ended in order"
        assert not (tmp_path / "other" / "endpoint.json").exists()
    finally:
        evaluated.end()


def test_i8_workers_that_are_killed_again_and_again_lose_no_rollout(run, tmp_path: Path) -> None:
    """The rollouts begin again with their turns, and no retry is used up: the sums come out as if nothing had been."""
    command = run("two_turns", "run.steps=80", "rollout.retries=0", FEW)
    chosen = random.Random(3)
    for number in range(4):
        at_step(command, tmp_path / "run", 1 + 5 * number)
        found = command.until(lambda: command.parts().get("worker"), "worker")
        os.kill(chosen.choice(found), signal.SIGKILL)
    check_metrics(json.loads((tmp_path / "run" / "endpoint.json").read_text())["url"])
    assert command.wait() == 0, command.said
    assert len(steps(tmp_path / "run")) == 80


def check_metrics(url: str) -> None:
    """Of a run that trains: all that the board and the alerts in `ops` ask for, and memory."""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/metrics") as answer:
        text = answer.read().decode()
    assert asked(expressions()) - series_of(text) == set()
    assert re.search(r'^midflight_process_bytes\{.*process="launcher"\} [1-9]', text, re.MULTILINE)


@pytest.mark.timeout(900)
def test_i8_random_kills_of_any_part_lose_nothing(run, tmp_path: Path) -> None:
    """Fifty of them in the nightly run."""
    kills = 50 if os.environ.get("HYPOTHESIS_PROFILE") == "explore" else 6
    last, folder = 8 * (kills + 1), tmp_path / "run"
    command = run("two_turns", f"run.steps={last}", "run.restarts=100", "trainer.checkpoint_every=2", FEW)
    chosen = random.Random(7)
    for number in range(kills):
        at_step(command, folder, 8 * number + chosen.randint(1, 8))
        part = chosen.choice(("worker", "worker", "engine", "trainer", "rollout"))
        os.kill(chosen.choice(command.until(lambda part=part: command.parts().get(part), part)), signal.SIGKILL)
    assert command.wait(120) == 0, command.said
    check_no_step_twice(folder, num_steps=last)
    check_store(folder)


def test_an_outage_of_the_only_engine_longer_than_the_agents_own_seconds_loses_no_rollout(run, tmp_path: Path) -> None:
    """The engine is stopped for three times `rollout_seconds`, then killed, and starts again, all while rollouts ask it."""
    command = run("two_turns", "environment.rollout_seconds=5", "run.steps=6", "rollout.retries=0", "environment.workers=1", FEW)
    command.until(lambda: len(steps(tmp_path / "run")) >= 1, "a step")
    (engine,) = command.parts()["engine"]
    os.kill(engine, signal.SIGSTOP)
    time.sleep(15)
    assert command.process.poll() is None, command.said
    os.kill(engine, signal.SIGKILL)
    assert command.wait(150) == 0, command.said
    assert len(steps(tmp_path / "run")) == 6 and "engine0 is started again" in command.said
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["failed_rollouts"] == 0

"""`midflight join` in processes of its own: an engine that comes in mid-run, takes load, and leaves when its machine is taken away."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .processes import CONFIG, Command, free_port, journal, steps

TOKEN = "the-control-token-of-this-test"


@pytest.fixture
def command() -> Iterator[Callable[..., Command]]:
    """Starts `midflight ...`; whatever is left of it is killed after the test."""
    started: list[Command] = []

    def start(*arguments: object, folder: Path) -> Command:
        started.append(Command(*arguments, folder=folder))
        return started[-1]

    yield start
    for one in started:
        one.end()


def asked(url: str, path: str, token: str) -> str:
    try:
        request = urllib.request.Request(url + path, headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


def members(url: str, token: str) -> dict[str, dict[str, Any]]:
    """By name; none where nobody answers."""
    said = asked(url, "/midflight/v1/engines", token)
    return {member["name"]: member for member in json.loads(said)["engines"]} if said else {}


def test_i3_i5_an_engine_joins_in_mid_run_serves_the_current_version_and_leaves_with_nothing_lost(
    command: Callable[..., Command], tmp_path: Path
) -> None:
    run, config = tmp_path / "run", tmp_path / "small.toml"
    config.write_text(CONFIG)
    slow = ("--set", "engine.max_running=1")  # of 16 requests, so that some wait in both engines at every moment
    settings = (
        "run.steps=5000",
        "rollout.max_in_flight=16",
        "environment.max_tokens=40",
        "environment.sources.0.heldout=0",
        "gateway.drain_seconds=0",
    )
    sets = [word for setting in settings for word in ("--set", setting)]
    training = command("train", config, "--folder", run, *slow, *sets, folder=tmp_path)
    training.until(lambda: len(steps(run)) >= 2, "two steps", 120)
    endpoint = json.loads((run / "endpoint.json").read_text())
    url, token = endpoint["url"], endpoint["control_token"]
    joining = command("join", "--url", url, "--token", token, "--name", "second", *slow, folder=tmp_path / "second")
    joining.until(lambda: "and serves version" in joining.said, "the engine to serve", 120)
    serves = int(re.findall(r"and serves version (\d+)", joining.said)[0])
    assert serves >= 1, "what it had joined with was version 0"

    def is_busy() -> bool:
        found = members(url, token).get("second")
        return found is not None and found["version"] > serves and found["requests"] > 0

    joining.until(is_busy, "requests and a newer version on it")
    assert 'midflight_engines{state="serving"} 2.0' in asked(url, "/metrics", token)
    joining.process.send_signal(signal.SIGTERM)
    assert joining.wait() == 128 + signal.SIGTERM, joining.said
    assert "second has left" in joining.said and list(members(url, token)) == ["engine0"]
    resumed = re.search(r"engine second left; (\d+) of its requests go on elsewhere", training.said)
    assert resumed is not None and int(resumed[1]) > 0, training.said
    last = len(steps(run))
    training.until(lambda: len(steps(run)) >= last + 10, "ten more steps")
    training.process.send_signal(signal.SIGINT)
    assert training.wait() == 130
    lines = journal(run)
    assert [(line["engine"], line["event"]) for line in lines if line["kind"] == "engine"] == [("second", "joined"), ("second", "left")]
    totals = steps(run)[-1]["totals"]
    assert totals["failed_requests"] == 0 and totals["failed_rollouts"] == 0 and totals["max_token_staleness"] <= 4
    ledger = command("ledger", run, folder=tmp_path / "ledger")
    assert ledger.wait() == 0, ledger.said


def test_an_engine_joins_again_when_the_gateway_was_started_anew_and_goes_when_it_is_sent_away(
    command: Callable[..., Command], tmp_path: Path
) -> None:
    sizes = ("hidden_size=32", "intermediate_size=64", "num_layers=1", "num_heads=2", "num_kv_heads=1", "max_context=64")
    made = command("new-model", tmp_path / "model", *(x for size in sizes for x in ("--set", f"model.{size}")), folder=tmp_path)
    assert made.wait() == 0, made.said
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    serving = ("serve", "--model", tmp_path / "model", "--port", port, "--control-token", TOKEN)
    first = command(*serving, folder=tmp_path / "a")
    first.until(lambda: "ready: " in first.said, "the address")
    joining = command("join", "--url", url, "--token", TOKEN, "--name", "b", folder=tmp_path / "b")
    joining.until(lambda: members(url, TOKEN).get("b", {}).get("state") == "serving", "the engine to serve")
    twice = command("join", "--url", url, "--token", TOKEN, "--name", "b", folder=tmp_path / "c")
    assert twice.wait() == 2 and "choose another --name" in twice.said
    os.kill(first.process.pid, signal.SIGINT)
    assert first.wait() == 130
    second = command(*serving, folder=tmp_path / "d")
    joining.until(lambda: members(url, TOKEN).get("b", {}).get("state") == "serving", "it to join the second")
    assert joining.process.poll() is None
    request = urllib.request.Request(url + "/midflight/v1/engines/b", method="DELETE", headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.loads(answer.read()) == {"name": "b", "resumed": 0}
    assert joining.wait() == 0, joining.said
    assert "was told to leave this run" in joining.said
    assert second.process.poll() is None and list(members(url, TOKEN)) == ["engine0"]

"""A server of OpenEnv in a process of its own is played and trained. In OpenEnv's interpreter."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pytest
from tests.real.adapted import adapted
from tests.real.processes import steps

from midflight.adapters import openenv
from midflight.errors import ConfigError, EnvironmentFailed
from midflight.types import Task

pytestmark = pytest.mark.timeout(600)

COUNTING = """
entry = "midflight.adapters.openenv:play"
max_tokens = 6
[[environment.sources]]
entry = "midflight.adapters.openenv:tasks"
content = "seed"
heldout = 4
options = { url = "URL", size = 60, action = "said", observation = "shown", max_turns = 10 }
"""


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """Of an environment that asks twice, and gives a point for each answer of an even sum of letters."""
    output = tmp_path / "server.txt"
    with output.open("wb") as said:
        server = subprocess.Popen([sys.executable, str(Path(__file__).with_name("counting_server.py"))], stdout=said, stderr=said)
    try:
        deadline = time.monotonic() + 240
        while not (found := [line for line in output.read_text().splitlines() if line.startswith("port ")]):
            assert server.poll() is None and time.monotonic() < deadline, output.read_text()
            time.sleep(0.05)
        address = f"http://127.0.0.1:{found[0].removeprefix('port ')}"
        while True:
            try:
                urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{address}/health", timeout=5).close()
                break
            except urllib.error.URLError:
                assert server.poll() is None and time.monotonic() < deadline, output.read_text()
                time.sleep(0.05)
        yield address
    finally:
        server.kill()
        server.wait()


def test_an_environment_of_a_server_is_trained_with_a_reward_for_each_answer(url: str, tmp_path: Path) -> None:
    adapted(tmp_path, COUNTING.replace("URL", url), forked=False, seconds=250)
    measured = [step for step in steps(tmp_path / "run") if step["rollouts"]]
    assert measured and all(step["turns_mean"] == 2.0 and step["components"]["game"] == pytest.approx(step["reward"]) for step in measured)


class SlowServer(ThreadingHTTPServer):
    """Answers everything after so many seconds, as one that many ask."""

    def __init__(self, seconds: float) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                time.sleep(seconds)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"


@contextmanager
def slow_server(seconds: float) -> Generator[str]:
    with SlowServer(seconds) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            thread.join()


def test_a_server_that_is_slow_to_answer_is_waited_for() -> None:
    with slow_server(11) as url:
        assert len(openenv.tasks(url, size=2, action="said")) == 2


def test_a_server_that_does_not_answer_in_time_is_refused_with_the_option_before_a_run_and_in_a_rollout() -> None:
    with slow_server(3) as url:
        with pytest.raises(ConfigError, match=r"did not say within options\.connect_seconds = 0\.2"):
            openenv.tasks(url, action="said", connect_seconds=0.2)
        (task,) = openenv.tasks(url, size=1, action="said")
        told = {**cast(dict[str, Any], task["openenv"]), "connect_seconds": 0.2}
        with pytest.raises(EnvironmentFailed, match=r"opened no session .*options\.connect_seconds = 0\.2"):
            asyncio.run(openenv.play(Task("1", "letters", {**task, "openenv": told}), None))


def test_a_server_that_is_not_there_is_named_before_a_run() -> None:
    with pytest.raises(ConfigError, match=r"no environment of OpenEnv answers at http://127\.0\.0\.1:9: .*start its server"):
        openenv.tasks("http://127.0.0.1:9", action="said")
    with pytest.raises(ConfigError, match="one of action and read says what becomes of an answer"):
        openenv.tasks("http://127.0.0.1:9")

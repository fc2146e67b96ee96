"""Unmodified clients of other people against servers in processes of their own.

These tests run in virtual environments that hold the clients and not Midflight (`make test-clients`). Two servers are started
with the interpreter named by `MIDFLIGHT_PYTHON`: `midflight serve` with a made model, whose weights are random, and the same
gateway over the scripted engine, whose model answers by rule (see scripted_server.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.shares import check_trained_share

HERE = Path(__file__).parent
PYTHON = os.environ.get("MIDFLIGHT_PYTHON", str(HERE.parents[1] / ".venv" / "bin" / "python"))
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
SIZES = ("hidden_size=32", "intermediate_size=64", "num_layers=1", "num_heads=2", "num_kv_heads=1", "max_context=4096")


@contextmanager
def process(folder: Path, *command: object, says: str) -> Iterator[str]:
    """A server; gives the rest of the line of its output that begins with `says`."""
    output = folder / "output.txt"
    with output.open("wb") as file:
        running = subprocess.Popen([PYTHON, *map(str, command)], cwd=folder, env=ENVIRON, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield _said(running, output, says)
    finally:
        running.send_signal(signal.SIGINT)
        try:
            running.wait(20)
        except subprocess.TimeoutExpired:
            running.kill()


def _said(running: subprocess.Popen[bytes], output: Path, says: str) -> str:
    until = time.monotonic() + 60
    while time.monotonic() < until and running.poll() is None:
        for line in output.read_text().splitlines():
            if line.startswith(says):
                return line.removeprefix(says).strip()
        time.sleep(0.1)
    raise AssertionError(f"the server did not say {says!r}: {output.read_text()[-3000:]}")


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base URL of `midflight serve` with random weights: what it says is noise, what grammars force upon it is not."""
    folder = tmp_path_factory.mktemp("serve")
    sizes = [part for size in SIZES for part in ("--set", f"model.{size}")]
    subprocess.run([PYTHON, "-m", "midflight", "new-model", folder / "model", *sizes], check=True, env=ENVIRON, capture_output=True)
    command = ("-m", "midflight", "serve", "--model", folder / "model", "--port", 0, "--max-context", 4096)
    with process(folder, *command, says="ready: ") as url:
        yield url.removesuffix("/v1")


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base URL of the gateway over an engine that answers by rule."""
    with process(tmp_path_factory.mktemp("scripted"), HERE / "scripted_server.py", "request", says="ready: ") as url:
        yield url


@pytest.fixture(scope="session")
def scripted_by_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The same with `gateway.sampling = "run"`."""
    with process(tmp_path_factory.mktemp("by-run"), HERE / "scripted_server.py", "run", says="ready: ") as url:
        yield url


END = 256
"""The token that ends each answer; the others of the scripted model are bytes."""


@dataclass(frozen=True)
class OneSession:
    """A session of the scripted server, as that of a rollout in training: what an agent is given, and what becomes of its turns."""

    url: str
    base_url: str
    session_id: str

    @property
    def root(self) -> str:
        """The base URL for SDKs that add the `/v1`."""
        return self.base_url.removesuffix("/v1")

    def check_turns(self, *said: str, forced: Sequence[str] = (), by: Sequence[str] = (), replaced: Mapping[str, int] = {}) -> None:
        """Ends the session. Each answer stands in exactly one trainable place, in whatever row, and nothing else does. Those that had to
        match a form are samples of another distribution: they are counted, and not trained, and the heads of their answers name the form, or the fields `by`. `replaced` fields are counted, by requests."""
        record = posted(f"{self.url}/rollouts/{self.session_id}/end")
        masked = {"not_policy_sampled": sum(len(text) + 1 for text in forced)} if forced else {}
        received = sum(len(text) + 1 for text in (*said, *forced))
        check_trained_share(received, record["masked"], named=record["masked_by"])
        assert set(record["masked_by"]) == set(record["heads"]) and bool(forced) == bool(record["heads"])
        assert (not by or set(by) == set(record["heads"])) and record["replaced"] == dict(replaced)
        assert (record["failed_requests"], record["masked"], record["dropped"]) == (0, masked, {})
        rows = [zip(row["token_ids"], row["loss_mask"], strict=True) for row in record["rows"]]
        trained = [token for row in rows for token, counts in row if counts]
        texts = "".join("\0" if token == END else chr(token) for token in trained).split("\0")
        assert texts.pop() == "", "the last answer has no end"
        assert len(texts) + len(forced) == record["num_turns"]
        assert sorted(texts) == sorted(said)


def posted(url: str) -> Any:
    with urllib.request.urlopen(url, b"", timeout=60) as answer:
        return json.load(answer)


@pytest.fixture
def session(scripted: str) -> OneSession:
    """One of its own for a test."""
    return opened(scripted)


@pytest.fixture
def session_by_run(scripted_by_run: str) -> OneSession:
    """One in which the run's own sampling counts."""
    return opened(scripted_by_run)


def opened(url: str) -> OneSession:
    told = posted(f"{url}/rollouts")
    return OneSession(url, told["base_url"], told["session_id"])

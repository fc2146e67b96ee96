"""A Ray of one node: a whole ring on its seats, what dies there, and what is said of a cluster that is none."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.real.processes import CONFIG, Command, alive, arguments_of, children, gone, journal, pids

from .rays import CHECK, member

ROOT = Path(__file__).parents[2]
START_SECONDS, STARTS = 120.0, 4
"""10 s where nothing else runs."""
FIRST = ["nice", "-n", "-10"] if os.geteuid() == 0 else []
"""Daemons that wait for a busy machine give up."""


@dataclass(frozen=True)
class Node:
    address: str
    token: Path

    @property
    def options(self) -> list[str]:
        return ["cluster.kind=ray", f"cluster.address={self.address}", f"cluster.token_file={self.token}"]


@pytest.fixture(scope="module")
def node() -> Generator[Node]:
    """Started as `ray start` does; minimal Ray, without a dashboard. Its folder is short, because the names of its sockets are limited."""
    with tempfile.TemporaryDirectory(prefix="mf", dir="/tmp") as folder, socket.create_server(("127.0.0.1", 0)) as found:
        port, token = found.getsockname()[1], Path(folder) / "token"
        found.close()
        token.write_text("a-token-of-these-tests-0123456789abcdef")
        given = ["--head", "--block", f"--port={port}", "--node-ip-address=127.0.0.1", "--include-dashboard=false", "--num-cpus=8"]
        given += ["--object-store-memory=80000000", "--disable-usage-stats", f"--temp-dir={folder}/ray"]
        environ = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_memory_monitor_refresh_ms": "0"}
        environ |= {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        ray = started([*FIRST, str(Path(sys.executable).parent / "ray"), "start", *given], environ, log=Path(folder) / "log")
        try:
            yield Node(f"127.0.0.1:{port}", token)
        finally:
            daemons = below(ray.pid)
            ray.terminate()
            with suppress(subprocess.TimeoutExpired):
                ray.wait(20)
            for pid in [*daemons, ray.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            ray.wait(10)


def started(command: list[str], environ: dict[str, str], *, log: Path) -> subprocess.Popen[bytes]:
    """On a busy machine Ray gives up what is slow to start: it is tried again."""
    for _ in range(STARTS):
        with log.open("wb") as out:
            ray = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **environ})
        deadline = time.monotonic() + START_SECONDS
        while ray.poll() is None and time.monotonic() < deadline:
            if "Ray runtime started" in log.read_text():
                return ray
            time.sleep(0.2)
        ray.kill()
    raise AssertionError(log.read_text())


def below(pid: int) -> list[int]:
    found = [pid]
    for one in found:  # grows while it is walked
        found += children(one)
    return found[1:]


def small(folder: Path, node: Node, *, steps: int) -> Path:
    path = folder / "run.toml"
    path.write_text(
        f"""{CONFIG}
[engine]
count = 2
[trainer]
checkpoint_every = 2
[cluster]
kind = "ray"
address = "{node.address}"
token_file = "{node.token}"
engine = {{ CPU = 1 }}
trainer = {{ CPU = 1 }}
rollout = {{ CPU = 1 }}
"""
    )
    path.write_text(path.read_text().replace('name = "small"', f'name = "small"\nsteps = {steps}'))
    return path


def parts(folder: Path) -> dict[str, int]:
    """Process ids of the run's parts, wherever they are on this machine, by the name of their log."""
    found: dict[str, int] = {}
    for pid in pids():
        if "midflight.run.launcher.child" in arguments_of(pid):
            with suppress(OSError):
                log = Path(f"/proc/{pid}/fd/2").readlink()
                if log.is_relative_to(folder):
                    found[log.stem] = pid
    return found


def check(*options: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", CHECK, *options], capture_output=True, text=True, timeout=800, check=False)
    return done.returncode, done.stdout.strip() or done.stderr


def test_a_whole_ring_runs_on_a_cluster_that_it_starts_itself(node: Node, tmp_path: Path) -> None:
    """With fewer engines at first than it wants: the other joins."""
    config = small(tmp_path, Node("start", node.token), steps=6)
    options = [word for option in ("cluster.engines_min=1", "engine.count=2", "trainer.ranks=2") for word in ("--set", option)]
    run = Command("train", config, "--folder", tmp_path / "run", *options, folder=tmp_path, forked=False)
    try:
        assert run.wait(600) == 0, run.said
        steps = [line for line in journal(tmp_path / "run") if line["kind"] == "step"]
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert len(steps) == 6 and summary["failed_requests"] == 0 and summary["peak_memory_mb"] > 500
        assert {log.stem for log in (tmp_path / "run" / "logs").iterdir()} >= {"trainer", "trainer1", "rollout", "engine0", "engine1"}
        assert not parts(tmp_path / "run")
    finally:
        run.end()


def test_an_engine_whose_seat_is_lost_or_told_to_end_comes_back_on_another_and_serves(node: Node, tmp_path: Path) -> None:
    """It is lost by SIGKILL; on SIGTERM its engine leaves the run before it ends."""
    run = Command("train", small(tmp_path, node, steps=100_000), "--folder", tmp_path / "run", folder=tmp_path, forked=False)
    try:
        run.until(lambda: len([line for line in journal(tmp_path / "run") if line["kind"] == "step"]) >= 3, "three steps", 600)
        there = parts(tmp_path / "run")
        assert set(there) == {"trainer", "rollout", "engine0", "engine1"}
        seats = {name: parent_of(pid) for name, pid in there.items()}
        assert len(set(seats.values())) == 4 and run.process.pid not in seats.values()
        os.kill(seats["engine0"], signal.SIGKILL)
        assert gone([there["engine0"]], seconds=20), "it ends with its seat"
        run.until(lambda: parts(tmp_path / "run").get("engine0"), "engine0 on another seat", 300)
        run.until(lambda: member(tmp_path / "run", "engine0").get("state") == "serving", "the current weights in it", 300)
        os.kill(seats["engine1"], signal.SIGTERM)
        run.until(lambda: left(tmp_path / "run", "engine1"), "engine1 out of the run", 300)
        run.until(lambda: parts(tmp_path / "run").get("engine1", there["engine1"]) != there["engine1"], "engine1 on another seat", 300)
        run.until(lambda: member(tmp_path / "run", "engine1").get("state") == "serving", "the current weights in it", 300)
        run.process.send_signal(signal.SIGINT)
        assert run.wait(120) == 130, run.said
        assert "engine0 has lost its seat on " in run.said and "ActorDiedError" in run.said
        assert re.search(r"engine1 leaves its place at \S+, which is about to be taken away: \d+ requests go on elsewhere", run.said)
        assert "engine1 has lost its seat on " not in run.said
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["failed_requests"] == 0
        assert not parts(tmp_path / "run")
    finally:
        run.end()


def left(folder: Path, engine: str) -> bool:
    """In order, and not because it was out of reach."""
    return any([line.get(key) for key in ("engine", "event", "detail")] == [engine, "left", "left"] for line in journal(folder))


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_launcher_that_dies_takes_all_its_parts_along(node: Node, tmp_path: Path) -> None:
    run = Command("train", small(tmp_path, node, steps=1000), "--folder", tmp_path / "run", folder=tmp_path, forked=False)
    try:
        run.until(lambda: any(line["kind"] == "step" for line in journal(tmp_path / "run")), "a step", 600)
        there = [*parts(tmp_path / "run").values()]
        os.kill(run.process.pid, signal.SIGKILL)
        assert len(there) == 4 and gone(there, seconds=30)
        assert not any(alive(pid) for pid in there)
    finally:
        run.end()


def test_what_is_no_cluster_for_the_run_is_said_before_anything_is_started(node: Node, tmp_path: Path) -> None:
    status, said = check(*node.options, f"run.folder={tmp_path / 'run'}", "cluster.engine={ GPU = 8 }")
    assert (status, said) == (2, "cluster.engine: no machine has GPU: 8; none has any. Lower it, or add a machine.")
    assert check(*node.options, f"run.folder={tmp_path / 'run'}") == (0, "")
    other = tmp_path / "token"
    other.write_text("another-token-0123456789abcdef0123456789")
    status, said = check(*node.options[:2], f"cluster.token_file={other}")
    assert (
        status == 2
        and said.startswith(f"cluster.address is '{node.address}', and the token in {other} is not its own")
        and "\n" not in said
    )
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    status, said = check("cluster.kind=ray", f"cluster.address=127.0.0.1:{port}")
    assert status == 2 and said.startswith(f"cluster.address is '127.0.0.1:{port}', and no cluster was reached there") and "\n" not in said
    assert not (tmp_path / "run").exists()

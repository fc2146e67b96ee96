"""The command line in processes of its own: started, watched, killed. Every helper has a deadline, and nothing outlives a test."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .template import template

SHARED = Path("/dev/shm")
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}

CONFIG = """
[run]
name = "small"
[model]
hidden_size = 32
intermediate_size = 64
num_layers = 1
num_heads = 2
num_kv_heads = 1
max_context = 64
[environment]
max_tokens = 6
[[environment.sources]]
dataset = "spell_backward"
size = 200
heldout = 16
prompt = "reverse {word}"
content = "word"
only = "[a-z]+"
options = { min_word_len = 3, max_word_len = 5 }
[rollout]
groups_per_step = 2
group_size = 4
"""


_WAITING = re.compile(r"midflight: .*, for \d+ s, .*\n")
"""What a start says of work that takes long."""


def without_waiting(said: str) -> str:
    """What a command said, but for what it says on a busy machine of work that takes long."""
    return _WAITING.sub("", said)


class Command:
    """`midflight ...` as a user starts it."""

    def __init__(
        self, *arguments: object, folder: Path, largest_file: int | None = None, forked: bool = True, module: str = "midflight"
    ) -> None:
        """`module`: another program, in `folder`. `largest_file`: bytes beyond which a write fails, as on a full disk. `forked`: without the cost of imports."""
        folder.mkdir(parents=True, exist_ok=True)
        self.output, self.errors = folder / "stdout.txt", folder / "stderr.txt"
        command = [sys.executable, "-m", module, *map(str, arguments)]
        if forked and largest_file is None:
            for file in (self.output, self.errors):
                file.write_bytes(b"")  # there, and without words of an earlier life, before the process opens them
            output, errors = str(self.output), str(self.errors)
            self.process = template().start(command, cwd=str(folder), environ=ENVIRON, output=output, errors=errors)
        else:
            limits = () if largest_file is None else ("prlimit", f"--fsize={largest_file}")
            with self.output.open("wb") as out, self.errors.open("wb") as err:
                self.process = subprocess.Popen([*limits, *command], cwd=folder, env=ENVIRON, stdout=out, stderr=err)
        self.began = time.monotonic()

    @property
    def said(self) -> str:
        return self.output.read_text() + self.errors.read_text()

    def parts(self) -> dict[str, list[int]]:
        """Process ids of the children by part."""
        found: dict[str, list[int]] = {}
        for pid in children(self.process.pid):
            arguments = arguments_of(pid)
            if "midflight.run.launcher.child" in arguments:
                found.setdefault(arguments[arguments.index("midflight.run.launcher.child") + 1], []).append(pid)
        return found

    def kill(self, part: str, index: int = 0) -> int:
        pid = sorted(self.parts()[part])[index]
        os.kill(pid, signal.SIGKILL)
        return pid

    def wait(self, seconds: float = 300) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds:g} s:\n{self.said}") from None

    def until(self, condition: Callable[[], Any], what: str, seconds: float = 300) -> Any:
        """Waits for the condition; a process that ends before, or a deadline, fails the test with what was said."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := condition():
                return found
            assert self.process.poll() is None, f"ended before {what}:\n{self.said}"
            time.sleep(0.02)
        raise AssertionError(f"no {what} after {seconds:g} s:\n{self.said}")

    def end(self) -> None:
        """Kills whatever of it is left."""
        for pid in [*children(self.process.pid), self.process.pid]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)


def children(parent: int) -> list[int]:
    return [pid for pid in pids() if status_of(pid).get("PPid") == str(parent)]


def pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def status_of(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def arguments_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").split()
    except OSError:
        return []


def alive(pid: int) -> bool:
    return status_of(pid).get("State", "Z")[0] not in "ZX"


def gone(found: list[int], *, seconds: float) -> bool:
    """Whether all have ended within the time."""
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in found):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def segments(folder: Path) -> list[Path]:
    """What a run has in shared memory."""
    from midflight.run.scratch import segment_name

    return list(SHARED.glob(f"{segment_name(folder)}*"))


_ports = itertools.count(20_000 + 1_000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) + os.getpid() % 500)


def free_port() -> int:
    """One that nothing takes before it is used: below those that the system gives out, and in a range of this worker's own."""
    while True:
        with socket.socket() as made, contextlib.suppress(OSError):
            made.bind(("127.0.0.1", port := next(_ports)))
            return port


def journal(folder: Path) -> list[dict[str, Any]]:
    """Whole lines only: the file may be written at this moment."""
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def steps(folder: Path) -> list[dict[str, Any]]:
    return [line for line in journal(folder) if line["kind"] == "step"]

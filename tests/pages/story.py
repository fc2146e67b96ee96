"""A page, done from its first block to its last, in a folder that is laid out like a checkout.

Commands are run as they are written, with three exceptions. Runs are made small (`small`), except for a stopwatch. `MODEL_DIR` is the folder of a small model, and
ports 8000 and 8001 are free ones. And what runs until it is ended (`serve`, `rollouts`, `engine`, a block `beside`) runs beside what
follows.

Variables that a page leaves to its reader are there: `MIDFLIGHT_CONTROL_TOKEN`; `URL` and `TOKEN` of the server that was started last; and
the fields of the last answer that was a JSON object, in capitals.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from tests.agents import AGENTS
from tests.real.processes import ENVIRON, Command
from tests.real.template import template

from .blocks import PAGES, ROOT, SERVERS, Block, blocks_of, lacks

COPIED, PACKED_RUNS = ("configs", "docs", "examples"), ("benchmarks", "src", "tests", "tools")
SIZES = ("hidden_size=32", "intermediate_size=64", "num_layers=1", "num_heads=2", "num_kv_heads=1")
SECONDS = 280.0
"""For one command of a small run."""
WHOLE_SECONDS = 3600.0
"""For one command of a run that is made as the page says."""
TOKEN = "a-token-of-the-pages"
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
TOLD = [page for page in PAGES if page.stem not in AGENTS and not lacks(page) and any(block.tried == "run" for block in blocks_of(page))]
"""The pages that have something to run, and whose packages are here."""


def free_ports() -> list[int]:
    """Two that are free now."""
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        return [one.getsockname()[1], other.getsockname()[1]]


class Story:
    def __init__(self, folder: Path, ports: Sequence[int], *, is_small: bool = True) -> None:
        self._is_small = is_small
        self._seconds = SECONDS if is_small else WHOLE_SECONDS
        self.folder = self.where = folder
        self._ports = dict(zip(("8000", "8001"), map(str, ports), strict=True))
        self._beside: list[Command | subprocess.Popen[bytes]] = []
        self._environ = ENVIRON | {"MIDFLIGHT_CONTROL_TOKEN": TOKEN, "PYTHONPATH": str(ROOT / "src"), "NO_PROXY": "*", "no_proxy": "*"}
        self.runs: list[Command] = []
        self._num_commands = 0
        self._lay_out()

    def _lay_out(self) -> None:
        for name in COPIED:
            shutil.copytree(ROOT / name, self.folder / name)
        for name in PACKED_RUNS:
            (self.folder / name).symlink_to(ROOT / name)
        programs = self.folder / ".venv" / "bin"
        programs.mkdir(parents=True)
        (programs / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (programs / "python").chmod(0o755)
        self._environ["PATH"] = f"{programs}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def tell(self, blocks: Sequence[Block]) -> None:
        """Everything that can be done of a page; blocks of Python that are no files are one program."""
        program = [block for block in blocks if block.language == "python" and block.tried == "run"]
        for block in blocks:
            if block.file is not None:
                (self.where / block.file).write_text(self._filled(block.text))
            elif block.beside:
                self._beside.append(self._start(["bash", "-c", self._filled(block.text)]))
            elif block.tried == "run" and block.language != "python":
                for line in block.commands():
                    self.command(line)
            elif program and block is program[-1]:
                self.program("\n".join(each.text for each in program))
        self.runs_end()

    def close(self) -> None:
        for started in reversed(self._beside):
            process = started.process if isinstance(started, Command) else started
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
            if isinstance(started, Command):
                started.end()

    def program(self, text: str) -> None:
        self._finish([sys.executable, self._written(text)])

    def runs_end(self) -> None:
        """Those that workers beside them do."""
        for run in self.runs:
            assert run.wait(self._seconds) == 0, run.said

    # --- One command ---------------------------------------------------------------------------------------------------

    def command(self, line: str) -> None:
        line = self._filled(line)
        words = shlex.split(line, comments=True)
        if words[0] == "make":
            return
        if Path(words[0]).name == "midflight":
            self._midflight(small(words[1:], self.where) if self._is_small else words[1:])
        elif words[0] == "cd":
            self.where = self.where / words[1]
        else:
            self._finish(["bash", "-c", f"set -euo pipefail\n{line}"])

    def _filled(self, text: str) -> str:
        for port, free in self._ports.items():
            text = text.replace(port, free)
        return text.replace("MODEL_DIR", str(self.folder / "model")).replace("Bearer CONTROL_TOKEN", f"Bearer {TOKEN}")

    def _midflight(self, words: list[str]) -> None:
        self._num_commands += 1
        started = _Here(words, self.folder, self.where, number=self._num_commands, environ=self._environ)
        waits_for_workers = any("claimed:claimed" in word for word in words)
        if words[0] in SERVERS or waits_for_workers:
            self._beside.append(started)
            self.runs += [started] * waits_for_workers
            self._reached(words, started)
            return
        try:
            status = started.wait(self._seconds)
        finally:
            started.end()
        assert status == 0, f"midflight {shlex.join(words)}: {status}\n{started.said}"

    def _reached(self, words: Sequence[str], started: Command) -> None:
        endpoint = self.where / _folder_of(words, self.where) / "endpoint.json"
        said = started.until(lambda: _read(endpoint), "address")
        self._environ |= {"URL": said["url"], "TOKEN": said["control_token"]}
        started.until(lambda: _healthy(said["url"]), "engine that takes requests")

    def _written(self, text: str) -> str:
        self._num_commands += 1
        path = self.folder / f"program{self._num_commands}.py"
        path.write_text(self._filled(text))
        return str(path)

    def _start(self, words: Sequence[str]) -> subprocess.Popen[bytes]:
        output = (self.folder / f"said{self._num_commands}.txt").open("wb")
        return subprocess.Popen(words, cwd=self.where, env=self._environ, stdout=output, stderr=subprocess.STDOUT)

    def _finish(self, words: Sequence[str]) -> None:
        done = subprocess.run(words, cwd=self.where, env=self._environ, capture_output=True, text=True, timeout=self._seconds)
        assert done.returncode == 0, f"{shlex.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}"
        answer = _object(done.stdout)
        assert "error" not in answer, f"{words[-1]}: {done.stdout}"
        self._environ |= {name.upper(): value for name, value in answer.items() if isinstance(value, str)}


class _Here(Command):
    """In the current folder of the story, with its own files of what it said."""

    def __init__(self, words: Sequence[str], folder: Path, where: Path, *, number: int, environ: dict[str, str]) -> None:
        self.output, self.errors = folder / f"out{number}.txt", folder / f"err{number}.txt"
        command = [sys.executable, "-m", "midflight", *words]
        output, errors = str(self.output), str(self.errors)
        self.process = template().start(command, cwd=str(where), environ=environ, output=output, errors=errors)
        self.began = time.monotonic()


def small(words: list[str], folder: Path) -> list[str]:
    """The command with settings in front of its own, which have the last word: a run of two steps with a tiny model."""
    if words[0] == "new-model":
        return [*words, *(word for size in SIZES for word in ("--set", f"model.{size}"))]
    file = next((folder / word for word in words if word.endswith(".toml")), None)
    if words[0] not in ("train", "rollouts", "evaluate") or file is None:
        return words
    given = tomllib.loads(file.read_text())
    sources = given.get("environment", {}).get("sources", [])
    settings = [f"environment.sources.{number}.heldout=8" for number, each in enumerate(sources) if each.get("heldout", 0) > 8]
    if "path" not in given.get("model", {}):
        settings += [f"model.{size}" for size in SIZES]
    if "warm_start" in given:
        settings += ["warm_start.max_steps=2", "warm_start.evaluate_every=2"]
    settings += ["run.steps=2", "rollout.groups_per_step=2", "rollout.group_size=4", "rollout.buffer_groups=10", "rollout.max_in_flight=32"]
    place = words.index(str(file.relative_to(folder))) + 1 if words[0] != "evaluate" else len(words)
    return [*words[:place], *(word for setting in settings for word in ("--set", setting)), *words[place:]]


def _folder_of(words: Sequence[str], folder: Path) -> Path:
    if "--folder" in words:
        return Path(words[words.index("--folder") + 1])
    if words[0] == "serve":
        return Path(f"runs/serve-{words[words.index('--port') + 1]}")
    file = next(folder / word for word in words if word.endswith(".toml"))
    return Path(tomllib.loads(file.read_text())["run"]["folder"])


def _read(path: Path) -> dict[str, str] | None:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _object(text: str) -> dict[str, object]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _healthy(url: str) -> bool:
    try:
        with DIRECT.open(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False

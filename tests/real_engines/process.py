"""A real server as a child of the tests: started by the command line that runs use, stopped, frozen, killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from midflight.config.devices import ServerSection
from midflight.config.sections import EngineSection
from midflight.engines.servers.command import HOST, READY, ServedModel, server_command
from midflight.models.adapters import adapter_of
from midflight.run.orphan_guard import guarded

Kind = Literal["vllm", "sglang"]
MAX_RUNNING = 8
MAX_CONTEXT = 512
_START_SECONDS = 900.0
"""Of a server on a machine that does other things too; 30 to 50 are usual."""
_STOP_SECONDS = 3.0


def interpreter(kind: Kind) -> Path:
    path = Path(os.environ.get(f"MIDFLIGHT_{kind.upper()}_PYTHON", f".venv-{kind}/bin/python")).absolute()
    if not path.exists():
        pytest.fail(f"there is no {path}; run `make engines`, or set MIDFLIGHT_{kind.upper()}_PYTHON")
    return path


def free_port() -> int:
    with socket.socket() as made:
        made.bind((HOST, 0))
        return made.getsockname()[1]


class ServerProcess:
    """Ends with its context. `arguments` are further words for its command line."""

    def __init__(
        self, kind: Kind, model: Path, *, log: Path, arguments: tuple[str, ...] = (), num_adapters: int = 0, tensor_parallel: int = 1
    ) -> None:
        self.kind: Kind = kind
        self.model, self.log, self.port = model, log, free_port()
        self.url = f"http://{HOST}:{self.port}"
        laid = ServerSection(tensor_parallel=tensor_parallel)
        engine = EngineSection(kind=kind, max_running=MAX_RUNNING, arguments=arguments, servers=(laid,))
        served = ServedModel(folder=model, name="policy", dtype="float32", max_context=MAX_CONTEXT, kv_bytes_per_token=4096, version=0)
        if num_adapters and (adapter := adapter_of(model)) is not None:
            served = replace(served, num_adapters=num_adapters, rank=adapter.rank, targets=adapter.targets)
        cores = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if tensor_parallel > 1 else {}  # else it wants a NUMA node for each of its processes
        self._command = server_command(engine, served, python=interpreter(kind), port=self.port, inherited={**os.environ, **cores})
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.thaw()
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def start(self) -> None:
        words = guarded(self._command.argv, seconds=_STOP_SECONDS)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(self._command.environ), start_new_session=True
            )

    def wait(self) -> None:
        """Until it takes requests."""
        ends = time.monotonic() + _START_SECONDS
        while not self._answers():
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > ends:
                pytest.fail(f"{self.kind} did not come up:\n{self.log.read_text(errors='replace')[-6000:]}")
            time.sleep(0.25)

    def kill(self) -> None:
        """All its processes at once, and returns when they have gone."""
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    @contextmanager
    def frozen(self, title: str) -> Generator[None]:
        """Stops the server's process that calls itself so, for as long as the context lasts."""
        assert self._process is not None
        own = [int(path.name) for path in Path("/proc").glob("[0-9]*") if _is_of(path, self._process.pid, title)]
        assert len(own) == 1, f"{own} call themselves {title}"
        os.kill(own[0], signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(own[0], signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + READY[self.kind], timeout=2) as answer:
                return answer.status == 200
        except OSError:
            return False


def _is_of(path: Path, group: int, title: str) -> bool:
    """True if the process of this folder of /proc is of the group and calls itself so."""
    try:
        return os.getpgid(int(path.name)) == group and path.joinpath("cmdline").read_text().startswith(title)
    except OSError:
        return False

"""The ranks of `midflight train CONFIG --rollouts-from RUN`: processes of this machine."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path
from queue import SimpleQueue

from midflight.config.sections import Config
from midflight.errors import RunFailed
from midflight.run.orphan_guard import guarded

HOST = "127.0.0.1"


def train_in_ranks(config: Config, source: Path) -> None:
    """Starts a `rank_process` for each of `trainer.ranks`, and waits until all have ended. If one
    fails, it says why, all are ended, and `RunFailed` is raised.
    """
    processes: list[subprocess.Popen[bytes]] = []
    ended = SimpleQueue[tuple[int, int]]()
    try:
        with socket.create_server((HOST, 0)) as listening:
            for rank in range(config.trainer.ranks):
                processes.append(_started(rank, config, source, listening))
        for rank, process in enumerate(processes):
            threading.Thread(target=_wait, args=(rank, process, ended), daemon=True).start()
        for _ in processes:
            rank, status = ended.get()
            if status != 0:
                raise RunFailed(
                    f"trainer rank {rank} ended with status {status}. What it said stands above: "
                    "mend that, and begin again."
                )
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _started(
    rank: int, config: Config, source: Path, listening: socket.socket
) -> subprocess.Popen[bytes]:
    """Starts a rank. The first one gets the socket at which all meet."""
    meeting = f"{HOST}:{listening.getsockname()[1]}"
    inherited = [listening.fileno()] if rank == 0 else []
    module = "midflight.run.replay.rank_process"
    command = [sys.executable, "-m", module, str(rank), meeting, str(source), *map(str, inherited)]
    process = subprocess.Popen(
        guarded(command), stdin=subprocess.PIPE, pass_fds=inherited, start_new_session=True
    )
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write(config.model_dump_json().encode())
    return process


def _wait(rank: int, process: subprocess.Popen[bytes], ended: SimpleQueue[tuple[int, int]]) -> None:
    ended.put((rank, process.wait()))

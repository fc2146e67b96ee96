"""Processes beside a benchmark: how they are started, what they use, and how they end.

It needs nothing but Python, so that other people's environments can import it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

BENCHMARKS = Path(__file__).resolve().parents[1]
ROOT = BENCHMARKS.parent
TICKS = os.sysconf("SC_CLK_TCK")
PATIENCE_SECONDS = 900.0
"""The time that a server has until it listens: some compile before."""


# --- Starting and ending --------------------------------------------------------------------------


def environment(*, threads: int = 1, **more: str) -> dict[str, str]:
    """The environment variables of a child: so many threads, no network, and the modules of this
    folder importable.
    """
    paths = [str(BENCHMARKS), os.environ.get("PYTHONPATH")]
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        **more,
    }


def side(module: str, *arguments: object, python: Path | str = sys.executable) -> list[str]:
    """The command that runs a program of `sides`."""
    return [str(python), "-m", f"sides.{module}", *(str(argument) for argument in arguments)]


@contextlib.contextmanager
def running(
    command: Sequence[object],
    *,
    environ: Mapping[str, str] | None = None,
    log: IO[bytes] | None = None,
    **more: Any,
) -> Generator[subprocess.Popen[Any]]:
    """A child for as long as the context is open; then it and its children have ended. Its output
    goes to `log`, if one is given.
    """
    output = subprocess.DEVNULL if log is None else log
    words = [str(part) for part in command]
    settings: dict[str, Any] = {"stdout": output, "stderr": output, "start_new_session": True}
    process: subprocess.Popen[Any] = subprocess.Popen(
        words, env=dict(environ or environment()), **(settings | more)
    )
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[Any], *, seconds: float = 30.0) -> None:
    """Asks the process to end, and kills after `seconds` what it or its children have left."""
    if process.poll() is not None:
        return
    members = family(process.pid)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    for pid in members:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def output_of(
    command: Sequence[object], *, environ: Mapping[str, str] | None = None, **more: Any
) -> str:
    """What a command prints. `SystemExit` with its last errors where it fails."""
    words = [str(part) for part in command]
    environ = dict(environ or environment())
    done = subprocess.run(words, env=environ, capture_output=True, text=True, **more)
    if done.returncode:
        shown = " ".join(words[:4])
        raise SystemExit(f"{shown} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def apart(function: Callable[..., object], *given: object) -> None:
    """Calls the function in a process of its own, whose memory this process never shares."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=given)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(process.exitcode)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    """Waits until somebody listens. `SystemExit` where the process ends or takes too long."""
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until:
        if process.poll() is not None:
            raise SystemExit(f"{process.args} ended with {process.returncode}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise SystemExit(f"{process.args} does not listen on {port}")


# --- Processor time -------------------------------------------------------------------------------


def family(pid: int) -> list[int]:
    """The process and all its descendants that live; empty where it is gone."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    members = [pid]
    for child in children:
        members += family(int(child))
    return members


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far, without its children; 0 if it is gone."""
    return _cpu(pid, slice(11, 13))


def cpu_seconds_with_ended(pid: int) -> float:
    """Returns the same, with the children that have ended."""
    return _cpu(pid, slice(11, 15))


def family_cpu_seconds(pid: int | None = None) -> float:
    """Adds up a process and its living descendants; this process where none is named."""
    members = family(os.getpid() if pid is None else pid)
    return sum(cpu_seconds(member) for member in members)


def ended_cpu_seconds() -> float:
    """Adds up all children of this process that have ended, and theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _cpu(pid: int, fields: slice) -> float:
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    ticks = line.rpartition(")")[2].split()[fields]
    return sum(int(number) for number in ticks) / TICKS


def parent_of(pid: int) -> int | None:
    """Returns none if the process is gone."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(line.rpartition(")")[2].split()[1])


def words_of(pid: int) -> list[str]:
    """The command line of a process; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []


# --- Memory ---------------------------------------------------------------------------------------


def reset_peak() -> None:
    """From now on `peak_mib` is the peak since now."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_mib(pid: int | str = "self") -> float:
    """The highest resident memory of a process. Not `getrusage`, whose figure includes what the
    parent had when it started the process.
    """
    return _kilobytes("VmHWM", f"/proc/{pid}/status") / 1024


def resident_mib(pid: int | str = "self") -> float:
    return _kilobytes("VmRSS", f"/proc/{pid}/status") / 1024


def held_mib(pid: int | str = "self") -> float:
    """The peak, in which a page that n processes map now counts as an nth."""
    rollup = f"/proc/{pid}/smaps_rollup"
    shared = _kilobytes("Rss:", rollup) - _kilobytes("Pss:", rollup)
    return peak_mib(pid) - shared / 1024


def _kilobytes(key: str, file: str) -> int:
    for line in Path(file).read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1])
    return 0

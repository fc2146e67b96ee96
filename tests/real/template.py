"""Starts `python -m midflight...` by a fork of a process that has imported everything, because torch and transformers cost seconds of CPU.

`Template`, in the process of the tests, starts `main` once and asks it for programs; they are children of the tests, as if started by
them. What a program starts by `subprocess` is forked from it in the same way, with a process id, a session, pipes, log and signals of its
own. So only the imports are shared. `Command(..., forked=False)` starts an interpreter.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import ctypes
import functools
import gc
import io
import json
import logging
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from setproctitle import getproctitle, setproctitle

from midflight.run import orphan_guard

PRELOADED = (
    "matplotlib.pyplot",
    "midflight.cli",
    "midflight.environments.single_turn",
    "midflight.observe.plot",
    "midflight.run.engine.engine_process",
    "midflight.run.launcher.launch",
    "midflight.run.launcher.checks.preflight",
    "midflight.run.rollout.rollout_process",
    "midflight.run.trainer.trainer_process",
    "midflight.run.worker.worker_process",
    "openai",
    "reasoning_gym",
    "transformers.models.llama.modeling_llama",
    "uvicorn",
)
PR_SET_CHILD_SUBREAPER = 36
ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Forked(subprocess.Popen[bytes]):
    """A program that the template started and left to this process. Used as what `subprocess.Popen` makes."""

    def __init__(self, command: Sequence[str], pid: int) -> None:
        self.args, self.pid, self.returncode = command, pid, None  # type: ignore[assignment]
        self.stdin = self.stdout = self.stderr = None
        self._child_created, self._waitpid_lock, self._sigint_wait_secs = True, threading.Lock(), 0.25
        self._communication_started = False


class Template:
    def __init__(self, environ: dict[str, str]) -> None:
        assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1) == 0  # whose parent has ended is our child
        self._process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ)

    def start(self, command: Sequence[str], *, cwd: str, environ: dict[str, str], output: str, errors: str) -> Forked:
        """`command` begins with the interpreter and `-m`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        order = {"command": list(command), "cwd": cwd, "environ": environ, "output": output, "errors": errors}
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        return Forked(command, int(self._process.stdout.readline()))


@functools.cache
def template() -> Template:
    """That of this process, which ends when its pipe is closed."""
    return Template(dict(os.environ))


# --- In the template, and in what is forked from it --------------------------------------------------------------------


class ForkingPopen(subprocess.Popen[Any]):
    """Forks instead of starting an interpreter, where the command is a module of ours, with a guard or without one."""

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: bool, pass_fds: Any, cwd: Any, env: Any, *rest: Any
    ) -> None:
        words = [str(word) for word in args] if isinstance(args, (list, tuple)) else []
        beside, words = (words[4:7], words[7:]) if words[3:4] == [orphan_guard.__file__] else ([], words)
        if not is_ours(words):
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)  # type: ignore[misc]
            return
        _startup, _flags, _shell, *pipes, _restore, _gid, _gids, _uid, _umask, new_session, _group = rest
        given = [*pipes[0:1], pipes[3], pipes[5]]  # ours of standard input, output and errors
        sys.stdout.flush()
        sys.stderr.flush()
        # Until it has let go of the parent's wakeup descriptor, a signal to the child would count as one to the parent.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
        pid = os.fork()
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                for number in ENDS:
                    signal.signal(number, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                if new_session:
                    os.setsid()
                for number, descriptor in enumerate(given):
                    if descriptor != -1:
                        os.dup2(descriptor, number)
                if beside:
                    orphan_guard.stand_beside(int(beside[0]), int(beside[1]), float(beside[2]))
                become(words, cwd=cwd, environ=os.environ.copy() if env is None else dict(env), kept=pass_fds)
            finally:
                os._exit(255)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.pid, self._child_created = pid, True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def is_ours(command: Sequence[str]) -> bool:
    return list(command[:2]) == [sys.executable, "-m"] and command[2].startswith("midflight")


def become(command: Sequence[str], *, cwd: str | None, environ: dict[str, str], kept: Sequence[int] = ()) -> None:
    """Runs the module as its interpreter would, and ends the process. Standard input, output and errors are there already."""
    gc.freeze()  # what the parent has must not be closed here
    low = 3
    for descriptor in [*sorted(kept), os.sysconf("SC_OPEN_MAX")]:
        os.closerange(low, min(descriptor, 2**16))
        low = descriptor + 1
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, 32, 33}:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    asyncio._set_running_loop(None)
    atexit._clear()
    for name in (None, *logging.root.manager.loggerDict):
        logging.getLogger(name).handlers.clear()
    os.environ.clear()
    os.environ.update(environ)
    if cwd is not None:
        os.chdir(cwd)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = (io.TextIOWrapper(os.fdopen(number, "wb", 0, closefd=False), write_through=True) for number in (1, 2))
    sys.argv = list(command[2:])
    sys.path[0] = str(Path.cwd())
    setproctitle(" ".join(command))
    if (faults := environ.get("PLAYED_FAULTS")) and "midflight.run.launcher.child" in command:
        runpy.run_path(faults, run_name="__main__")
    os._exit(contextvars.Context().run(run, command[2]))


def run(module: str) -> int:
    status: object = 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # that it was imported before
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status if isinstance(status, int) else int(status is not None)


def main() -> None:
    setproctitle(getproctitle())  # while the environment lies where it lay at the start
    sys.path[0] = ""
    sys.stdout, orders = sys.stderr, os.fdopen(os.dup(0), "rb", 0)
    answers = os.dup(1)
    for module in PRELOADED:
        import_module(module)
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    gc.collect()
    gc.freeze()
    while line := orders.readline():
        reading, writing = os.pipe()
        if (between := os.fork()) == 0:
            if (pid := os.fork()) == 0:
                order = json.loads(line)
                for number, path in ((0, os.devnull), (1, order["output"]), (2, order["errors"])):
                    os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC * (number > 0), 0o644), number)
                become(order["command"], cwd=order["cwd"], environ=order["environ"])
            os.write(writing, str(pid).encode())
            os._exit(0)
        os.waitpid(between, 0)  # so that the program is left to the process of the tests
        os.write(answers, os.read(reading, 20) + b"\n")
        os.close(reading)
        os.close(writing)


if __name__ == "__main__":
    main()

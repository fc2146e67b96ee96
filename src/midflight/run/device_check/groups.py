"""Trials of a group of two ranks, which talk by NCCL on GPUs and by gloo elsewhere, through the same
code.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import msgspec

from midflight.run.device_check.bench import Bench, not_tried
from midflight.run.device_check.report import DeviceTrial, TrialOutcome
from midflight.run.orphan_guard import guarded
from midflight.trainer.model.ranks import backend_of
from midflight.weights.transports.process_group import listen

SIZE = 2
RANKS_SECONDS = 120.0
"""The time for all trials of two ranks, with their start."""
ONE_RANK = "set trainer.ranks = 1"
LAST_CHARACTERS = 600
"""Characters of what a rank has said that a trial shows."""


def groups(bench: Bench) -> Iterator[DeviceTrial]:
    """Yields the trials that two ranks make."""
    backend = backend_of(str(bench.device))
    what = f"two ranks by {backend}"
    if bench.device.type not in ("cpu", "cuda"):
        yield not_tried(what, f"torch makes no groups of processes on {bench.device.type}")
        return
    if bench.num_devices < SIZE and bench.is_cuda:
        yield not_tried(what, f"NCCL takes a GPU for each rank, and {bench.num_devices} is here")
        return
    yield from _of_two_ranks(bench, what)


def _of_two_ranks(bench: Bench, what: str) -> Iterator[DeviceTrial]:
    """Starts both ranks, and waits for them, for `RANKS_SECONDS` at most."""
    with listen("127.0.0.1") as free:
        port = free.getsockname()[1]
    commands = [
        [
            sys.executable,
            "-m",
            "midflight.run.device_check.rank_process",
            str(rank),
            str(port),
            bench.device.type,
            str(bench.scratch),
        ]
        for rank in range(SIZE)
    ]
    started = [
        subprocess.Popen(
            guarded(command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        for command in commands
    ]
    try:
        out, errors = started[0].communicate(timeout=RANKS_SECONDS)
        late = False
    except subprocess.TimeoutExpired as waited:
        out = waited.output or b""
        errors = waited.stderr or b""
        late = True
    finally:
        for process in started:
            process.kill()
    _, other_errors = started[1].communicate()
    for line in out.splitlines():
        with suppress(msgspec.DecodeError):  # a library's print
            yield msgspec.json.decode(line, type=DeviceTrial)
    if late or started[0].returncode != 0:
        how = f"did not end in {RANKS_SECONDS:.0f} s" if late else "ended with an error"
        said = (errors + other_errors).decode(errors="replace")[-LAST_CHARACTERS:]
        yield DeviceTrial(what, TrialOutcome.FAILED, f"the ranks {how}: {said}", remedy=ONE_RANK)

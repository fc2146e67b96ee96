"""`midflight train` as a child of a benchmark."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.processes import ROOT, end, environment

DEMO = ROOT / "configs" / "demo.toml"
SMALL = (
    "model.hidden_size=32",
    "model.num_layers=1",
    "warm_start.max_steps=2",
    "environment.sources.0.heldout=4",
    "environment.sources.1.heldout=4",
    "rollout.groups_per_step=2",
    "rollout.group_size=2",
)
"""The settings with which a run of `configs/demo.toml` takes seconds."""
PATIENCE_SECONDS = 600.0
"""The time that a run has until its next step."""


def sets(settings: Sequence[str]) -> list[str]:
    """The settings as words of a command line."""
    words: list[str] = []
    for setting in settings:
        words += ["--set", setting]
    return words


def train_command(
    config: Path | str, settings: Sequence[str], *, folder: Path | None = None
) -> list[str]:
    """`midflight train`, in the folder that is given or else in that of the configuration."""
    words = [sys.executable, "-m", "midflight", "train", str(config), *sets(settings)]
    if folder is not None:
        words += ["--folder", str(folder)]
    return words


@contextmanager
def training(
    command: Sequence[str],
    *,
    said: Path,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Generator[subprocess.Popen[bytes]]:
    """A run whose words go into the file `said`. At the end of the context the run ends too."""
    said.parent.mkdir(parents=True, exist_ok=True)
    with said.open("wb") as log:
        run = subprocess.Popen(
            command, stdout=log, stderr=log, env=dict(environ or environment()), cwd=cwd
        )
        try:
            yield run
        finally:
            end(run)


def train(
    command: Sequence[str],
    *,
    said: Path,
    look: Callable[[int], object] = lambda pid: None,
    every: float = 0.25,
    environ: Mapping[str, str] | None = None,
) -> None:
    """Waits for a run. `look` is called with the pid of its launcher, `every` so many seconds.
    `SystemExit` with its last words where it fails.
    """
    with training(command, said=said, environ=environ) as run:
        while run.poll() is None:
            look(run.pid)
            time.sleep(every)
    if run.returncode:
        shown = said.read_text()[-3000:]
        raise SystemExit(f"{' '.join(command[:5])} ended with {run.returncode}:\n{shown}")


def journal(folder: Path, *, kind: str | None = None) -> list[dict[str, Any]]:
    """The whole lines of a run's journal, of one kind or of all; the last line may be written at
    this moment.
    """
    path = folder / "metrics.jsonl"
    whole = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    lines = [json.loads(line) for line in whole]
    return [line for line in lines if kind is None or line["kind"] == kind]


def wait_for_step(
    run: subprocess.Popen[bytes],
    folder: Path,
    *,
    above: int = -1,
    look: Callable[[int], object] = lambda pid: None,
) -> None:
    """Waits until the journal has a step whose version is above that. `SystemExit` where the run
    ends or takes too long.
    """
    until = time.monotonic() + PATIENCE_SECONDS
    while newest_version(folder) <= above:
        if run.poll() is not None:
            raise SystemExit(f"the run ended with {run.returncode} before its next step")
        if time.monotonic() > until:
            raise SystemExit(f"there was no step within {PATIENCE_SECONDS:.0f} s")
        look(run.pid)
        time.sleep(0.05)


def newest_version(folder: Path) -> int:
    """The version of the last step in the journal; -1 where there was none."""
    return max((line["version"] for line in journal(folder, kind="step")), default=-1)

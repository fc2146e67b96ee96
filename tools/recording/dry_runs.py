"""What `midflight train CONFIG --dry-run` says of every configuration in configs and examples.

A configuration may name what is made before its run: a model, a teacher, conversations. A small one stands in for each, also where the
real one is there, so that records agree. What the machine adds is masked: folders, free disk and memory, cores, and how far off
the proofs of a model are, which rounding decides. Numbers of workers and threads follow the cores and are not masked.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recording import ROOT, Found, surroundings

FOLDERS = ("configs", "examples")
MADE_BEFORE = ("runs/", "models/")
"""Where what is made before a run lies. Git ignores both."""
STAND_INS = {
    "model.path": "model",
    "distillation.teacher": "model",
    "warm_start.data": "conversations.jsonl",
}
"""Options that may name such a thing, and what stands in for it."""
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "max_context": 32768}
"""Of the model that stands in: small, but for the context, which coding agents need."""
COLUMNS = "160"
MASKS = (
    (re.compile(r"[\d.]+ [KMGT]?B(?= (of memory|(are )?free)\b)"), "<size>"),
    (re.compile(r"\bon \d+ cores\b"), "on <number> cores"),
    (re.compile(r"\boff by at most [^)]*"), "off by at most <difference>"),
    (re.compile(r" +$", re.MULTILINE), ""),
)
PROGRESS = re.compile(r".*, for \d+ s, .*\n")
"""How long a look takes already, which a slow machine is told."""


def dry_runs() -> Found:
    """The output of each dry run, by the path of its configuration. Waits for one process after another."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_stand_ins(folder)
        return {str(path.relative_to(ROOT)): dry_run(path, folder) for path in configurations()}


def configurations() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.toml"))


def make_stand_ins(folder: Path) -> None:
    turns = [{"role": "user", "content": "1 + 1 ="}, {"role": "assistant", "content": "2"}]
    (folder / "conversations.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    sizes = [word for size, value in SIZES.items() for word in ("--set", f"model.{size}={value}")]
    made = midflight("new-model", str(folder / "model"), *sizes)
    if made.returncode:
        raise SystemExit(f"midflight new-model ended with status {made.returncode}: {made.stderr}")


def dry_run(path: Path, folder: Path) -> str:
    """The status, and below it what was printed, without what only this machine adds."""
    options = [word for option in stand_ins(path, folder) for word in ("--set", option)]
    done = midflight("train", str(path), "--dry-run", "--folder", str(folder / "run"), *options)
    printed = done.stdout
    if done.returncode:
        printed += PROGRESS.sub("", done.stderr)
    return masked(f"status {done.returncode}\n{printed}", folder)


def stand_ins(path: Path, folder: Path) -> Iterator[str]:
    """An override for each option whose value is made before the run."""
    config = tomllib.loads(path.read_text())
    for option, name in STAND_INS.items():
        if str(_value(config, option)).startswith(MADE_BEFORE):
            yield f"{option}={folder / name}"


def _value(config: dict[str, Any], option: str) -> object:
    section, name = option.split(".")
    return config.get(section, {}).get(name)


def masked(text: str, folder: Path) -> str:
    text = text.replace(str(folder), "<folder>").replace(str(ROOT), "<checkout>")
    for pattern, words in MASKS:
        text = pattern.sub(words, text)
    return text


def midflight(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "midflight", *arguments]
    environment = {**surroundings(), "COLUMNS": COLUMNS}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

"""The folder of a run that an earlier Midflight made: every command reads it, and the run goes on. Real processes.

`old_run.tar.xz` was made by the first commit of version 0.2.0, with the configuration that lies in it.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from .processes import Command, steps

NUM_STEPS = 4


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The folder of the run."""
    with tarfile.open(Path(__file__).with_name("old_run.tar.xz")) as packed:
        packed.extractall(tmp_path, filter="data")
    return tmp_path / "run"


def said(*words: object, folder: Path, status: int = 0) -> str:
    command = Command(*words, folder=folder)
    try:
        assert command.wait(120) == status, command.said
    finally:
        command.end()
    assert "Traceback" not in command.said
    return command.said


def test_every_command_that_reads_a_run_reads_it(old: Path) -> None:
    place = old.parent
    assert "  run  " in said("runs", ".", folder=place)
    assert "does not add up" not in said("ledger", "run", folder=place)
    assert said("samples", "run", folder=place)
    said("report", "run", "--out", "report.html", folder=place)
    said("trace", "run", "--out", "trace.json", folder=place)
    assert json.loads((place / "trace.json").read_text())
    said("export", "run", "--out", "rows.out.jsonl", folder=place)
    assert [line["version"] for line in steps(old)] == list(range(1, NUM_STEPS + 1))


def test_it_goes_on_and_its_books_stay_whole(old: Path) -> None:
    place = old.parent
    said("train", "run/config.toml", "--resume", "--set", f"run.steps={NUM_STEPS + 2}", folder=place)
    assert [line["version"] for line in steps(old)] == list(range(1, NUM_STEPS + 3))
    assert "does not add up" not in said("ledger", "run", folder=place)
    proven = said("ledger", "run", "--prove", folder=place)
    assert "rollouts ended before this run kept digests" in proven and "2 steps have their digests" in proven


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("store.sqlite", "flipped", "restore the file from a copy"),
        ("store.sqlite", "cut", "restore the file from a copy"),
        ("metrics.jsonl", "flipped", "metrics.jsonl"),
        ("checkpoints/version-00000004/rank-00000.safetensors", "flipped", "does not match the hash"),
        ("checkpoints/version-00000004/rank-00000.safetensors", "cut", "does not match the hash"),
        ("checkpoints/version-00000004/manifest.json", "cut", "manifest.json"),
        ("start/model.safetensors", "cut", "start"),
        ("config.toml", "cut", "the file was cut short"),
    ],
)
def test_damage_is_named_and_no_other_file_is_touched(old: Path, name: str, damage: str, words: str) -> None:
    path = old / name
    whole = path.read_bytes()
    if damage == "cut":
        path.write_bytes(whole[: len(whole) // 2])
    else:
        broken = bytearray(whole)
        for at in range(len(whole) // 3, len(whole), 257):
            broken[at] ^= 0x55
        path.write_bytes(broken)
    kept = {each: each.read_bytes() for each in (old / "store.sqlite", old / "metrics.jsonl", old / "checkpoints" / "latest")}
    command = Command("train", "run/config.toml", "--resume", "--set", f"run.steps={NUM_STEPS + 2}", folder=old.parent)
    try:
        assert command.wait(120) in (1, 2), command.said
    finally:
        command.end()
    errors = command.errors.read_text()
    assert words in command.said and "Traceback" not in errors, command.said
    assert {each: each.read_bytes() for each in kept} == kept

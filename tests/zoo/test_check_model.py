"""`midflight check-model`, and when the table of docs/models.md fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.models.zoo import tiny
from tests.zoo.table import HEAD, faults, row

from midflight.cli.commands import main
from midflight.models.proof import Proof, Way


def test_check_model_says_what_becomes_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny("bloom").save_pretrained(tmp_path)
    assert main(["check-model", str(tmp_path), "--max-context", "64"]) == 0
    trainer, engine, export = capsys.readouterr().out.splitlines()
    assert trainer.startswith("trainer: right, slower (off by at most ") and "packed: off by " in trainer
    assert engine.startswith("engine: right, slower") and export.startswith("export: right")


def test_check_model_fails_where_a_part_refuses_and_where_there_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny("xlstm").save_pretrained(tmp_path)
    assert main(["check-model", str(tmp_path), "--max-context", "64"]) == 1
    assert "engine: refused" in capsys.readouterr().out
    assert main(["check-model", str(tmp_path / "nothing")]) == 2


def proofs(way: Way = Way.PACKED, error: float = 1e-6) -> list[Proof]:
    return [Proof("trainer", way, error, 1e-6), Proof("engine", Way.PACKED, 1e-6), Proof("export", Way.PACKED, 0.0)]


def test_the_table_fails_where_a_row_is_worse_or_off_or_gone() -> None:
    page = HEAD + row("llama", proofs()) + "\n"
    assert faults({"llama": proofs()}, page) == []
    assert faults({"llama": proofs(), "new": proofs(Way.FALLBACK)}, page) == []
    assert faults({"llama": proofs(Way.FALLBACK)}, page) == ["llama: trainer was 'right' and is 'right, slower': "]
    assert faults({"llama": proofs(error=2e-3)}, page) == ["llama: trainer is off by 0.002"]
    assert faults({}, page) == ["llama is gone"]

"""`midflight check-model`, and when the table of docs/models.md fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.models.zoo import tiny
from tests.zoo.table import HEAD, faults, page, rows

from midflight.cli.commands import main
from midflight.models.proof import Proof, Way


def test_check_model_says_what_becomes_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny("bloom").save_pretrained(tmp_path)
    assert main(["check-model", str(tmp_path), "--max-context", "64"]) == 0
    trainer, engine, export = capsys.readouterr().out.splitlines()
    assert trainer.startswith("trainer: right, slower (off by at most ") and "packed: off by " in trainer
    assert engine.startswith("engine: right, slower") and export.startswith("export: right")


def test_check_model_says_how_slow_a_model_is_of_which_nothing_can_be_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny("recurrent_gemma").save_pretrained(tmp_path)
    assert main(["check-model", str(tmp_path), "--max-context", "64"]) == 0
    assert "engine: right, slowest" in (said := capsys.readouterr().out) and "times as long as at the first" in said


def test_check_model_fails_where_a_part_refuses_and_where_there_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny("llama-dynamic-rope").save_pretrained(tmp_path)
    assert main(["check-model", str(tmp_path), "--max-context", "64"]) == 1
    assert "engine: refused" in capsys.readouterr().out
    assert main(["check-model", str(tmp_path / "nothing")]) == 2


def test_check_model_says_in_a_sentence_that_a_models_own_forward_raises_or_that_it_cannot_be_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny("gptj")
    model.config.rotary_dim = 64  # heads have 8
    model.save_pretrained(tmp_path / "raises")
    capsys.readouterr()
    assert main(["check-model", str(tmp_path / "raises"), "--max-context", "64"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]  # on a busy machine lines before it say what takes so long
    assert "GPTJForCausalLM's own forward in transformers" in said and "raises RuntimeError: The size of tensor" in said
    assert "Correct its config.json" in said and "Traceback" not in said
    model.config.activation_function = "none such"
    model.config.save_pretrained(tmp_path / "raises")
    assert main(["check-model", str(tmp_path / "raises"), "--max-context", "64"]) == 2
    said = capsys.readouterr().err
    assert "raises KeyError: 'none such'; correct its config.json" in said and "Traceback" not in said


def proofs(way: Way = Way.PACKED, error: float = 1e-6) -> list[Proof]:
    return [Proof("trainer", way, error, 1e-6), Proof("engine", Way.PACKED, 1e-6), Proof("export", Way.PACKED, 0.0)]


def test_the_table_fails_where_a_row_is_worse_or_off_or_gone() -> None:
    page = HEAD + rows({"llama": proofs(), "qwen3": proofs()}) + "\n"
    other = {"qwen3": proofs()}
    assert faults({"llama": proofs(), **other}, page) == []
    assert faults({"llama": proofs(), "new": proofs(Way.FALLBACK), **other}, page) == []
    assert faults({"llama": proofs(Way.FALLBACK), **other}, page) == ["llama: trainer was 'right' and is 'right, slower': "]
    assert faults({"llama": proofs(error=2e-3), **other}, page) == ["llama: trainer is off by 0.002"]
    assert faults(other, page) == ["llama is gone"]


def test_the_page_counts_what_each_part_computes_and_names_the_models_that_are_off_by_more_than_rounding() -> None:
    refused = [Proof(part, Way.REFUSED, reason="its own forward raises.") for part in ("trainer", "engine", "export")]
    made = page({"llama": proofs(), "bert": refused, "dory": proofs(error=3e-5)})
    assert "\n\nOf 3 architectures 2 are trained, 2 served and 2 exported. " in made
    assert "less than 1e-5 of their size, but for dory (1e-4). None may be off by more than 0.001.\n" in made
    assert faults({"llama": proofs(), "bert": refused, "dory": proofs(error=3e-5)}, made) == []

"""`midflight init --model`: what is refused before anything is written, and what the file looks like. The whole way is in tests/real."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import msgspec
import pytest
from tests.cli.test_fitting import MEASURED
from tests.config import folders

from midflight.cli.commands import main
from midflight.cli.fitted_project import Request, run_file, source_of
from midflight.cli.fitting import Choice, Fitting, OwnMachine, fit
from midflight.config import load_config
from midflight.errors import ConfigError
from midflight.models.sizes import sizes_of
from midflight.text.byte_tokenizer import write_byte_tokenizer

SIZES = {**folders.SIZES, "model_type": "qwen3", "max_position_embeddings": 512}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder without weights: enough for all that is looked at before a measurement."""
    folder = tmp_path / "model"
    folder.mkdir()
    write_byte_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(SIZES))
    return folder


def written(model: Path, **request: object) -> str:
    asked = Request(Path("mine"), model, **request)  # type: ignore[arg-type]
    tasks = (
        Choice("environment.sources", [source_of(asked)]),
        Choice("environment.rewards", [{"entry": "midflight.rewards:number_match"}]),
    )
    given = Fitting(model, sizes_of(model), MEASURED, OwnMachine(2, 2**34), tasks)
    return run_file(asked, fit(given), MEASURED, given.machine)


def refusal(capsys: pytest.CaptureFixture[str], folder: Path, *words: object) -> str:
    """The one message of a command that is refused and writes nothing."""
    assert main(["init", str(folder), *map(str, words)]) == 2
    assert not folder.exists()
    return capsys.readouterr().err


def test_the_file_is_what_was_chosen_with_a_reason_for_each_number(model: Path, tmp_path: Path) -> None:
    text = written(model)
    (tmp_path / "run.toml").write_text(text)
    config = load_config(tmp_path / "run.toml")
    table = tomllib.loads(text)
    assert config.model.path == model and table["environment"]["sources"] == [
        {"path": "tasks.jsonl", "prompt": "{question} Answer with the number only.", "answer": "answer", "heldout": 40}
    ]
    lines = text.splitlines()
    for key in ("max_context", "max_tokens", "groups_per_step", "group_size", "max_running", "learning_rate", "micro_batch_tokens"):
        (at,) = [number for number, line in enumerate(lines) if line.startswith(f"{key} = ")]
        assert lines[at - 1].startswith("# "), key
    assert max(map(len, lines)) <= 112
    assert "engine 16, 70, 150 tokens/s for 1, 8, 32 requests at once" in text.replace("\n# ", " ")
    assert "without a warm start" not in text and "[warm_start]" not in text


def test_tasks_may_be_a_file_of_ones_own_or_a_dataset(model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"q": "1 + 1", "a": 2}\n')
    (source,) = tomllib.loads(written(model, tasks=str(rows), prompt="{q}", answer="a"))["environment"]["sources"]
    assert source == {"path": str(rows), "prompt": "{q}", "answer": "a", "heldout": 0.1}
    (source,) = tomllib.loads(written(model, tasks="chain_sum"))["environment"]["sources"]
    assert source == {"dataset": "chain_sum", "prompt": "{question}", "heldout": 64}


def test_what_a_model_said_cannot_break_the_file(model: Path) -> None:
    odd = msgspec.structs.replace(MEASURED, answer='a\nb = 3 \x00 """ \\u \x1b[0m' + "x" * 500)
    asked = Request(Path("mine"), model)
    given = Fitting(model, sizes_of(model), odd, OwnMachine(2, 2**34), (Choice("environment.sources", [source_of(asked)]),))
    assert "b" not in tomllib.loads(run_file(asked, fit(given), odd, given.machine))


def test_what_is_no_model_that_can_be_asked_is_refused_before_anything_is_written(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine"
    assert "nowhere" in refusal(capsys, mine, "--model", tmp_path / "nowhere")
    assert "there is no file" in refusal(capsys, mine, "--model", tmp_path / "none.gguf")
    (model / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    tokenizer.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert "has no chat template, so that it cannot be asked anything: give an instruct model" in refusal(capsys, mine, "--model", model)


def test_tasks_that_are_not_there_and_options_without_a_model_are_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine"
    assert "there is no such file" in refusal(capsys, mine, "--model", model, "--tasks", tmp_path / "none.jsonl")
    assert "give it too: --model DIR" in refusal(capsys, mine, "--tasks", "chain_sum")
    assert "give it too: --model DIR" in refusal(capsys, mine, "--lora", 8)


def test_a_name_that_is_neither_file_nor_path_is_taken_for_a_dataset(model: Path) -> None:
    assert source_of(Request(Path("mine"), model, tasks="chain_sum"))["dataset"] == "chain_sum"
    with pytest.raises(ConfigError, match="no such file"):
        source_of(Request(Path("mine"), model, tasks="data/rows"))

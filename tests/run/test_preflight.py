"""What is wrong with a configuration on this machine, before anything is started."""

from __future__ import annotations

import json
import shutil
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from midflight.config import Config, load_config
from midflight.models.load import make_model, save_model
from midflight.run.launcher import preflight
from midflight.run.launcher.preflight import Findings, Inspection
from midflight.text.byte_tokenizer import write_byte_tokenizer

DEMO = Path(__file__).parents[2] / "configs" / "demo.toml"
FEW = [
    "environment.sources.0.size=50",
    "environment.sources.0.heldout=4",
    "environment.sources.1.size=20",
    "environment.sources.1.heldout=4",
]


def config_of(folder: Path, *more: str) -> Config:
    return load_config(DEMO, [f"run.folder={folder / 'run'}", *FEW, *more])


def look(folder: Path, *more: str) -> Findings:
    return Inspection(config_of(folder, *more)).findings()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    write_byte_tokenizer(folder)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "max_context": 64}
    save_model(make_model(vocab_size=262, seed=0, dtype="float32", **sizes), folder)
    return folder


def test_a_sound_configuration_has_its_first_prompt_as_text_and_tokens(tmp_path: Path) -> None:
    found = look(tmp_path)
    assert not found.problems and found.prompt is not None
    assert found.prompt.text.startswith("<|user|>reverse ") and found.prompt.text.endswith("<|assistant|>")
    assert (found.prompt.source, found.prompt.tokens[1]) == ("spell_backward", (ord("r"), "r"))
    assert not (tmp_path / "run").exists(), "it changes nothing"


def test_everything_that_is_wrong_is_named_at_once(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = look(
            tmp_path,
            "environment.entry=no_such_module:solve",
            "environment.sources.0.dataset=spel_backward",
            "engine.device=cuda:7",
            f"gateway.port={port}",
        )
    wanted = ("no module 'no_such_module'", "Did you mean 'spell_backward'?", "engine.device is 'cuda:7'", f"127.0.0.1:{port}")
    assert len(found.problems) == len(wanted)
    for words, problem in zip(wanted, found.problems, strict=True):
        assert words in problem


def test_more_held_out_tasks_than_there_are_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (problem,) = look(tmp_path, "environment.sources.1.heldout=5000").problems
    assert "heldout = 5000" in problem and "distinct values of 'expression'" in problem
    monkeypatch.setattr(preflight, "DRAWING_SECONDS", 0.5)
    (problem,) = look(tmp_path, "environment.sources.0.heldout=5000000").problems
    assert "heldout = 5000000" in problem and "minutes" in problem


def test_tasks_that_take_hours_to_draw_are_refused_and_minutes_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "DRAWING_SECONDS", 0.05)
    endless = ["environment.sources.1.options={min_terms=9, max_terms=9, min_digits=9, max_digits=9}"]
    (problem,) = look(tmp_path, *endless, "environment.sources.1.heldout=100000000").problems
    assert "about" in problem and "heldout = 100000000" in problem
    began = time.monotonic()
    found = look(tmp_path, *endless, "environment.sources.1.heldout=10000")
    assert not found.problems and "at every start" in found.notes[0] and found.prompt is not None
    assert time.monotonic() - began < 60


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_time_is_up_also_where_the_first_error_is_lost() -> None:
    class Finalised:
        def __del__(self) -> None:
            time.sleep(0.1)  # an error here is printed and forgotten

    with pytest.raises(preflight.OutOfTime), preflight._within(0.05):
        Finalised()
        time.sleep(3)


def test_a_tokenizer_with_more_ids_than_the_model_has_rows_is_refused(tmp_path: Path, model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 260}))
    (problem,) = look(tmp_path, f"model.path={model}").problems
    assert "has ids up to 261, and the model has 260 rows" in problem


def test_a_model_without_tokenizer_template_or_known_architecture_is_refused(tmp_path: Path, model: Path) -> None:
    broken = tmp_path / "broken"
    for name, text, words in (
        ("tokenizer.json", None, "tokenizer.json does not exist"),
        ("chat_template.jinja", "{% for %}", "compiling the chat template failed"),
        ("chat_template.jinja", "{{ raise_exception('only tools') }}", "only tools"),
        ("config.json", json.dumps({**json.loads((model / "config.json").read_text()), "model_type": "no_such"}), "no architecture"),
        ("model.safetensors", None, "no model.safetensors"),
    ):
        shutil.copytree(model, broken)
        (broken / name).write_text(text) if text is not None else (broken / name).unlink()
        problems = look(tmp_path, f"model.path={broken}").problems
        assert any(words in problem for problem in problems), (words, problems)
        shutil.rmtree(broken)


def test_a_missing_template_is_a_note_where_an_environment_of_ones_own_may_do_without(tmp_path: Path, model: Path) -> None:
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template")
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    assert "no chat template" in look(tmp_path, f"model.path={model}").problems[0]
    own = ["environment.entry=examples.own_environment:spell_with_a_hint", "warm_start.target_accuracy=none"]
    found = look(tmp_path, f"model.path={model}", *own)
    assert not found.problems and "no chat template" in found.notes[0]


def test_a_prompt_that_fills_the_context_is_refused(tmp_path: Path) -> None:
    (problem,) = look(tmp_path, "model.max_context=12", "environment.max_tokens=4").problems
    assert "model.max_context is 12" in problem


def test_a_disk_or_shared_memory_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    disk, shared = look(tmp_path).problems
    assert str(tmp_path / "run") in disk and "1.0 MB" in disk and "keep_checkpoints" in disk
    assert "/dev/shm has 1.0 MB free" in shared and "--shm-size" in shared
    assert len(look(tmp_path, "weights.transport=file").problems) == 1

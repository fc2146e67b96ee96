"""What is wrong with a configuration on this machine, before anything is started."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.checks import found_in
from tests.models.mixtures import tiny_mixture

from midflight.config import Config, load_config
from midflight.models.creation import make_model
from midflight.models.load import save_model
from midflight.run.launcher import drawing_time
from midflight.run.launcher.checks import tasks
from midflight.run.launcher.checks.check import Findings
from midflight.text.byte_tokenizer import write_byte_tokenizer
from midflight.weights.transports import memory_files
from midflight.weights.transports.memory_files import SHARED

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
    return found_in(config_of(folder, *more))


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
            f"gateway.port={port}",
        )
    wanted = (f"127.0.0.1:{port}", "no module 'no_such_module'", "Did you mean 'spell_backward'?")
    assert len(found.problems) == len(wanted)
    for words, problem in zip(wanted, found.problems, strict=True):
        assert words in problem


def test_more_held_out_tasks_than_there_are_are_refused(tmp_path: Path) -> None:
    (problem,) = look(tmp_path, "environment.sources.1.heldout=5000").problems
    assert "heldout = 5000" in problem and "distinct values of 'expression'" in problem


def test_tasks_that_take_long_to_draw_are_not_refused_and_the_time_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing_time, "DRAWING_SECONDS", 0.05)
    endless = "environment.sources.1.options={min_terms=9, max_terms=9, min_digits=9, max_digits=9}"
    found = look(tmp_path, endless, "environment.sources.1.heldout=50000")
    assert not found.problems and found.prompt is not None
    (note,) = [note for note in found.notes if "drawing the tasks" in note]
    assert "heldout = 50000" in note and "of processor time at every start" in note


def test_every_deed_of_the_inspection_is_said_before_it_is_done(tmp_path: Path) -> None:
    said: list[str] = []
    found_in(config_of(tmp_path), doing=said.append)
    assert said[0] == "imports midflight.environments.single_turn:answer"
    assert said[1:] == [
        "opens the sources of tasks",
        "loads the tokenizer",
        "looks at the tasks of spell_backward",
        "looks at the tasks of chain_sum",
    ]


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
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    (disk,) = look(tmp_path).problems
    assert str(tmp_path / "run") in disk and "1.0 MB" in disk and "keep_checkpoints" in disk
    assert "for versions on their way, for which /dev/shm has no room" in disk
    (disk,) = look(tmp_path, "weights.transport=pull").problems
    assert "/dev/shm" not in disk
    _, shared = look(tmp_path, "engine.kind=vllm", "weights.transport=pull").problems
    assert "/dev/shm has 1.0 MB free" in shared and "--shm-size" in shared


def test_a_disk_with_room_will_do_where_shared_memory_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20 if path == SHARED else 2**40))
    assert not look(tmp_path).problems
    monkeypatch.setattr(memory_files, "SHARED", tmp_path / "absent")
    assert not look(tmp_path).problems


def sums(folder: Path, *more: str, rows: int = 40) -> list[str]:
    """Overrides for one source over rows of sums, and what is written behind these."""
    lines = [json.dumps({"question": f"{i} + {i} =", "answer": 2 * i}) for i in range(rows)]
    (folder / "sums.jsonl").write_text("\n".join([*lines, *more]) + "\n")
    return [f"environment.sources=[{{path='{folder}/sums.jsonl', answer='answer', heldout=8}}]", "warm_start.target_accuracy=none"]


def own(folder: Path, *overrides: str) -> Findings:
    return found_in(load_config(None, [f"run.folder={folder / 'run'}", *overrides]))


def test_rows_are_counted_and_their_prompts_measured(tmp_path: Path) -> None:
    found = own(tmp_path, *sums(tmp_path))
    assert not found.problems and found.prompt is not None and found.prompt.source == "sums"
    (source,) = found.sources
    assert (source.num_training, source.num_heldout, source.num_left_out, source.num_measured) == (32, 8, 0, 32)
    assert source.lengths[0] >= len("1 + 1 =") + 3 and source.lengths[-1] == len("10 + 10 =") + 3, "the text and three markers"
    assert list(source.lengths) == sorted(source.lengths)


def test_a_broken_row_is_named_before_the_run_starts(tmp_path: Path) -> None:
    (problem,) = own(tmp_path, *sums(tmp_path, '{"question": "a"}')).problems
    assert problem.startswith(f"{tmp_path}/sums.jsonl:41: there is no column 'answer', which environment.sources.0.answer names")
    (problem,) = own(tmp_path, *sums(tmp_path, '{"question": ')).problems
    assert problem.startswith(f"{tmp_path}/sums.jsonl:41: expected a JSON object")


def test_a_row_without_a_text_to_compare_with_is_named_where_replies_are_compared(tmp_path: Path) -> None:
    sources = [sums(tmp_path)[0].replace("answer='answer', heldout=8", "heldout=0")]
    (problem,) = own(tmp_path, *sources).problems
    assert (
        problem.startswith(f"{tmp_path}/sums.jsonl:1: task 0 of sums holds 0 in field 'answer'") and "name its column as answer" in problem
    )
    assert not own(tmp_path, *sources, "environment.entry=examples.own_environment:spell_with_a_hint").problems


def test_ids_that_are_there_twice_are_named_with_both_places(tmp_path: Path) -> None:
    sources = sums(tmp_path, json.dumps({"question": "again", "answer": 14}))[0].replace("heldout=8", "id='answer'")
    (problem,) = own(tmp_path, sources).problems
    assert f"{tmp_path}/sums.jsonl:41: column 'answer' is '14', as at {tmp_path}/sums.jsonl:8" in problem


def test_prompts_that_leave_no_room_are_counted(tmp_path: Path) -> None:
    found = own(tmp_path, *sums(tmp_path, json.dumps({"question": "a" * 300, "answer": "b"})), "environment.sources.0.heldout=0")
    assert not found.problems and "1 of 41 prompts of sums that were measured have 256 tokens or more" in found.notes[0]


def test_rows_beyond_the_time_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "LOOKING_SECONDS", 0.0)
    found = own(tmp_path, *sums(tmp_path, rows=1500), "environment.sources.0.heldout=0")
    assert not found.problems and "of sums the first 1,000 of 1,500 rows were looked at" in found.notes[0]


def test_a_broken_conversation_of_the_warm_start_is_named(tmp_path: Path) -> None:
    data = tmp_path / "chats.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    (problem,) = own(tmp_path, *sums(tmp_path), f"warm_start.data={data}").problems
    assert problem.startswith(f"{data}:1: there is no message of the assistant")


def test_adapters_of_a_mixture_are_said_not_to_reach_its_experts(tmp_path: Path, model: Path) -> None:
    write_byte_tokenizer(tmp_path / "mixture")
    save_model(tiny_mixture("qwen3_moe"), tmp_path / "mixture")
    (note,) = [note for note in look(tmp_path, f"model.path={tmp_path / 'mixture'}", "lora.rank=4").notes if "[lora]" in note]
    assert "does not reach the 8 experts of each layer" in note
    for words in ([f"model.path={tmp_path / 'mixture'}"], [f"model.path={model}", "lora.rank=4"]):
        assert not any("[lora]" in note for note in look(tmp_path, *words).notes)

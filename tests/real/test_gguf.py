"""A GGUF file where a model folder is asked for, in commands as users give them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from tests.models.ggufs import tiny_llama, write_gguf

from .processes import CONFIG, ENVIRON, Command, free_port, steps


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "small.toml").write_text(CONFIG)
    write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    yield tmp_path


def folders(place: Path) -> list[Path]:
    """What stands beside the file, hidden or not."""
    return sorted(path for path in place.iterdir() if "tiny.gguf" in path.name and path.is_dir())


def done(*arguments: object, folder: Path, status: int = 0, largest_file: int | None = None) -> str:
    command = Command(*arguments, folder=folder, largest_file=largest_file)
    assert command.wait() == status, command.said
    return command.said


def test_a_file_is_converted_once_and_again_when_it_has_changed(place: Path) -> None:
    said = done("check-model", "tiny.gguf", folder=place)
    assert said.count("converting tiny.gguf into the model folder tiny.gguf.folder-") == 1
    assert [line.split(":")[0] for line in said.splitlines() if "right" in line] == ["trainer", "engine", "export"]
    first = folders(place)
    assert len(first) == 1
    (place / "tiny.gguf").touch()
    assert "converting" not in done("doctor", "tiny.gguf", folder=place) and folders(place) == first
    write_gguf(place / "tiny.gguf", tiny_llama(seed=1))
    assert "converting" in done("check-model", "tiny.gguf", folder=place)
    assert len(folders(place)) == 2 and first[0] in folders(place)


def test_a_run_begins_from_a_file_and_its_teacher_may_be_one(place: Path) -> None:
    write_gguf(place / "teacher" / "tiny.gguf", tiny_llama(seed=1))
    sets = ("model.path=tiny.gguf", "distillation.teacher=teacher/tiny.gguf", "run.steps=1")
    done("train", "small.toml", "--folder", "run", *[x for one in sets for x in ("--set", one)], folder=place)
    assert len(steps(place / "run")) == 1
    assert f'path = "{folders(place)[0].name}"' in (place / "run" / "config.toml").read_text()
    assert (place / "run" / "model" / "tokenizer.json").read_text() == (folders(place)[0] / "tokenizer.json").read_text()
    score = done("evaluate", "tiny.gguf", "--config", "small.toml", "--folder", "score", folder=place)
    assert "converting" not in score and "spell_backward: " in score


@pytest.mark.parametrize("spoiled", ["cut", "odd"])
def test_a_file_that_is_no_model_is_refused_in_one_sentence_and_leaves_nothing(place: Path, spoiled: str) -> None:
    file = place / "tiny.gguf"
    if spoiled == "cut":
        file.write_bytes(file.read_bytes()[:-1000])
    else:
        write_gguf(file, tiny_llama(), architecture="oddball")
    for command in (
        ("check-model", "tiny.gguf"),
        ("serve", "--model", "tiny.gguf"),
        ("train", "small.toml", "--set", "model.path=tiny.gguf"),
    ):
        said = done(*command, folder=place, status=2)
        assert "Traceback" not in said and said.count("midflight: reading 'tiny.gguf': ") == 1, said
        assert {"cut": "copy or fetch it again", "odd": "'oddball'"}[spoiled] in said
    assert folders(place) == []


def test_a_disk_that_is_full_while_weights_are_written_leaves_nothing(place: Path) -> None:
    """The file has 300 KB of weights; whatever is larger than 100 KB is not written."""
    said = done("check-model", "tiny.gguf", folder=place, status=2, largest_file=100_000)
    assert "there is no more room for its model folder; free some space" in said and "Traceback" not in said
    assert folders(place) == []


def test_a_conversion_that_is_killed_leaves_no_model_and_the_next_removes_what_it_left(place: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from midflight.models.gguf_folders import convert; convert(Path('tiny.gguf'), Path('model'))"
    )
    command = subprocess.Popen([sys.executable, "-c", program], cwd=place, env=ENVIRON, start_new_session=True)
    with contextlib.suppress(ProcessLookupError):
        while not list(place.glob(".model.part-*/*.json")):
            assert command.poll() is None, "it ended before it wrote anything"
            time.sleep(0.01)
        os.killpg(command.pid, signal.SIGKILL)
    assert command.wait(10) == -signal.SIGKILL
    assert not (place / "model").exists() and len(list(place.glob(".model.part-*"))) == 1
    subprocess.run([sys.executable, "-c", program], cwd=place, env=ENVIRON, check=True)
    assert (place / "model" / "config.json").is_file() and not list(place.glob(".model.part-*"))


def test_a_served_file_answers(place: Path) -> None:
    port = free_port()
    command = Command("serve", "--model", "tiny.gguf", "--port", port, folder=place)
    try:
        command.until(lambda: "ready: " in command.said, "announcement of the address")
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        answer = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}], max_tokens=4)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len("SuserNhiENSassistantN")  # three special tokens, line breaks, and a token for each letter
    finally:
        command.end()

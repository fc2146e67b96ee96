"""A teacher in a process of its own, beside `midflight rollouts`: its scores in batches and by the route, and its death."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from midflight.models.creation import make_model
from midflight.models.load import save_model
from midflight.text.byte_tokenizer import write_byte_tokenizer

from .processes import CONFIG, Command, alive, gone


def made(folder: Path, *, num_layers: int) -> Path:
    """Made here: a command takes seconds to start."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_layers": num_layers, "num_heads": 2, "num_kv_heads": 1, "max_context": 64}
    folder.mkdir()
    save_model(make_model(vocab_size=262, seed=num_layers, dtype="float32", **sizes), folder)
    write_byte_tokenizer(folder)
    return folder


def kill_teacher(command: Command) -> int:
    """The engine process that writes the teacher's log."""
    pid = next(pid for pid in command.parts()["engine"] if Path(f"/proc/{pid}/fd/2").readlink().name == "teacher.log")
    os.kill(pid, signal.SIGKILL)
    return pid


def post(endpoint: dict[str, Any], route: str, body: object) -> Any:
    request = urllib.request.Request(f"{endpoint['url']}/midflight/v1/{route}", data=json.dumps(body).encode(), method="POST")
    request.add_header("authorization", f"Bearer {endpoint['control_token']}")
    request.add_header("accept", "application/json")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def scores(model: Any, row: Sequence[int], *, temperature: float) -> list[float]:
    ids = torch.tensor([row])
    with torch.no_grad():
        logprobs = (model(input_ids=ids).logits[0].double() / temperature).log_softmax(-1)
    return [0.0, *logprobs[:-1].gather(-1, ids[0, 1:, None])[:, 0].tolist()]


def test_a_batch_has_the_teachers_scores_also_after_its_death_and_any_rows_may_be_asked(tmp_path: Path) -> None:
    student, teacher = made(tmp_path / "student", num_layers=1), made(tmp_path / "teacher", num_layers=2)
    (tmp_path / "small.toml").write_text(CONFIG)
    sets = (f"model.path={student}", f"distillation.teacher={teacher}", "environment.temperature=0.8", "environment.max_tokens=6")
    run = tmp_path / "run"
    command = Command("rollouts", "small.toml", "--folder", run, *(w for one in sets for w in ("--set", one)), folder=tmp_path)
    model = AutoModelForCausalLM.from_pretrained(teacher).eval()
    try:
        command.until(lambda: (run / "endpoint.json").exists(), "endpoint.json")
        endpoint = json.loads((run / "endpoint.json").read_text())
        check_scores(model, post(endpoint, "take", {"train_version": 0}))
        post(endpoint, "done", {"lease": 1, "version": 1})

        killed = kill_teacher(command)
        check_scores(model, post(endpoint, "take", {"train_version": 1}))
        assert not alive(killed) and "teacher is started again" in command.said and "engine0 is started" not in command.said

        rows = [[104, 101, 108, 108, 111], [33]]
        told = post(endpoint, "score", {"rows": rows})["logprobs"]
        assert told == [pytest.approx(scores(model, row, temperature=0.8), abs=1e-5) for row in rows]
        with pytest.raises(urllib.error.HTTPError, match="400") as refused:
            post(endpoint, "score", {"rows": [[262]]})
        assert "token id 262" in refused.value.read().decode()
        parts = [pid for found in command.parts().values() for pid in found]
    finally:
        command.end()
    assert gone(parts, seconds=5)


def check_scores(model: Any, batch: dict[str, Any]) -> None:
    assert batch["rows"]
    for row in batch["rows"]:
        assert row["teacher_logprobs"] == pytest.approx(scores(model, row["token_ids"], temperature=0.8), abs=1e-5)
        assert row["teacher_logprobs"] != pytest.approx(row["logprobs"], abs=1e-3)


def test_a_teacher_of_another_vocabulary_is_said_before_anything_starts(tmp_path: Path) -> None:
    teacher = made(tmp_path / "teacher", num_layers=1)
    sizes = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps({**sizes, "vocab_size": 200}))
    (tmp_path / "small.toml").write_text(CONFIG)
    command = Command("train", "small.toml", "--set", f"distillation.teacher={teacher}", folder=tmp_path)
    assert command.wait() == 2
    assert "a vocabulary of 200 tokens, fewer than the student's 262" in command.said and not (tmp_path / "runs").exists()

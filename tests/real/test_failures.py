"""I9: what goes wrong is said once, at once, to the reader who can mend it, with the right exit status. Real processes."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.models.zoo import tiny

from midflight.text.byte_tokenizer import write_byte_tokenizer

from .processes import CONFIG, Command, alive, without_waiting

MODULES = {
    "broken.py": "raise ValueError('half written')\n",
    "failing.py": "async def solve(task, client):\n    raise LookupError('no key for ' + task.source)\n",
    "odd.py": (
        "import math\n"
        "async def solve(task, client):\n"
        "    answer = await client.completions.create(model='policy', prompt='x', max_tokens=2)\n"
        "    n = sum(map(ord, answer.choices[0].text)) % 6\n"
        "    return task.data['absent'] if n == 0 else [0.5, 0.5, 1.0, math.nan, 'yes'][n - 1]\n"
    ),
}


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    (tmp_path / "small.toml").write_text(CONFIG)
    for name, text in MODULES.items():
        (tmp_path / name).write_text(text)
    started: list[Command] = []

    def start(*sets: str, folder: str = "run", largest_file: int | None = None) -> Command:
        overrides = [x for one in sets for x in (["--set", one] if "=" in one else [one])]
        started.append(
            Command(
                "train", "small.toml", "--folder", folder, "--set", "run.steps=3", *overrides, folder=tmp_path, largest_file=largest_file
            )
        )
        return started[-1]

    yield start
    for command in started:
        command.end()


def check_one_message(command: Command, status: int, *words: str) -> None:
    """Exit status, one message on standard error with these words, and no traceback. On a busy machine lines before it say what takes so long."""
    assert command.wait() == status, command.said
    errors = without_waiting(command.errors.read_text())
    assert errors.startswith("midflight: ") and errors.count("midflight: ") == 1, errors
    for word in words:
        assert word in errors, errors
    assert "Traceback" not in command.said


def test_an_environment_that_cannot_be_imported_is_said_before_any_training(train: Callable[..., Command]) -> None:
    warm = ("warm_start.target_accuracy=1.0", "warm_start.max_steps=100000")
    check_one_message(train("environment.entry=broken:solve", *warm), 2, "broken", "ValueError: half written", "mend that module")


def test_an_unknown_environment_is_said_with_the_names_that_there_are(train: Callable[..., Command]) -> None:
    check_one_message(train("environment.entry=failing:slove"), 2, "'slove'", "Did you mean 'solve'?")


def test_an_environment_that_always_fails_ends_the_run_with_its_error_and_without_restarts(train: Callable[..., Command]) -> None:
    command = train("environment.entry=failing:solve")
    check_one_message(command, 1, "groups in a row got no reward", "no key for spell_backward", "mend the environment")
    assert "restarts are left" not in command.said


def test_i10_odd_rewards_and_missing_fields_cost_their_rollouts_are_shown_and_the_run_goes_on(
    train: Callable[..., Command], tmp_path: Path
) -> None:
    command = train("environment.entry=odd:solve", "rollout.retries=0")
    assert command.wait() == 0, command.said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["failed_rollouts"] > 0 and summary["steps"] == 3 and summary["failed_requests"] == 0
    assert summary["sources"]["spell_backward"]["reward"] >= 0.5, "a failure never lowers a reward"
    check_what_a_start_says(command)
    check_failures_are_shown(command, tmp_path / "run")


def check_what_a_start_says(command: Command) -> None:
    """In a few lines, the notes among them."""
    opening = command.said.partition("gateway: http://127.0.0.1:")[0].splitlines()
    for place, words in enumerate(
        ("small: 3 steps", "model: ", "tasks: spell_backward", "staleness: no trained token is older than 4", "loss = ")
    ):
        assert opening[place].startswith(words), opening
    assert "folder: run, with numbers in metrics.jsonl and what the parts print in run/logs" in opening
    assert any(line.startswith("note: warm_start.target_accuracy is not set") for line in opening) and len(opening) < 20


def check_failures_are_shown(command: Command, folder: Path) -> None:
    """By class, with the first line of the user's own code, on the terminal, in the journal and in the summary; the traceback in the log."""
    said = [line for line in command.said.splitlines() if line.startswith("alarm: a rollout of spell_backward got no reward")]
    assert len(said) == 2 and "KeyError: 'absent'" in "".join(said) and "BadReward: scoring task" in "".join(said)
    assert "odd.py:5 in solve: return task.data['absent']" in command.said and "the whole traceback: run/logs/rollout.log" in command.said
    assert "Traceback" not in command.said and "KeyError: 'absent'" in (folder / "logs" / "rollout.log").read_text()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {line["name"] for line in lines if line["kind"] == "alarm"} >= {"failure", "failures", "evaluation_incomplete"}
    counted = Counter[str]()
    for line in lines:
        counted.update(line.get("failures", {}))
    assert set(counted) == {"KeyError", "BadReward"}
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary["failures"]) == {"KeyError", "BadReward"} and summary["sources"]["spell_backward"]["incomplete"]
    assert "Do not compare it with other scores." in command.said and "failed by" in command.said
    assert summary["loss"][0].startswith("loss = ") and summary["notes"] and "spread" in command.said


def test_a_port_that_is_taken_and_a_folder_that_cannot_be_written_are_named(train: Callable[..., Command], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        check_one_message(train(f"gateway.port={port}"), 2, f"127.0.0.1:{port}", "gateway.port")
    (tmp_path / "file").write_text("")
    check_one_message(train(folder="file/run"), 2, "file/run", "run.folder")


def test_a_model_that_is_missing_or_damaged_is_named(train: Callable[..., Command], tmp_path: Path) -> None:
    check_one_message(train("model.path=nowhere"), 2, "nowhere")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    sizes = {"vocab_size": 262, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 128}
    (damaged / "config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **sizes}))
    (damaged / "model.safetensors").write_bytes(b"not a model")
    check_one_message(train("model.path=damaged"), 2, "damaged")


def test_a_model_whose_own_forward_raises_is_said_with_the_error_and_the_remedy(train: Callable[..., Command], tmp_path: Path) -> None:
    model = tiny("gptj")
    model.config.rotary_dim = 64  # heads have 8
    write_byte_tokenizer(tmp_path / "raises")
    model.save_pretrained(tmp_path / "raises")
    check_one_message(train("model.path=raises", "model.max_context=64"), 2, "GPTJForCausalLM's own forward", "raises RuntimeError: The size of tensor",
                      "Correct its config.json")  # fmt: skip
    served = Command("serve", "--model", tmp_path / "raises", "--port", "0", folder=tmp_path / "served")
    try:
        check_one_message(served, 2, "GPTJForCausalLM's own forward", "raises RuntimeError: The size of tensor", "Correct its config.json")
    finally:
        served.end()


def test_a_crash_shows_its_traceback_within_a_second_and_a_damaged_checkpoint_is_said_and_gone_back_from(
    train: Callable[..., Command], tmp_path: Path
) -> None:
    endless = ("run.steps=100000", "trainer.checkpoint_every=1", "run.restarts=0")
    command = train(*endless)
    latest = tmp_path / "run" / "checkpoints" / "latest"
    command.until(lambda: latest.exists() and len(list(latest.parent.glob("version-*"))) > 1, "two checkpoints")
    parts = [pid for found in command.parts().values() for pid in found]
    check_refused_beside(command, train(*endless, "--overwrite"))  # one after the other: they write into the same files
    check_refused_beside(command, train(*endless, "--resume"))
    killed = time.monotonic()
    command.kill("rollout")
    assert command.wait(10) == 1
    assert time.monotonic() - killed < 5
    assert "rollout ended with signal SIGKILL" in command.errors.read_text()
    assert not [pid for pid in parts if alive(pid)]
    assert (tmp_path / "run" / "config.toml").exists() and not (tmp_path / "run" / "lock").exists()

    weights = latest.parent / latest.read_text().strip() / "rank-00000.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    check_one_message(train(*endless), 2, "a run that can go on", "--resume", "--overwrite")
    resumed = train(*endless, "--resume")
    resumed.until(lambda: "training  step" in resumed.said, "training")
    assert "does not match the hash" in resumed.said and "goes on from version-" in resumed.said
    assert (latest.parent / f"abandoned-{weights.parent.name}").is_dir()


def check_refused_beside(running: Command, other: Command) -> None:
    """Another run in the folder of one that lives."""
    check_one_message(other, 2, f"in use by process {running.process.pid}")
    assert running.process.poll() is None


def test_a_full_disk_ends_the_run_with_its_message_and_without_restarts(train: Callable[..., Command], tmp_path: Path) -> None:
    """A file may have as many bytes as the model, and not those of its checkpoint or of the store: whichever comes first is named."""
    command = train("trainer.checkpoint_every=1", "weights.transport=pull", largest_file=100_000)
    check_one_message(command, 1, "Writing ")
    assert "restarts are left" not in command.said

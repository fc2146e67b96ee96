"""`Trainer` as a script, a thread and a callback use it: real processes, and the smallest model that there is."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from tests.real.processes import Command, gone

SMALL = """
import sys, threading
from midflight import Trainer
from midflight.errors import ConfigError

SMALL = {
    "model": {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "max_context": 64},
    "environment": {"max_tokens": 6, "workers": 1, "top_p": 0.9, "sources": [
        {"dataset": "spell_backward", "size": 100, "heldout": 4, "prompt": "reverse {word}", "content": "word", "only": "[a-z]+",
         "options": {"min_word_len": 3, "max_word_len": 5}}]},
    "rollout": {"groups_per_step": 2, "group_size": 2},
    "trainer": {"checkpoint_every": 2},
}
half = 0.5

async def agent(task, client):
    messages = [{"role": "user", "content": task.data["question"]}]
    reply = await client.chat.completions.create(model="policy", messages=messages)
    return half * len(set(reply.choices[0].message.content or ""))
"""


def started(folder: Path, body: str) -> Command:
    folder.mkdir()
    (folder / "program.py").write_text(SMALL + body)
    return Command(folder=folder, module="program")


def program(folder: Path, body: str) -> dict[str, object]:
    """Runs it, and returns what it printed last, as JSON."""
    command = started(folder, body)
    try:
        assert command.wait(90) == 0, command.said
    finally:
        command.end()
    return json.loads(command.output.read_text().splitlines()[-1])


def test_a_script_without_a_guard_trains_hears_its_run_stops_it_and_goes_on(tmp_path: Path) -> None:
    said = program(
        tmp_path / "script",
        """
import json
heard = []
def step(line):
    heard.append(line.step)
    if line.step == 3 and heard.count(3) == 1:
        trainer.stop()
trainer = Trainer(environment=agent, steps=40, folder="run", config=SMALL, on_step=step,
                  on_evaluation=lambda line: heard.append("evaluation"), on_checkpoint=lambda line: heard.append("checkpoint"),
                  on_end=lambda summary: heard.append("end"))
stopped = trainer.train()
try:
    trainer.train()
    refused = ""
except ConfigError as error:
    refused = str(error)
summary = trainer.train(resume=True)
rollouts = list(trainer.rollouts())
print(json.dumps({
    "heard": heard, "stopped": stopped.steps, "refused": refused, "steps": summary.steps,
    "metrics": [line.step for line in trainer.metrics()],
    "rewards": sorted({rollout.reward % 0.5 for rollout in rollouts}), "tokens": max(rollout.num_tokens for rollout in rollouts),
    "wrote": {said.generated for said in rollouts[0].conversation} == {True, False},
}))
""",
    )
    heard = said["heard"]
    assert isinstance(heard, list) and heard[0] == "evaluation" and heard.count("end") == 2 and heard[-1] == "end"
    assert "checkpoint" in heard and [word for word in heard if word in (1, 2, 3)][:3] == [1, 2, 3]
    assert isinstance(said["stopped"], int) and 3 <= said["stopped"] < 40
    assert "run that can go on" in str(said["refused"]) and "resume=True" in str(said["refused"]) and "--" not in str(said["refused"])
    assert said["steps"] == 40 and said["metrics"] == list(range(1, 41))
    assert said["rewards"] == [0.0] and said["tokens"] == 6 and said["wrote"]


def test_an_interrupted_script_ends_its_run_in_order_and_leaves_nothing_running(tmp_path: Path) -> None:
    command = started(tmp_path / "script", 'Trainer(environment=agent, steps=500, folder="run", config=SMALL, progress=False).train()')
    try:
        journal = tmp_path / "script" / "run" / "metrics.jsonl"
        command.until(lambda: journal.exists() and b'"kind":"step"' in journal.read_bytes(), "first step")
        left = [pid for found in command.parts().values() for pid in found]
        command.process.send_signal(signal.SIGINT)
        assert command.wait(30) != 0 and "KeyboardInterrupt" in command.said
        assert len(left) == 4 and gone(left, seconds=5)
        assert json.loads((journal.parent / "summary.json").read_text())["steps"] >= 1
    finally:
        command.end()


def test_a_run_goes_on_beside_its_program_and_an_error_of_a_callback_ends_it(tmp_path: Path) -> None:
    said = program(
        tmp_path / "beside",
        """
import json
def fail(line):
    raise ValueError(f"step {line.step} was not liked")
trainer = Trainer(environment=agent, steps=50, folder="run", config=SMALL, on_step=fail, progress=False).start()
try:
    trainer.train()
    refused = ""
except ConfigError as error:
    refused = str(error)
steps = [line.step for line in trainer.metrics()]
try:
    trainer.wait()
    error = ""
except ValueError as raised:
    error = str(raised)
print(json.dumps({"refused": refused, "steps": steps, "error": error, "running": trainer.running}))
""",
    )
    assert "trains already" in str(said["refused"])
    assert isinstance(said["steps"], list) and said["steps"][0] == 1 and len(said["steps"]) < 50
    assert said["error"] == "step 1 was not liked" and said["running"] is False

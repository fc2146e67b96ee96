"""A notebook, as nbclient executes it: in a kernel whose event loop runs already."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]

FIRST = """
from midflight import Trainer
from midflight.errors import ConfigError

reward_of_nothing = 0.25

async def agent(task, client):
    messages = [{"role": "user", "content": task.data["question"]}]
    reply = await client.chat.completions.create(model="policy", messages=messages)
    return reward_of_nothing + len(set(reply.choices[0].message.content or ""))

config = {
    "model": {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "max_context": 64},
    "environment": {"max_tokens": 6, "workers": 1, "sources": [
        {"dataset": "spell_backward", "size": 100, "heldout": 4, "prompt": "reverse {word}", "content": "word", "only": "[a-z]+",
         "options": {"min_word_len": 3, "max_word_len": 5}}]},
    "rollout": {"groups_per_step": 2, "group_size": 2},
}
"""
TRAINED = """
heard = []
trainer = Trainer(environment=agent, steps=2, folder="run", config=config, on_step=lambda line: heard.append(line.step))
summary = trainer.train()
print("steps", summary.steps, heard)
"""
AGAIN = """
try:
    Trainer(environment=agent, steps=2, folder="run", config=config).train()
except ConfigError as error:
    print("refused:", error)
print("again", Trainer(environment=agent, steps=1, folder="run", config=config, overwrite=True).train().steps)
"""
LIVE = """
rows = [{"question": f"{a} + {b} =", "answer": str(a + b)} for a in range(20) for b in range(10)]
bonus = 0.5

def near(completions, answer):
    return [bonus * -abs(len(completion) - len(right)) for completion, right in zip(completions, answer)]

def add(a: int, b: int) -> int:
    'Adds two numbers.'
    return a + b

own = {"model": config["model"] | {"max_context": 1024}, "environment": {"max_tokens": 6}, "rollout": config["rollout"]}
live = Trainer(data=rows, prompt="{question}", rewards=[(near, 2.0)], tools=[add], steps=3, folder="live", config=own).start()
print("live", [line.step for line in live.metrics()], live.wait().steps)
print("frame", list(live.frame().index), live.frame()["train/grad_norm"].notna().all())
"""


@pytest.fixture
def kernel(tmp_path: Path) -> Any:
    """With this interpreter, whatever kernels are installed."""
    manager = AsyncKernelManager()
    manager._kernel_spec = KernelSpec(
        argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], env={"PYTHONPATH": str(ROOT / "src")}
    )
    return manager


def test_cells_train_show_the_run_and_are_run_again(tmp_path: Path, kernel: Any) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in (FIRST, TRAINED, AGAIN, LIVE)])
    NotebookClient(notebook, timeout=200, km=kernel, resources={"metadata": {"path": str(tmp_path)}}).execute()
    _, trained, again, live = ["".join(output.get("text", "") for output in cell.outputs) for cell in notebook.cells]
    assert "steps 2 [1, 2]" in trained
    assert "2 steps, each on 2 groups" in trained and "held-out spell_backward" in trained  # it was shown there
    assert "refused: run holds a finished run" in again and "overwrite=True" in again and "again 1" in again
    assert "live [1, 2, 3] 3" in live and "frame [1, 2, 3] True" in live

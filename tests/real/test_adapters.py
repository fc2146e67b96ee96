"""Games of gymnasium and textarena, and tasks of Harbor, are played and trained: real processes."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest

from .adapted import adapted
from .processes import steps

MOVES = """
def read(said):
    return sum(map(ord, said)) % 2
"""
BLACKJACK = """
entry = "midflight.adapters.gymnasium:play"
max_tokens = 4
[[environment.sources]]
entry = "midflight.adapters.gymnasium:tasks"
content = "seed"
heldout = 4
options = { env = "Blackjack-v1", size = 60, read = "moves:read", max_turns = 20 }
"""
GUESSES = """
entry = "midflight.adapters.textarena:play"
max_tokens = 8
[[environment.sources]]
entry = "midflight.adapters.textarena:tasks"
content = "seed"
heldout = 4
options = { env = "GuessTheNumber-v0-raw", size = 60, max_turns = 12 }
"""
HARBOR = """
entry = "midflight.adapters.harbor:play"
max_tokens = 4
[[environment.sources]]
entry = "midflight.adapters.harbor:tasks"
content = "key"
heldout = 2
options = { path = "tasks", agent = "elsewhere:work" }
[gateway]
port = PORT
public_url = "http://localhost:PORT"
"""
ELSEWHERE = """
async def work(task, client, box):
    assert client.public_url.startswith("http://localhost:") and "localhost" not in str(client.base_url), client.public_url
    elsewhere = client.with_options(base_url=client.public_url)
    said = await elsewhere.chat.completions.create(model="policy", messages=task.messages)
    await box.run(["tee", "answer"], stdin=said.choices[0].message.content or "")
"""
EVEN = """
sum=$(cksum < /app/answer | cut -d' ' -f1)
echo "{\\"even\\": $((1 - sum % 2)), \\"given\\": $(cat /app/given)}" > /logs/verifier/reward.json
"""


def test_a_game_of_gymnasium_is_trained_with_a_reward_for_each_answer(tmp_path: Path) -> None:
    (tmp_path / "moves.py").write_text(MOVES)
    summary = adapted(tmp_path, BLACKJACK)
    measured = [step for step in steps(tmp_path / "run") if step["rollouts"]]
    assert measured and all(step["components"]["game"] == pytest.approx(step["reward"]) for step in measured)
    assert -1 <= summary["heldout_after"] <= 1


def test_a_game_of_textarena_is_trained(tmp_path: Path) -> None:
    summary = adapted(tmp_path, GUESSES)
    assert summary["heldout_after"] == 0.0  # two answers without a number end a game
    measured = [step for step in steps(tmp_path / "run") if step["rollouts"]]
    assert measured and all(step["metrics"]["game/spoilt"] == 1.0 for step in measured)


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bubblewrap")
def test_tasks_of_harbor_are_trained_with_what_their_tests_give_to_an_agent_that_asks_by_the_public_address(tmp_path: Path) -> None:
    for number in range(12):
        task = tmp_path / "tasks" / str(number)
        for name in ("environment", "tests"):
            (task / name).mkdir(parents=True)
        (task / "task.toml").write_text("")
        (task / "instruction.md").write_text(f"Say something about {number}.")
        (task / "environment" / "given").write_text("0.5")
        (task / "environment" / "Dockerfile").write_text("FROM ubuntu\nWORKDIR /app\nCOPY given .\n")
        (task / "tests" / "test.sh").write_text(EVEN)
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    adapted(tmp_path, HARBOR.replace("PORT", port), seconds=270)
    measured = [step for step in steps(tmp_path / "run") if step["rollouts"]]
    assert measured and all(step["components"]["given"] == 0.5 for step in measured)
    assert all(step["reward"] == pytest.approx(step["components"]["even"] + 0.5) for step in measured)
    assert any(0 < step["components"]["even"] < 1 for step in measured)

"""`midflight init`: a project to start one's own from, with data, rewards, an environment and a
test. It trains as it is.
"""

import json
import random
from pathlib import Path

NUM_PROBLEMS = 200
SHORT = "{name} has {a} {thing} and gets {b}. How many?"
WHOLE = "{name} has {a} {thing} and gets {b} more {thing}. How many {thing} does {name} have now?"
"""The wording for a model that has learnt its language from people, because people leave less
out.
"""


def word_problems(count: int = NUM_PROBLEMS, *, wording: str = SHORT) -> list[dict[str, str | int]]:
    """Returns sums in words, each once and always the same, such as `Ann has 3 nuts and gets 4. How
    many?`.
    """
    every = [
        (wording.format(name=name, a=a, thing=thing, b=b), a + b)
        for name in ("Ann", "Ben", "Eva", "Kim", "Tom")
        for thing in ("eggs", "keys", "nuts", "pens")
        for a in range(1, 7)
        for b in range(1, 7)
    ]
    return [
        {"question": question, "answer": answer}
        for question, answer in random.Random(0).sample(every, count)
    ]


def write_project(folder: Path) -> list[str]:
    """Writes the project, and returns the names of its files. The folder is empty, or not there
    yet.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tasks = "".join(json.dumps(row) + "\n" for row in word_problems())
    files = {
        "run.toml": RUN,
        "tasks.jsonl": tasks,
        "rewards.py": REWARDS,
        "environment.py": ENVIRONMENT,
        "test_project.py": TEST,
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    return list(files)


RUN = """\
# midflight train run.toml               trains; here, because the paths below are relative
# midflight train run.toml --dry-run     shows what that means, with counts and one prompt as tokens

[run]
name = "mine"
folder = "runs/mine"
steps = 100

# A small model with random weights. Your own: path = "FOLDER", without the sizes.
[model]
hidden_size = 128
num_layers = 3
max_context = 96

[[environment.sources]]
path = "tasks.jsonl"
prompt = "{question}"
answer = "answer"
heldout = 40

[[environment.rewards]]
entry = "rewards:correct"

[[environment.rewards]]
entry = "rewards:brief"
weight = 0.1

[environment]
max_tokens = 6
# An environment of your own in place of the rewards, for more than one question and its answer:
# entry = "environment:solve"

# A model of random weights first learns what an answer looks like. One that is trained already needs none of this.
[warm_start]
target_accuracy = 0.3
evaluate_every = 5

[trainer]
learning_rate = 3e-4
"""

REWARDS = '''\
"""Rewards of run.toml. A function gets what its parameters name: the row's columns, `completion`, `messages` or `task`."""


def correct(completion: str, answer: str) -> float:
    """1 for the number that was asked for and nothing else."""
    return float(completion.strip() == answer)


def brief(completion: str) -> float:
    """1 for an answer that is a number at all."""
    return float(completion.strip().isdigit())
'''

ENVIRONMENT = '''\
"""An environment of one's own: any code that talks to the model and returns a reward."""

from midflight import Client, Task, environment


@environment
async def solve(task: Task, client: Client) -> float:
    """Asks again when the first answer was wrong; the second is worth half."""
    messages = list(task.messages)
    for reward in (1.0, 0.5):
        reply = await client.chat.completions.create(model="policy", messages=messages)
        said = reply.choices[0].message.content or ""
        if said.strip() == task.data["answer"]:
            return reward
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Wrong."}]
    return 0.0
'''

TEST = '''\
"""What is ours in this project: `python -m pytest`."""

import asyncio
from types import SimpleNamespace

import environment
import rewards
from midflight import Task, load_config


def test_the_rewards_tell_right_from_wrong():
    assert (rewards.correct(" 7\\n", "7"), rewards.correct("8", "7")) == (1.0, 0.0)
    assert (rewards.brief("8"), rewards.brief("eight")) == (1.0, 0.0)


def test_a_second_answer_is_worth_half():
    replies = iter(["8", "7"])

    async def create(**request):
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=next(replies)))])

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    task = Task("1", "tasks", {"question": "Ann has 3 nuts and gets 4. How many?", "answer": "7"})
    assert asyncio.run(environment.solve(task, client)) == 0.5


def test_the_configuration_is_sound():
    assert load_config("run.toml").environment.sources[0].heldout == 40
'''

"""Asynchronous reinforcement learning for language-model agents.

The public names are below; everything else may change. They are imported when they are first used,
so that `import midflight` costs nothing: configuration and commands never need torch, and only
`Objective` imports it.

| name | what it is |
|---|---|
| `load_config` | a TOML file with overrides, as a checked configuration |
| `Trainer` | a run from a script, a thread or a notebook; docs/python.md |
| `train`, `serve` | what `midflight train` and `midflight serve` do; each returns an exit status |
| `environment` | the decorator that marks a function or class as an environment |
| `sandbox` | where an agent may run code that a model wrote |
| `Task` | one problem: id, source and data |
| `Client` | what an agent talks to: an `openai.AsyncOpenAI`, bound to one session |
| `Reward`, `Result` | what an environment returns: a number, or more than that |
| `Rollout` | the token record of one attempt at a task, with its reward |
| `Engine` | the port that an inference server implements |
| `Objective` | the effective loss of a step |

`__version__` is the version.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, TypeAlias

from midflight.version import __version__ as __version__

if TYPE_CHECKING:
    from midflight.config import load_config
    from midflight.environments.agent_program import environment
    from midflight.environments.clients import Client
    from midflight.environments.sandboxes.choice import sandbox
    from midflight.ports import Engine
    from midflight.python.trainer import Trainer
    from midflight.run.launcher.launch import serve, train
    from midflight.trainer.objective import Objective
    from midflight.types import Result, Task
    from midflight.types import Trajectory as Rollout

Reward: TypeAlias = "float | None"
"""A finite number, or `None` if the rollout cannot be scored: a failure of the infrastructure is
never a reward (I10).
"""

__all__ = [
    "Client",
    "Engine",
    "Objective",
    "Result",
    "Reward",
    "Rollout",
    "Task",
    "Trainer",
    "environment",
    "load_config",
    "sandbox",
    "serve",
    "train",
]

_HOMES = {
    "Client": "midflight.environments.clients:Client",
    "Engine": "midflight.ports:Engine",
    "Objective": "midflight.trainer.objective:Objective",
    "Result": "midflight.types:Result",
    "Rollout": "midflight.types:Trajectory",
    "Task": "midflight.types:Task",
    "Trainer": "midflight.python.trainer:Trainer",
    "environment": "midflight.environments.agent_program:environment",
    "sandbox": "midflight.environments.sandboxes.choice:sandbox",
    "load_config": "midflight.config:load_config",
    "serve": "midflight.run.launcher.launch:serve",
    "train": "midflight.run.launcher.launch:train",
}


def __getattr__(name: str) -> object:
    """Imports a public name from its home, and keeps it."""
    if name not in _HOMES:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    module, _, attribute = _HOMES[name].partition(":")
    value: object = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

"""What a run's agent may be made of, where it is not a function of the user's: reward functions, tools, and servers of tools."""

from typing import Literal

from pydantic import Field, JsonValue

from midflight.config.section import Seconds, Section


class RewardSection(Section):
    """One reward function. Several are added up by their weights."""

    entry: str
    """`module:function`. It gets by the names of its parameters what it needs: `task`, `messages`, `completion`, or a column of the task; docs/environments.md has the list."""
    weight: float = 1.0
    """What its value is multiplied with in the sum; below 0 it is a penalty."""
    name: str = ""
    """What journal, metrics and plot call it. Default: the function's name."""
    options: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """Further arguments of the function, by name."""

    @property
    def label(self) -> str:
        return self.name or self.entry.rpartition(":")[2]


class McpSection(Section):
    """A server of tools that speaks the Model Context Protocol. It has a `command` or a `url`. Needs `pip install 'midflight[mcp]'`."""

    command: tuple[str, ...] = ()
    """Starts it, such as `["python", "server.py"]`; it is spoken to over its standard input and output."""
    url: str = ""
    """Where it is, such as `http://127.0.0.1:8000/mcp`; nothing is started."""
    env: dict[str, str] = Field(default_factory=dict[str, str])
    """What its environment has beside the few variables that every server gets."""
    per: Literal["run", "rollout"] = "run"
    """run: each worker keeps one connection, and with `command` one server, for all its rollouts. rollout: each rollout has its own, which ends with it."""
    start_seconds: Seconds = 30.0
    """How long it may take to come up; larger waits longer for one that hangs."""
    name: str = ""
    """What messages call it. Default: the last word of the command that is no option, or the address."""

    @property
    def label(self) -> str:
        words = [word for word in self.command if not word.startswith("-")]
        return self.name or self.url or (words or [""])[-1]

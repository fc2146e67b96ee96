"""The parts of a run's agent, where it is not a function of the user's: reward functions, servers
of tools, sandboxes, and untracked models.
"""

from typing import Literal

from pydantic import Field, JsonValue

from midflight.config.section import Count, Positive, Seconds, Section

SANDBOXES = ("bubblewrap", "trusted", "docker", "e2b", "daytona", "modal")
"""The kinds of sandboxes that are known by a word."""


class RewardSection(Section):
    """Several functions are added up by their weights."""

    entry: str
    """The reward function, as `module:function`. Its parameters name what it gets
    (docs/environments.md#rewards).
    """
    weight: float = 1.0
    """Its factor in the sum; below 0 it is a penalty."""
    name: str = ""
    """Its name in metrics. Default: the function's."""
    options: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """Further arguments of the function, by name."""

    @property
    def label(self) -> str:
        return self.name or self.entry.rpartition(":")[2]


class McpSection(Section):
    """A server of the Model Context Protocol has a `command` or a `url`, and needs `pip install
    'midflight[mcp]'`.
    """

    command: tuple[str, ...] = ()
    """The command that starts a server over stdio, such as `["python", "server.py"]`."""
    url: str = ""
    """Address of a running server, such as `http://127.0.0.1:8000/mcp`."""
    env: dict[str, str] = Field(default_factory=dict[str, str])
    """Environment variables, beside a few that all get."""
    per: Literal["run", "rollout"] = "run"
    """run: one connection for each worker. rollout: one for each rollout, for servers with state.
    """
    start_seconds: Seconds = 30.0
    """Time for it to come up."""

    @property
    def label(self) -> str:
        """Its name in messages: the address, or the last word of the command that is no option."""
        words = [word for word in self.command if not word.startswith("-")]
        return self.url or (words or [""])[-1]


class SandboxSection(Section):
    """Code that a model wrote runs in this sandbox."""

    kind: str = "bubblewrap"
    """bubblewrap: namespaces of this machine. trusted: as this user, without isolation. docker,
    e2b, daytona, modal: elsewhere (docs/adapters/remote-sandboxes.md). Or your own `module:Class`.
    """
    image: str = ""
    """Image elsewhere, by default `python:3.12-slim`; for e2b a template."""
    seconds: Seconds = 10.0
    """Time of a program; on this machine it begins when a processor is free."""
    start_seconds: Seconds = 300.0
    """Time for a box elsewhere to start, its image pulled."""
    memory_mb: Positive = 512
    """MiB that its processes may hold together."""
    disk_mb: Positive = 64
    """MiB of its files, which lie in memory."""
    processes: Positive = 32
    """Processes and threads at once."""
    network: bool = False
    """Whether it reaches the network. Then programs wait for no processor."""


class UntrackedSection(Section):
    """Judges and simulated users ask this model by `client.untracked()`. It has a `url` or
    `engines`.
    """

    url: str = ""
    """An outside server of the OpenAI API, such as `http://127.0.0.1:8001/v1`."""
    api_key_env: str = ""
    """The environment variable with its key; empty sends none."""
    engines: Count = 0
    """Engines of the run that keep their first weights and answer nothing else."""

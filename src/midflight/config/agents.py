"""The parts of a run's agent, where it is not a function of the user's: reward functions, servers
of tools, sandboxes, and untracked models.
"""

from typing import Literal

from pydantic import Field, JsonValue

from midflight.config.section import Count, Positive, Seconds, Section

SANDBOXES = ("bubblewrap", "trusted", "docker", "e2b", "daytona", "modal")
"""The kinds of sandboxes that are known by a word."""


class RewardSection(Section):
    """One reward function. Several are added up by their weights."""

    entry: str
    """The reward function, as `module:function`. It gets what its parameters name, such as `task`,
    `completion` or a column of the task (docs/environments.md).
    """
    weight: float = 1.0
    """The factor of its value in the sum; below 0 it is a penalty."""
    name: str = ""
    """Its name in journal, metrics and plot. Default: the function's name."""
    options: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """Further arguments of the function, by name."""

    @property
    def label(self) -> str:
        return self.name or self.entry.rpartition(":")[2]


class McpSection(Section):
    """A server of tools that speaks the Model Context Protocol. It has a `command` or a `url`.
    Needs `pip install 'midflight[mcp]'`.
    """

    command: tuple[str, ...] = ()
    """The command that starts it, such as `["python", "server.py"]`, spoken to over its standard
    input and output.
    """
    url: str = ""
    """The address of a server that runs already, such as `http://127.0.0.1:8000/mcp`."""
    env: dict[str, str] = Field(default_factory=dict[str, str])
    """Variables of its environment, beside the few that every server gets."""
    per: Literal["run", "rollout"] = "run"
    """run: each worker keeps one connection for all its rollouts. rollout: each rollout has its
    own, for servers with a state.
    """
    start_seconds: Seconds = 30.0
    """How long it may take to come up."""

    @property
    def label(self) -> str:
        """Its name in messages: the address, or the last word of the command that is no option."""
        words = [word for word in self.command if not word.startswith("-")]
        return self.url or (words or [""])[-1]


class SandboxSection(Section):
    """The sandbox of code that a model wrote: `sandbox` of a reward function, and
    `midflight.sandbox`.
    """

    kind: str = "bubblewrap"
    """bubblewrap: namespaces of this machine, without network and without our files. trusted: as
    this user, with limits and without isolation. docker, e2b, daytona, modal: a container or
    machine of that maker, with the extra of that name. Or `module:Class` of one's own.
    """
    image: str = ""
    """The image of a box elsewhere, by default `python:3.12-slim`; for e2b a template, by default
    its own.
    """
    seconds: Seconds = 10.0
    """Time from its start after which a program is ended. On this machine it starts when a
    processor is free for it: a process runs as many programs at once as it may use processors.
    """
    start_seconds: Seconds = 300.0
    """Time for a box elsewhere to start, with its image pulled."""
    memory_mb: Positive = 512
    """MiB that its processes may hold together."""
    disk_mb: Positive = 64
    """MiB that its files may take together, which are in memory."""
    processes: Positive = 32
    """Processes and threads at once."""
    network: bool = False
    """Whether it reaches the network of the machine on which it runs. Then no program waits for a
    processor, because programs may wait for each other, or for the model.
    """


class UntrackedSection(Section):
    """The model behind `client.untracked()`, for judges and simulated users. Its tokens are neither
    recorded nor trained. It has a `url`, or `engines`.
    """

    url: str = ""
    """A server of the OpenAI API outside the run, such as `http://127.0.0.1:8001/v1`."""
    api_key_env: str = ""
    """The variable of the environment that holds its key; empty sends none."""
    engines: Count = 0
    """Engines of the run that keep the weights they began with and answer nothing else; larger
    leaves fewer for the policy.
    """

"""What a run's agent may be made of, where it is not a function of the user's: reward functions,
tools, and servers of tools.
"""

from typing import Literal

from pydantic import Field, JsonValue

from midflight.config.section import Above0, Count, Positive, Seconds, Section


class RewardSection(Section):
    """One reward function. Several are added up by their weights."""

    entry: str
    """`module:function`. It gets by the names of its parameters what it needs: `task`, `messages`,
    `completion`, or a column of the task; docs/environments.md has the list.
    """
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
    """A server of tools that speaks the Model Context Protocol. It has a `command` or a `url`.
    Needs `pip install 'midflight[mcp]'`.
    """

    command: tuple[str, ...] = ()
    """Starts it, such as `["python", "server.py"]`; it is spoken to over its standard input and
    output.
    """
    url: str = ""
    """Where it is, such as `http://127.0.0.1:8000/mcp`; nothing is started."""
    env: dict[str, str] = Field(default_factory=dict[str, str])
    """What its environment has beside the few variables that every server gets."""
    per: Literal["run", "rollout"] = "run"
    """run: each worker keeps one connection, and with `command` one server, for all its rollouts.
    rollout: each rollout has its own, which ends with it.
    """
    start_seconds: Seconds = 30.0
    """How long it may take to come up; larger waits longer for one that hangs."""
    name: str = ""
    """What messages call it. Default: the last word of the command that is no option, or the
    address.
    """

    @property
    def label(self) -> str:
        words = [word for word in self.command if not word.startswith("-")]
        return self.name or self.url or (words or [""])[-1]


class SandboxSection(Section):
    """Where code that a model wrote runs: `sandbox` of a reward function, and
    `midflight.sandbox`.
    """

    kind: str = "bubblewrap"
    """bubblewrap: namespaces of this machine, without network and without our files; refused where
    the machine has none. trusted: as this user, with limits and without isolation, for code that is
    trusted. docker, e2b, daytona, modal: in a container or machine that its maker's client starts
    and ends (`pip install 'midflight[docker]'`, or the other's name). Or `module:Class` of one's
    own, called with this section, which may run it elsewhere.
    """
    image: str = ""
    """What a box elsewhere is made of: an image of docker, daytona or modal, by default
    `python:3.12-slim`; a template of e2b, by default its own.
    """
    seconds: Seconds = 10.0
    """After which a program is ended; larger waits longer for one that hangs."""
    start_seconds: Above0 = 300.0
    """For a box elsewhere to be there, its image pulled; a fifth of it for each answer of its
    maker. Larger bears slower links, and waits longer for a maker that hangs.
    """
    memory_mb: Positive = 512
    """MiB that its processes may hold together; larger lets it take more."""
    disk_mb: Positive = 64
    """MiB of each folder that it may write to, which are in memory; larger lets it write more."""
    processes: Positive = 32
    """Processes and threads at once; larger lets it start more."""
    output_bytes: Positive = 1_000_000
    """Of its output and of its errors, past which it is ended; larger keeps more."""
    network: bool = False
    """Whether it reaches the network that the machine reaches on which it runs."""


class UntrackedSection(Section):
    """What answers `client.untracked()`: judges and simulated users, whose tokens are neither
    recorded nor trained. A `url`, or `engines`.
    """

    url: str = ""
    """A server of the OpenAI API outside the run, such as `http://127.0.0.1:8001/v1`."""
    api_key_env: str = ""
    """The variable of the environment that holds its key; empty sends none."""
    engines: Count = 0
    """Engines of the run that keep the weights they began with and answer nothing else; larger
    answers sooner, and leaves fewer for the policy.
    """

"""The options of environments and agents, with their checks."""

from collections import Counter
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, JsonValue

from midflight.config.agents import (
    SANDBOXES,
    McpSection,
    RewardSection,
    SandboxSection,
    UntrackedSection,
)
from midflight.config.section import (
    Count,
    Fraction,
    Patience,
    Positive,
    Seconds,
    Section,
    is_address,
)
from midflight.config.sources import SourceSection
from midflight.entries import ENTRY
from midflight.errors import nearest
from midflight.text.template_names import RESERVED
from midflight.types import SamplingParams
from midflight.types.generation import LEAST_TEMPERATURE

CLAIMED = "midflight.environments.claimed:claimed"
"""The entry of rollouts that clients claim over HTTP."""


class EnvironmentSection(Section):
    entry: str | None = None
    """`module:function` of your agent `(task, client) -> reward`, or a class with `reset`. None:
    the built-in loop, or without rewards and tools one answer compared with `answer`.
    """
    rewards: tuple[RewardSection, ...] = ()
    """Functions that score a rollout."""
    tools: tuple[str, ...] = ()
    """Tools of the built-in loop: `module:function`, or `module:Class` with state."""
    mcp: tuple[McpSection, ...] = ()
    """Servers of further tools."""
    sandbox: SandboxSection = SandboxSection()
    """The sandbox of code that the model wrote, for reward functions that have a parameter
    `sandbox`.
    """
    untracked: UntrackedSection = UntrackedSection()
    """The model behind judges and simulated users of an `entry`."""
    max_turns: Positive = 8
    """Most answers of a rollout in the built-in loop."""
    tool_seconds: Seconds = 30.0
    """Deadline of a tool call; past it the model is told so."""
    template_options: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """Variables of the built-in loop's chat template, such as `{ enable_thinking = false }`."""
    workers: Count | None = None
    """Processes that run agents; more help agents that block or compute. Default: half the cores,
    from 2 to 8.
    """
    worker_mb: Positive | None = None
    """MB of a worker's own data, beyond which an agent gets a `MemoryError`."""
    max_processes: Positive | None = None
    """Processes that a rollout in a worker may start before it fails."""
    sources: tuple[SourceSection, ...] = (SourceSection(dataset="spell_backward"),)
    """The sources of tasks. Default: the dataset `spell_backward`."""
    max_tokens: Positive = 16
    """Output tokens of a request unless the agent asks otherwise. Default with `model.path`: a
    quarter of the context, from 16 to 256.
    """
    temperature: Annotated[float, Field(ge=LEAST_TEMPERATURE, le=1000)] = 1.0
    """Sampling temperature of the policy; larger explores more."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens of this probability together."""
    top_k: Positive | None = None
    """Sample from so many of the likeliest tokens."""
    min_p: Fraction = 0.0
    """Sample from tokens at least this likely, relative to the likeliest."""
    rollout_seconds: Patience = 60.0
    """Time that an agent may take by itself, without its requests
    (docs/environments.md#how-long-a-rollout-may-take).
    """
    max_rollout_seconds: Patience | None = None
    """Time of a whole rollout, its requests included. Default: four times the dry run's estimate.
    """

    @property
    def sampling(self) -> SamplingParams:
        """The sampling parameters of a request that gives none."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
        )


def environment_contradictions(
    environment: EnvironmentSection, *, num_engines: int
) -> Iterator[str]:
    """`num_engines` are those that the run starts or attaches."""
    e = environment
    yield from _untracked_contradictions(e.untracked, num_engines)
    for name in sorted(RESERVED & e.template_options.keys()):
        yield f"environment.template_options.{name} is set by the gateway; leave it out"
    kind = e.sandbox.kind
    if kind not in SANDBOXES and not ENTRY.fullmatch(kind):
        yield (
            f"environment.sandbox.kind names {kind!r}, which is no sandbox: there are "
            f"{', '.join(SANDBOXES)}, and `module:Class` of your own.{nearest(kind, SANDBOXES)}"
        )
    entries = {"environment.entry": e.entry}
    for entry in e.tools:
        entries[f"environment.tools ({entry})"] = entry
    for reward in e.rewards:
        entries[f"environment.rewards ({reward.entry}): entry"] = reward.entry
    for option, entry in entries.items():
        if entry is not None and not ENTRY.fullmatch(entry):
            yield f"{option} must be 'module:function', got {entry!r}"
    if e.entry is not None and (e.tools or e.mcp):
        option = "tools" if e.tools else "mcp"
        yield (
            f"environment.entry ({e.entry}) runs the rollouts itself, so environment.{option} "
            "would have nobody to call them; remove one of the two"
        )
    if e.entry == CLAIMED and e.rewards:
        yield (
            "environment.rewards beside rollouts that are claimed: whoever claims one scores it; "
            "remove the rewards"
        )
    if e.entry is None and e.rewards and not any(reward.weight for reward in e.rewards):
        yield (
            "environment.rewards all have the weight 0, so that every reward is 0 and nothing is "
            "learnt; give one of them another weight"
        )
    labels = Counter(reward.label for reward in e.rewards)
    twice = [label for label, count in labels.items() if count > 1]
    if twice:
        yield f"environment.rewards has {twice[0]!r} twice; give one of them another name"
    has_stateful_tool = any(map(_is_class, e.tools))
    if (e.tools or e.mcp) and not e.rewards and not has_stateful_tool:
        yield (
            "environment.tools without environment.rewards leaves rollouts without a reward; "
            "name a function in [[environment.rewards]]"
        )
    for server in e.mcp:
        if bool(server.command) == bool(server.url):
            yield (
                f"environment.mcp ({server.label or 'one'}) needs a command or a url, and not both"
            )


def _is_class(entry: str) -> bool:
    """True if `module:Name` names a class, by its first letter."""
    name = entry.rpartition(":")[2]
    return name[:1].isupper()


def _untracked_contradictions(untracked: UntrackedSection, num_engines: int) -> Iterator[str]:
    u = untracked
    if u.url and u.engines:
        yield "environment.untracked has a url and engines; remove one of the two"
    if u.engines >= num_engines:
        yield (
            f"environment.untracked.engines ({u.engines}) leaves none of {num_engines} engines "
            "for the policy; raise engine.count"
        )
    if u.url and not is_address(u.url):
        yield (
            "environment.untracked.url must be an address such as http://127.0.0.1:8001/v1, got "
            f"{u.url!r}"
        )
    if u.api_key_env and not u.url:
        yield (
            f"environment.untracked.api_key_env ({u.api_key_env}) is for "
            "environment.untracked.url, and there is none; remove it"
        )

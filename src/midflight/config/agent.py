"""The agent that runs the rollouts of `[environment]`, and options of it that contradict each
other.
"""

import re
from collections import Counter
from collections.abc import Iterator

from midflight.config.agents import UntrackedSection
from midflight.config.sections import Config, EnvironmentSection
from midflight.config.sources import source_names
from midflight.entries import ENTRY

SINGLE_TURN = "midflight.environments.single_turn:answer"
CLAIMED = "midflight.environments.claimed:claimed"
"""Our own entries run in the rollout process, because they block nothing."""
BUILT_IN = "built-in loop"
"""It stands in the place of an entry."""


def agent_of(environment: EnvironmentSection) -> str:
    """The entry of the agent that runs a rollout, or `BUILT_IN`."""
    has_parts = environment.rewards or environment.tools or environment.mcp
    return environment.entry or (BUILT_IN if has_parts else SINGLE_TURN)


def is_built_in(environment: EnvironmentSection) -> bool:
    return agent_of(environment) == BUILT_IN


def entries_of(environment: EnvironmentSection) -> tuple[str, ...]:
    """The entries that must be imported to run a rollout."""
    entries = list(environment.tools)
    if not is_built_in(environment):
        entries.insert(0, agent_of(environment))
    entries += [reward.entry for reward in environment.rewards]
    return tuple(entries)


def agent_contradictions(config: Config) -> Iterator[str]:
    e = config.environment
    yield from suite_contradictions(config)
    num_engines = len(config.engine.urls or config.engine.servers) or config.engine.count
    yield from _untracked_contradictions(e.untracked, num_engines)
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
    if u.url and not re.fullmatch(r"https?://[^\s/]+.*", u.url):
        yield (
            "environment.untracked.url must be an address such as http://127.0.0.1:8001/v1, got "
            f"{u.url!r}"
        )
    if u.api_key_env and not u.url:
        yield (
            f"environment.untracked.api_key_env ({u.api_key_env}) is for "
            "environment.untracked.url, and there is none; remove it"
        )


def suite_contradictions(config: Config) -> Iterator[str]:
    sources = config.environment.sources
    named = zip(source_names(sources), sources, strict=True)
    held = [name for name, source in named if source.has_heldout]
    for name, count in Counter(suite.name for suite in config.evaluation.suites).items():
        if count > 1:
            yield (
                f"evaluation.suites has {name!r} twice, so nobody could tell their scores apart; "
                "give one of them another name"
            )
    for suite in config.evaluation.suites:
        said = f"evaluation.suites ({suite.name})"
        if not suite.name or "/" in suite.name:
            yield f"evaluation.suites has the name {suite.name!r}; give it one without a slash"
        if suite.temperature == 0 and suite.samples > 1:
            yield (
                f"{said}.samples ({suite.samples}) would be the same answer each time at "
                "temperature 0; remove it, or raise the temperature"
            )
        if max(suite.ks) > suite.samples:
            yield (
                f"{said}.pass_at ({max(suite.ks)}) is more than its samples ({suite.samples}); "
                "raise samples"
            )
        for source in suite.sources:
            if source not in held:
                yield (
                    f"{said}.sources names {source!r}, which holds nothing out; those that do "
                    f"are {', '.join(held) or 'none'}"
                )
        if not held and not suite.sources:
            yield (
                f"{said} has nothing to ask: no source holds tasks out; set "
                "environment.sources.0.heldout"
            )

"""Checks that import the user's own code: the environment with its servers of tools, its sandbox and
the model of its judges, a loss, and trackers.
"""

import asyncio
import importlib
from collections.abc import Iterator

from midflight.config.agent import agent_of, entries_of
from midflight.config.agents import SANDBOXES
from midflight.config.formulas import OBJECTIVES
from midflight.config.observe import TRACKERS
from midflight.entries import load_entry
from midflight.errors import ConfigError
from midflight.run.launcher.checks.check import Finding, Plan, warning

REFUSED = (401, 403)
"""Answers of a server that does not know the key, or does not let it list models."""


def environment(plan: Plan) -> None:
    """Imports the environment, and starts its servers of tools once."""
    from midflight.environments.agent_program import AgentProgram
    from midflight.environments.mcp_servers import check_servers

    section = plan.config.environment
    entries = ", ".join(entries_of(section))
    plan.doing(f"imports {entries or agent_of(section)}")
    program = AgentProgram(section)
    if section.mcp:
        plan.doing("starts the servers of environment.mcp")
        asyncio.run(check_servers(section.mcp))
    plan.loaded.program = program


def sandbox(plan: Plan) -> None:
    """Raises `ConfigError` for a sandbox of the user's own that cannot be loaded. Rewards that ask
    for a sandbox have made theirs with the environment.
    """
    kind = plan.config.environment.sandbox.kind
    if kind not in SANDBOXES:
        plan.doing(f"imports {kind}")
        load_entry(kind, option="environment.sandbox.kind", such_as="my_sandbox:Remote")


def untracked(plan: Plan) -> Iterator[Finding]:
    """Raises `ConfigError` unless `environment.untracked.url` answers, with the key and the proxies
    that agents use. The wait has no limit of its own: a trial that stands still is ended.
    """
    section = plan.config.environment.untracked
    if not section.url or plan.config.cluster.kind != "local":
        return
    import httpx

    from midflight.environments.clients import key_of

    headers = {"authorization": f"Bearer {key_of(section)}"}
    url = f"{section.url.rstrip('/')}/models"
    plan.doing(f"asks {url} (environment.untracked.url)")
    try:
        answer = httpx.get(url, headers=headers, timeout=None)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"environment.untracked.url is {section.url!r}, which does not answer ({error}); start "
            "that server, or mend the address."
        ) from error
    if answer.status_code in REFUSED:
        yield warning(
            "untracked",
            f"environment.untracked.url answers {url} with {answer.status_code}: "
            "environment.untracked.api_key_env may name the wrong key.",
        )


def own_loss(plan: Plan) -> None:
    """Tries a loss of the user's own on a few tokens."""
    kind = plan.config.objective.kind
    if kind in OBJECTIVES:
        return
    from midflight.trainer.own_loss import described

    plan.doing(f"imports {kind}")
    plan.loaded.own_loss = described(plan.config)


def trackers(plan: Plan) -> None:
    """Makes each tracker that the user wrote, and imports what the others need."""
    for name in plan.config.observe.trackers:
        plan.doing(f"imports {name}")
        if ":" in name:
            from midflight.trackers.tracker import make_tracker

            make_tracker(name)
            continue
        try:
            importlib.import_module(TRACKERS[name])
        except Exception as error:  # a library fails as it likes to
            raise ConfigError(
                f"observe.trackers names {name!r}, and importing {TRACKERS[name]} failed with "
                f"{type(error).__name__}: {error}; pip install -U 'midflight[{name}]'"
            ) from error

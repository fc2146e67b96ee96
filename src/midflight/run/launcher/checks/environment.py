"""Checks that import the user's own code: the environment with its servers of tools, a loss, and
trackers.
"""

import asyncio

from midflight.config.agent import agent_of, entries_of
from midflight.config.formulas import OBJECTIVES
from midflight.run.launcher.checks.check import Plan


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


def own_loss(plan: Plan) -> None:
    """Tries a loss of the user's own on a few tokens."""
    kind = plan.config.objective.kind
    if kind in OBJECTIVES:
        return
    from midflight.trainer.own_loss import described

    plan.doing(f"imports {kind}")
    plan.loaded.own_loss = described(plan.config)


def trackers(plan: Plan) -> None:
    """Makes each tracker that the user wrote."""
    for name in plan.config.observe.trackers:
        if ":" in name:
            from midflight.trackers.tracker import make_tracker

            plan.doing(f"imports {name}")
            make_tracker(name)

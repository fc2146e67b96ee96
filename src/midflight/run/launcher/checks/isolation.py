"""The check of the sandbox: whether it isolates here, and what it does not hold."""

from collections.abc import Iterator

from midflight.config.agents import SandboxSection
from midflight.run.launcher.checks.check import Finding, Plan, warning


def isolation(plan: Plan) -> Iterator[Finding]:
    """Makes the sandbox of a run that has one, and says what that does not hold. A run has one if a
    reward function asks for it, which has made it then, or if its section is not the default.
    """
    from midflight.environments.sandboxes.choice import limits_not_held, sandbox_of

    section = plan.config.environment.sandbox
    program = plan.loaded.program
    is_made = program is not None and program.rewards.asks_for("sandbox")
    if not is_made and section == SandboxSection():
        return
    if not is_made:
        plan.doing(f"makes a sandbox of {section.kind}")
        sandbox_of(section)
    for sentence in limits_not_held(section):
        yield warning("sandbox", sentence)

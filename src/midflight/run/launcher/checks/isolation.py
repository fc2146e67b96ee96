"""The check of sandboxes: whether they isolate here, and what they do not hold."""

import ast
import inspect
import sys
from collections.abc import Iterator

from pydantic import ValidationError

from midflight.config.agent import entries_of
from midflight.config.agents import SandboxSection
from midflight.run.launcher.checks.check import Finding, Plan, warning


def isolation(plan: Plan) -> Iterator[Finding]:
    """Makes the sandbox of a run that has one, and says what that does not hold. A run has one if a
    reward function asks for it, which has made it then, or if its section is not the default. What
    agents make of their own on this machine, in a rollout, is made here once.
    """
    from midflight.environments.sandboxes.choice import limits_not_held, sandbox_of

    used: list[SandboxSection] = []
    section = plan.config.environment.sandbox
    program = plan.loaded.program
    is_made = program is not None and program.rewards.asks_for("sandbox")
    if is_made or section != SandboxSection():
        used.append(section)
    if not is_made and used:
        plan.doing(f"makes a sandbox of {section.kind}")
        sandbox_of(section)
    modules = [entry.partition(":")[0] for entry in entries_of(plan.config.environment)]
    for module in dict.fromkeys(modules):
        for own in _made_by(module):
            if own.kind == "bubblewrap":
                sandbox_of(own)
            used.append(own)
    sentences = [sentence for each in used for sentence in limits_not_held(each)]
    for sentence in dict.fromkeys(sentences):
        yield warning("sandbox", sentence)


def _made_by(module: str) -> Iterator[SandboxSection]:
    """The sandboxes that a module makes by `midflight.sandbox(...)`, as far as its text says with
    which options. A call within a `try` may have another way, and does not count.
    """
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError, SyntaxError):
        return
    names = _names_of_sandbox(tree)
    for call in _calls(tree):
        if ast.unparse(call.func) not in names:
            continue
        try:
            options = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
            yield SandboxSection(**options)
        except (ValueError, ValidationError):
            continue  # only the call itself knows


def _names_of_sandbox(tree: ast.AST) -> set[str]:
    """The names under which a module may call `midflight.sandbox`."""
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "midflight":
                    names.add(f"{alias.asname or alias.name}.sandbox")
        elif isinstance(node, ast.ImportFrom) and node.module == "midflight":
            for alias in node.names:
                if alias.name == "sandbox":
                    names.add(alias.asname or alias.name)
    return names


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Try):
            continue
        if isinstance(child, ast.Call):
            yield child
        yield from _calls(child)

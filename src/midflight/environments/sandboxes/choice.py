"""Chooses the sandbox of a run or of an agent."""

from collections.abc import Iterator
from typing import Any, cast

from midflight.config.agents import SandboxSection
from midflight.entries import load_entry
from midflight.environments.sandboxes.bubblewrap import Bubblewrap
from midflight.environments.sandboxes.control_groups import REMEDY, found_hierarchies
from midflight.environments.sandboxes.makers import MAKERS
from midflight.environments.sandboxes.port import Sandbox
from midflight.environments.sandboxes.remote import Remote
from midflight.environments.sandboxes.trusted import Trusted
from midflight.errors import ConfigError


def sandbox(**limits: Any) -> Sandbox:
    """A sandbox of an agent's own. The options are those of `[environment.sandbox]`, and the errors
    are those of `sandbox_of`.
    """
    return sandbox_of(SandboxSection(**limits))


def sandbox_of(section: SandboxSection) -> Sandbox:
    """The sandbox of this section. Raises `SandboxUnavailable` if it cannot isolate as it is told
    to, and `ConfigError` for a class that cannot be loaded.
    """
    if section.kind == "bubblewrap":
        found: Sandbox = Bubblewrap(section)
    elif section.kind == "trusted":
        found = Trusted(section)
    elif section.kind in MAKERS:
        found = Remote(section)
    else:
        made = load_entry(
            section.kind, option="environment.sandbox.kind", such_as="my_sandbox:Remote"
        )
        if not callable(made):
            raise ConfigError(
                f"environment.sandbox.kind is {section.kind!r}, which cannot be called with the "
                "section; name a class."
            )
        try:
            found = cast("Sandbox", made(section))
        except Exception as error:
            raise ConfigError(
                f"environment.sandbox.kind is {section.kind!r}, which cannot be made with the "
                f"section: {type(error).__name__}: {error}; mend that class."
            ) from error
    found.check()
    return found


def limits_not_held(section: SandboxSection) -> Iterator[str]:
    """Sentences on what a sandbox of this section cannot hold, for the user who starts the run."""
    if section.kind == "bubblewrap" and found_hierarchies() is None:
        yield (
            "no control group can be had here for programs of environment.sandbox, so their memory "
            "is measured ten times a second, and may pass memory_mb in between; for a limit that "
            f"the kernel holds, {REMEDY}."
        )
    if section.kind == "bubblewrap" and section.network:
        yield (
            "environment.sandbox.network = true: its programs reach what this machine reaches, its "
            "own services included."
        )
    if section.kind == "trusted":
        yield (
            'environment.sandbox.kind = "trusted": its programs run as you, with your files and '
            "your network; disk_mb bounds each file alone, and processes bounds nothing."
        )
    if section.kind in MAKERS and MAKERS[section.kind].not_held:
        yield f"environment.sandbox.kind = {section.kind!r}: {MAKERS[section.kind].not_held}."

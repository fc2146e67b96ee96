"""Checks of what is installed: Midflight, Python, the packages that are needed, and the extras."""

import platform
import sys
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement

from midflight.observe.machine import PACKAGES, package_version
from midflight.run.launcher.checks.check import Finding, Plan, error, ok, warning
from midflight.version import described


def versions(_: Plan) -> Iterator[Finding]:
    """Says which Midflight and which Python this is."""
    yield ok("midflight", described())
    yield ok(
        "python",
        f"{platform.python_version()} at {sys.executable}; {platform.platform(terse=True)}",
    )


def packages(_: Plan) -> Iterator[Finding]:
    """Yields findings on the packages that Midflight needs, and on its extras."""
    if package_version("midflight") is None:
        # Python finds the sources by its path, and their requirements are not recorded.
        yield warning(
            "packages",
            "midflight runs from its source folder and is not installed, so what it needs was not "
            "looked at",
            "pip install -e . in the source folder",
        )
        return
    incomplete = set[str]()
    for requirement, extra in _requirements():
        there = package_version(requirement.name)
        if there is not None and requirement.specifier.contains(there, prereleases=True):
            continue
        if extra:
            incomplete.add(extra)
            continue
        version = "is not installed" if there is None else there
        yield error(
            "packages",
            f"{requirement.name} {version}, {requirement.specifier or 'any'} is needed",
            f"pip install -U '{requirement.name}{requirement.specifier}'",
        )
    versions = {name: package_version(name) for name in PACKAGES}
    shown = [f"{name} {version}" for name, version in versions.items() if version]
    yield ok("packages", ", ".join(shown))
    yield _extras(incomplete)


def _extras(incomplete: set[str]) -> Finding:
    """Returns a finding on the extras that are there, and on those that lack a package."""
    extras = {*_known_extras()} - {"test", "lint"}
    text = ", ".join(sorted(extras - incomplete)) or "none"
    lacking = sorted(extras & incomplete)
    if not lacking:
        return ok("extras", text)
    return ok(
        "extras",
        f"{text}; without {', '.join(lacking)}",
        f"where you want them: pip install 'midflight[{','.join(lacking)}]'",
    )


def _known_extras() -> list[str]:
    return metadata.metadata("midflight").get_all("Provides-Extra") or []


def _requirements() -> Iterator[tuple[Requirement, str]]:
    """Each requirement with its extra, which is empty if it is always needed. Requirements of other
    systems are left out.
    """
    extras = _known_extras()
    for text in metadata.requires("midflight") or []:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or marker.evaluate({"extra": ""}):
            yield requirement, ""
        else:
            for extra in extras:
                if marker.evaluate({"extra": extra}):
                    yield requirement, extra

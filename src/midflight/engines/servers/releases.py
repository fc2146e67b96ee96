"""The releases of a server that Midflight works with."""

from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from midflight.errors import EngineError


@dataclass(frozen=True, slots=True)
class Releases:
    """The releases from the oldest that has all that we need to the newest that our tests have
    passed on.
    """

    server: str
    oldest: str
    tried: str

    def caution(self, version: str, *, url: str) -> str:
        """Returns a warning for people about a server of this version, or an empty string. Raises
        `EngineError` for a version that is too old.

        A build from sources whose number says nothing (`0.0.0.dev3`, `0.1.dev1+g12ab`) counts as
        untried.
        """
        try:
            found = Version(version)
        except InvalidVersion:
            return self._untried(version)
        unnumbered = found.is_devrelease and found.release < (0, 2)
        if not unnumbered and found < Version(self.oldest):
            raise EngineError(
                f"attaching to {url}: {self.server} {version} is older than what this Midflight "
                f"works with; use {self.oldest} or newer ({self.tried} is the newest that was "
                "tried)."
            )
        if unnumbered or found.release > Version(self.tried).release:
            return self._untried(version)
        return ""

    def _untried(self, version: str) -> str:
        return (
            f"{self.server} {version} has not been tried with this Midflight, which was tested "
            f"with {self.oldest} to {self.tried}. The run goes on; if the engine fails, use "
            f"{self.tried}."
        )

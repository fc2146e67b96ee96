"""The rollout processes of a ring, where there are several."""

from dataclasses import dataclass
from pathlib import Path

from midflight.config.sections import Config
from midflight.observe.status import Status, together
from midflight.run.places.port import Place


@dataclass(frozen=True, slots=True)
class GatewayPart:
    """One rollout process, in all its lives; `config` is its part of the run's."""

    shard: int
    place: Place
    config: Config

    @property
    def name(self) -> str:
        return f"rollout{self.shard or ''}"

    @property
    def folder(self) -> Path:
        return Path(self.config.run.folder)

    @property
    def url(self) -> str:
        return f"http://{self.place.host}:{self.place.port}"


class Statuses:
    """What each said of the run last."""

    def __init__(self) -> None:
        self._by_name: dict[str, Status] = {}

    def whole(self, name: str, status: Status) -> Status:
        """The run's, after the word of one of them."""
        self._by_name[name] = status
        first, *others = (self._by_name[of] for of in sorted(self._by_name))
        return together(first, others) if others else status

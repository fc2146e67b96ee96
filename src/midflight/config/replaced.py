"""Values of options that are gone, and what has taken their place."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Replacement:
    """What has taken the place of a value."""

    value: str
    """The value that the stored configuration of a run is read with."""
    remedy: str
    """What to write in a new configuration, as the end of a sentence."""


REPLACED_TRANSPORTS: Mapping[str, Replacement] = {
    "file": Replacement(
        "auto",
        'set it to "shared_memory", which maps a file in the run\'s folder by itself where '
        '/dev/shm is small, or between machines to "pull" ("auto" chooses)',
    ),
    "collective": Replacement(
        "pull", 'set it to "pull", by which engines on any number of machines ask for versions'
    ),
}
REPLACED: Mapping[str, Mapping[str, Replacement]] = {"weights.transport": REPLACED_TRANSPORTS}
"""The replaced values of each option, by its key."""

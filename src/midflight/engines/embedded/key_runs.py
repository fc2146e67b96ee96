"""Which versions computed the keys of a sequence: runs of keys of one version, as in `KeyRuns`. Two
runs that follow each other are of different versions, so equal keys have equal runs.
"""

from collections.abc import Iterable

from midflight.types import KeyRuns, Version


def num_keys(runs: KeyRuns) -> int:
    return sum([num for _, num in runs])


def oldest(runs: KeyRuns) -> Version:
    """The least version. There must be a run."""
    return min([version for version, _ in runs])


def joined(parts: Iterable[KeyRuns]) -> KeyRuns:
    """The runs of keys that follow each other."""
    found: list[tuple[Version, int]] = []
    for runs in parts:
        for version, num in runs:
            if found and found[-1][0] == version:
                found[-1] = (version, found[-1][1] + num)
            else:
                found.append((version, num))
    return tuple(found)


def cut(runs: KeyRuns, start: int, end: int) -> KeyRuns:
    """The runs of keys [start, end)."""
    found: list[tuple[Version, int]] = []
    before = 0
    for version, num in runs:
        first = max(start, before)
        after = min(end, before + num)
        if first < after:
            found.append((version, after - first))
        before += num
    return tuple(found)

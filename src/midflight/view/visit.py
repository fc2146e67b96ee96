"""What a page of the viewer is given: the run it is about, the others, and what its address asks
for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from midflight.archive.runs import ArchivedRun, is_run, open_runs, runs_under
from midflight.errors import NoRun, nearest


class Shelf:
    """The runs that a viewer shows: folders that were given, and whatever runs come to lie below
    those that are none themselves.
    """

    def __init__(self, given: Sequence[Path]) -> None:
        """`NoRun` where a folder is not there, or neither it nor a folder below it is a run."""
        self._given = tuple(given)
        self._runs: dict[str, ArchivedRun] = {}
        for folder in given:
            if not is_run(folder) and not runs_under(folder):
                open_runs([folder])  # which says what is wrong with it

    def runs(self) -> tuple[ArchivedRun, ...]:
        """Those there now. One that was looked at before is the same object, with what it has
        read.
        """
        found = [folder for folder in self._given if is_run(folder)]
        found += [
            run.folder
            for folder in self._given
            if folder not in found and folder.is_dir()
            for run in runs_under(folder)
        ]
        there = {run.slug: run for run in open_runs(found)}
        self._runs = {
            slug: kept if (kept := self._runs.get(slug)) and kept.folder == run.folder else run
            for slug, run in there.items()
        }
        return tuple(self._runs.values())

    def run(self, slug: str) -> ArchivedRun:
        """`NoRun` where none has that name, or its folder is gone."""
        runs = {run.slug: run for run in self.runs()}
        if slug not in runs:
            raise NoRun(
                f"there is no run {slug!r} here: it was deleted, moved, or never "
                f"was.{nearest(slug, runs) if runs else ''}"
            )
        return runs[slug]


@dataclass(frozen=True, slots=True)
class Visit:
    """One page that somebody looks at. Everything that it filters by is in its address, so that
    links and reloads keep it.
    """

    run: ArchivedRun
    runs: tuple[ArchivedRun, ...]
    query: Mapping[str, str]

    def link(self, page: str, *, of: ArchivedRun | None = None, **query: object) -> str:
        """The address of a page of this run, or of another one; what is None is left out."""
        asked = {name: value for name, value in query.items() if value is not None}
        return f"/run/{(of or self.run).slug}/{page}" + (f"?{urlencode(asked)}" if asked else "")

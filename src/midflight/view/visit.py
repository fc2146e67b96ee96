"""The runs that a viewer shows, and the visit of one page: its run, the other runs, and the filters
in its address.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from midflight.archive.runs import ArchivedRun, is_run, open_runs, runs_under
from midflight.errors import NoRun, nearest


class RunFolders:
    """The runs that a viewer shows: the folders that were given, and the runs that appear below
    those that are no runs themselves.
    """

    def __init__(self, given: Sequence[Path]) -> None:
        """Raises `NoRun` if a folder is not there, or neither it nor a folder below it is a run."""
        self._given = tuple(given)
        self._runs: dict[str, ArchivedRun] = {}
        for folder in given:
            if not is_run(folder) and not runs_under(folder):
                open_runs([folder])  # this names the fault of the folder

    def runs(self) -> tuple[ArchivedRun, ...]:
        """Returns the runs that are there now. A run that was visited before is the same object,
        with everything that it has read.
        """
        found = [folder for folder in self._given if is_run(folder)]
        below: list[Path] = []
        for folder in self._given:
            if folder not in found and folder.is_dir():
                below += [run.folder for run in runs_under(folder)]
        there: dict[str, ArchivedRun] = {}
        for run in open_runs(found + below):
            known = self._runs.get(run.slug)
            there[run.slug] = run
            if known is not None and known.folder == run.folder:
                there[run.slug] = known
        self._runs = there
        return tuple(there.values())

    def run(self, slug: str) -> ArchivedRun:
        """The run of that name. Raises `NoRun` if there is none, or its folder is gone."""
        runs = {run.slug: run for run in self.runs()}
        if slug not in runs:
            raise NoRun(
                f"there is no run {slug!r} here: it was deleted, moved, or never "
                f"was.{nearest(slug, runs) if runs else ''}"
            )
        return runs[slug]


@dataclass(frozen=True, slots=True)
class PageRequest:
    """A request for one page. All its filters are in its address, so that links and reloads keep
    them.
    """

    run: ArchivedRun
    runs: tuple[ArchivedRun, ...]
    query: Mapping[str, str]

    def link(self, page: str, *, of: ArchivedRun | None = None, **query: object) -> str:
        """The address of a page of this run, or of the run `of`. A value of None is left out."""
        address = f"/run/{(of or self.run).slug}/{page}"
        asked = {name: value for name, value in query.items() if value is not None}
        return f"{address}?{urlencode(asked)}" if asked else address

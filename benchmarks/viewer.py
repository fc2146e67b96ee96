"""How soon one sees what a run did, and what it costs a run that somebody looks.

    python benchmarks/viewer.py
        100 000 rollouts of 300 tokens each (0.8 GB), made first in about a minute
    python benchmarks/viewer.py --folder DIR
        keeps that run there, for the next time
    python benchmarks/viewer.py --parts pages
        pages of a viewer: processor time, answer, first paint in Chromium
    python benchmarks/viewer.py --parts open
        runs of the demo with and without an open page

**looks**: the first page of the groups, others filtered and sorted, words found. For each look the
median and the largest of five, in milliseconds; it exits with 1 where a page takes over 300 ms or
the first over a second. The first look is made by a process that has just opened the run; the file
may lie in the system's cache.

**pages**: the first visit to a viewer that has just started, beside the median of the next five; it
exits with 1 where a first visit takes over a second.

**open**: runs of `configs/demo.toml` take turns, with nobody looking and with a headless Chromium
that has the run's own `/dashboard` open from the first step on. Rates are of training alone: from
step 5 to the last. The browser would be on somebody else's machine; here it takes the same cores,
though at idle priority, so the rates say what both cost together, and the CPU seconds what the
viewer's process alone costs. Without Chromium a plain client opens the page once, which keeps the
viewer less busy.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.arguments import Arguments
from harness.processes import cpu_seconds, end, family, parent_of, words_of
from harness.report import Report, make_parts
from harness.rounds import alternate, median_of
from harness.runs import DEMO, SMALL, journal, train_command, training
from sides.large_run import make

from midflight.archive.groups import GroupFilter, GroupOrder, page_of
from midflight.archive.search import WordIndex

FIRST_MS = 1000.0
PAGE_MS = 300.0
CHROMIUM = os.environ.get("MIDFLIGHT_CHROMIUM") or shutil.which("chromium")


@contextmanager
def large_run(options: argparse.Namespace) -> Generator[Path]:
    """The folder of a run with so many rollouts; it is made if it is not there."""
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["XDG_CACHE_HOME"] = scratch
        folder = options.folder or Path(scratch) / "run"
        store = folder / "store.sqlite"
        if not store.exists():
            began = time.perf_counter()
            make(folder, rollouts=options.rollouts, tokens=options.tokens)
            seconds = time.perf_counter() - began
            print(f"made in {seconds:.1f} s, {store.stat().st_size / 1e6:.0f} MB\n", flush=True)
        yield folder


def taken_ms(deed: Callable[[], object]) -> float:
    began = time.perf_counter()
    deed()
    return (time.perf_counter() - began) * 1000


# --- Looks ----------------------------------------------------------------------------------------


def looks(options: argparse.Namespace, report: Report) -> bool:
    """Returns whether each was quick enough."""
    with large_run(options) as folder:
        first = taken_ms(lambda: page_of(folder, GroupFilter()))
        seconds = taken_ms(lambda: index_words(folder)) / 1000
        size = WordIndex(folder).path.stat().st_size / 1e6
        report.say(f"words indexed in {seconds:.1f} s, {size:.0f} MB")
        report.say(f"the first look of a process: {first:.1f} ms (at most {FIRST_MS:.0f})")
        table = report.table("look", "ms", "largest", "at most")
        good = first <= FIRST_MS
        for name, look in looks_of(folder).items():
            taken = [taken_ms(look) for _ in range(5)]
            middle = statistics.median(taken)
            table.row(name, f"{middle:.1f}", f"{max(taken):.1f}", f"{PAGE_MS:.0f}")
            good = good and middle <= PAGE_MS
        return good


def index_words(folder: Path) -> None:
    while True:
        grown = WordIndex(folder).grow(5.0)
        if grown.complete:
            return
        print(f"  words of {grown.done} of {grown.total} rollouts indexed", flush=True)


def looks_of(folder: Path) -> dict[str, Callable[[], object]]:
    """What people do, by name."""
    words = WordIndex(folder)
    two = GroupFilter(words="rain therefore")
    phrase = GroupFilter(words='"rain therefore seven"')
    letters = GroupFilter(source="letters")
    return {
        "first page, newest groups": lambda: page_of(folder, GroupFilter()),
        "a page in the middle": lambda: page_of(folder, GroupFilter(), first=6000),
        "groups of a step": lambda: page_of(folder, GroupFilter(version=40)),
        "groups of a source": lambda: page_of(folder, GroupFilter(source="sums")),
        "groups of a failure": lambda: page_of(folder, GroupFilter(failure="RolloutTimeout")),
        "lowest reward first": lambda: page_of(folder, GroupFilter(), order=GroupOrder.WORST),
        "largest spread of a source first": lambda: page_of(
            folder, letters, order=GroupOrder.SPREAD
        ),
        "dropped ones": lambda: page_of(folder, GroupFilter(fate="zero_spread")),
        "two words that many hold": lambda: page_of(folder, two, words=words),
        "a phrase": lambda: page_of(folder, phrase, words=words),
    }


# --- Pages ----------------------------------------------------------------------------------------

PAGES = {
    "/": "/",
    "time": "/run/{run}/time",
    "groups": "/run/{run}/groups",
    "conversation": "/run/{run}/conversation?epoch=0&position=12&attempt=0&sample=3",
    "ledger": "/run/{run}/ledger",
}


def pages(options: argparse.Namespace, report: Report) -> bool:
    """Returns whether each was quick enough."""
    good = True
    with large_run(options) as folder:
        table = report.table(
            "page", "CPU, ms", "answer, ms", "again, ms", "painted, ms", "again, ms"
        )
        for name, path in PAGES.items():
            with viewer(folder) as (address, process):
                url = address + path.format(run=folder.name)
                before = cpu_seconds(process)
                first = taken_ms(lambda url=url: open_page(url))
                worked = 1000 * (cpu_seconds(process) - before)
                again = [taken_ms(lambda url=url: open_page(url)) for _ in range(5)]
            with viewer(folder) as (address, _):
                paints = painted(address + path.format(run=folder.name))
            shown = ["no Chromium", ""]
            if paints:
                shown = [f"{paints[0]:.0f}", f"{statistics.median(paints[1:]):.0f}"]
            answers = (f"{first:.0f}", f"{statistics.median(again):.0f}")
            table.row(name, f"{worked:.0f}", *answers, *shown)
            good = good and max([first, *paints[:1]]) <= FIRST_MS
    return good


@contextmanager
def viewer(folder: Path) -> Generator[tuple[str, int]]:
    """Its address, and its process."""
    command = [sys.executable, "-m", "midflight", "view", str(folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().removeprefix("viewer: ").strip().rstrip("/")
        while True:  # it listens before it serves
            try:
                open_page(f"{address}/health")
                break
            except OSError:
                time.sleep(0.05)
        yield address, process.pid
    finally:
        end(process)


def open_page(url: str) -> None:
    urllib.request.urlopen(url, timeout=120).read()


def painted(url: str) -> list[float]:
    """Measures from the request to the first content on the screen; the browser itself runs
    already. Returns nothing where there is none.
    """
    try:
        # `make test-view` installs it
        playwright: Any = importlib.import_module("playwright.sync_api")
    except ImportError:
        return []
    if CHROMIUM is None:
        return []
    paint = "performance.getEntriesByName('first-contentful-paint')"
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto("about:blank")
        found: list[float] = []
        for _ in range(4):
            page.goto(url)
            page.wait_for_function(f"{paint}.length")
            found.append(page.evaluate(f"{paint}[0].startTime"))
        browser.close()
    return found


# --- An open page ---------------------------------------------------------------------------------

FIRST_STEP = 5


@dataclass(frozen=True)
class Trained:
    """One run: steps a second, and the viewer's CPU seconds as a share of those of all other
    processes of the run from its start on, 0 to 1.
    """

    rate: float
    viewer_share: float


def open_dashboard(options: argparse.Namespace, report: Report) -> None:
    deeds = {
        "shut": lambda: trained(options, seen=False),
        "open": lambda: trained(options, seen=True),
    }
    found = alternate(deeds, rounds=options.rounds)
    shut = median_of(found["shut"], lambda run: run.rate)
    opened = median_of(found["open"], lambda run: run.rate)
    share = median_of(found["open"], lambda run: run.viewer_share)
    report.say(
        f"{'Chromium' if CHROMIUM else 'one visit'}: open {opened:.3f}, shut {shut:.3f} steps a "
        f"second: {100 * (1 - opened / shut):.1f} % slower with the browser on these cores; the "
        f"viewer takes {100 * share:.1f} % of the run's CPU seconds"
    )


def trained(options: argparse.Namespace, *, seen: bool) -> Trained:
    settings = [
        f"run.steps={options.steps}",
        "warm_start.target_accuracy=0.05",
        "evaluation.eval_every=0",
    ]
    if options.smoke:
        settings += SMALL
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        command = train_command(DEMO, settings, folder=folder)
        browser: subprocess.Popen[bytes] | None = None
        before = 0.0
        used = (0.0, 0.0)
        with training(command, said=Path(place) / "said") as run:
            try:
                while run.poll() is None:
                    if seen and browser is None and journal(folder, kind="step"):
                        before = run_and_viewer_seconds(run.pid)[0]
                        browser = browser_on(folder)
                    used = max(used, run_and_viewer_seconds(run.pid))
                    time.sleep(0.2)
            finally:
                if browser is not None:
                    end(browser)
        at = {line["step"]: line["seconds"] for line in journal(folder, kind="step")}
    rest, viewer = used
    seconds = at[options.steps] - at[FIRST_STEP]
    return Trained((options.steps - FIRST_STEP) / seconds, viewer / (rest - before))


def run_and_viewer_seconds(launcher: int) -> tuple[float, float]:
    """CPU seconds of the run's processes that live, and of the viewer beside them."""
    rest = 0.0
    viewer = 0.0
    for pid in family(launcher):
        if launcher not in (pid, parent_of(pid)):
            continue
        if any("midflight.view" in word for word in words_of(pid)):
            viewer += cpu_seconds(pid)
        else:
            rest += cpu_seconds(pid)
    return rest, viewer


def browser_on(folder: Path) -> subprocess.Popen[bytes]:
    """A browser on the run's dashboard; where there is none, a client that opens the page and then
    sleeps.
    """
    endpoint = json.loads((folder / "endpoint.json").read_text())
    address = f"{endpoint['url']}/dashboard?token={endpoint['control_token']}"
    if CHROMIUM is None:
        client = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPCookieProcessor()
        )
        client.open(address).read()
        return subprocess.Popen(["sleep", "3600"])
    profile = tempfile.mkdtemp(dir=folder.parent)
    words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    command = [CHROMIUM, *words, f"--user-data-dir={profile}", address]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, stdout=quiet, stderr=quiet, preexec_fn=make_idle)


def make_idle() -> None:
    """The process runs only when no other wants the core."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


PARTS = {"looks": looks, "pages": pages, "open": open_dashboard}


def main() -> None:
    arguments = Arguments(__doc__, rounds=3)
    arguments.option("--parts", ["looks"], smoke=["looks", "open"], choices=[*PARTS])
    arguments.option("--rollouts", 100_000, smoke=800)
    arguments.option("--tokens", 300)
    arguments.option("--folder", None, type=Path)
    arguments.option(
        "--steps", 150, smoke=300, help="of each run of part `open`, in which the page is opened"
    )
    options = arguments.parse()
    make_parts(options, PARTS)


if __name__ == "__main__":
    main()

"""A run that `--overwrite` replaces: set aside, put back or let go, with a crash at every step of the file system."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from tests.folders import tree_of, umask

from midflight.config import Config, load_config
from midflight.errors import ConfigError
from midflight.observe.atomic_write import write_whole
from midflight.observe.lines import StepLine
from midflight.observe.status import Totals
from midflight.run.launcher import folder_lock, replaced_files
from midflight.run.launcher.checks.folder import check_run_folder
from midflight.run.launcher.folder import put_back, set_aside
from midflight.run.launcher.replaced_run import ReplacedRun
from midflight.trajectories.pairs import store_path

Crash = type("Crash", (BaseException,), {})


class Steps:
    """Counts what is done to the file system. From a step on nothing is done any more, as after a kill: clean-up neither."""

    DONE = frozenset(("os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"))

    def __init__(self) -> None:
        self._left: int | None = None
        self.error: Callable[[], BaseException] = Crash
        self._once = False
        self.num = 0

    def hear(self, event: str, arguments: tuple[object, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
        if self._left is None or not (writes or event in self.DONE):
            return
        self.num += 1
        if self.num > self._left:
            if self._once:
                self._left = None
            raise self.error()

    @contextmanager
    def crash_after(self, num: int) -> Generator[None]:
        self._left, self.num, self._once, self.error = num, 0, False, Crash
        try:
            with suppress(Crash):
                yield
        finally:
            self._left = None

    @contextmanager
    def fail_once_after(self, num: int) -> Generator[None]:
        self._left, self.num, self._once = num, 0, True
        self.error = lambda: PermissionError(13, "Permission denied", "somewhere")
        try:
            yield
        finally:
            self._left = None


STEPS = Steps()


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Files are as a run makes them. Those of others are closed by whoever takes the folder."""
    with umask(0o077):
        yield


@pytest.fixture(scope="module", autouse=True)
def heard() -> None:
    """An audit hook stays for the life of the process; it does nothing unless a test asks for a crash."""
    sys.addaudithook(STEPS.hear)


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory where there is such a place: hundreds of times a test waits for its disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as made:
        yield Path(made)


def config_of(folder: Path, *more: str) -> Config:
    return load_config(None, [f"run.folder={folder}", *more])


def step_line() -> bytes:
    line = StepLine(
        step=1, version=1, seconds=1.0, step_seconds=1.0, tokens=1, rollouts=1, generation_rate=1.0, training_rate=1.0, totals=Totals()
    )
    return msgspec.json.encode(line) + b"\n"


def old_run(folder: Path, *, disk: Path | None = None) -> None:
    """A small one that has finished, with a file of the user's beside it."""
    for name in ("checkpoints/version-00000003", "model", "logs"):
        (folder / name).mkdir(parents=True)
    for name in ("checkpoints/latest", "checkpoints/version-00000003/state.json", "model/config.json", "logs/trainer.log", "notes.txt"):
        (folder / name).write_text(f"old {name}")
    store = store_path(folder, disk)
    for name in ("metrics.jsonl", "store.sqlite", "store.sqlite-wal", "posted.jsonl", "data.jsonl"):
        (folder / name).write_text(f"old {name}")
    (folder / "config.toml").write_text("" if disk is None else f'[run]\nstore_folder = "{disk}"\n')
    if disk is not None:
        store.write_text("old store elsewhere")
        store.with_name(store.name + "-wal").write_text("old log of writes elsewhere")


def new_run(folder: Path, config: Config) -> None:
    """Begins in its place, and makes all sorts of things, but no step."""
    (folder / "metrics.jsonl").touch()
    write_whole(folder / "config.toml", b"new")
    for name in ("checkpoints/version-00000000", "start", "logs", "tensorboard"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name in ("checkpoints/latest", "start/config.json", "logs/trainer.log", "store.sqlite", "posted.jsonl", "evaluations.sqlite"):
        (folder / name).write_text(f"new {name}")
    if config.run.store_folder is not None:
        store_path(folder, config.run.store_folder).write_text("new store elsewhere")


def of_run(*folders: Path) -> dict[str, object]:
    """Everything but what is allowed to be there beside the run."""
    beside = ("lock", "failed-logs", replaced_files.GONE)
    return {
        f"{number}/{name}": found
        for number, folder in enumerate(folders)
        for name, found in tree_of(folder).items()
        if not name.startswith(beside)
    }


def unheard(said: str) -> None:
    pytest.fail(said)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["store in the folder", "store on another disk"])
def test_a_kill_at_any_step_and_another_at_any_step_of_the_return_leave_the_old_run_as_it_was(memory: Path, elsewhere: bool) -> None:
    folder, disk = memory / "run", memory / "disk"
    disk.mkdir()
    config = config_of(folder, *([f"run.store_folder={disk}"] if elsewhere else []))

    def start() -> None:
        with folder_lock.hold_folder(folder, lambda _: None):
            set_aside(folder, config)
            new_run(folder, config)
            raise Crash

    num_kills, whole = 0, True
    while whole:  # until the crash comes after the last step of the start
        again, whole_return = 0, True
        while whole_return:
            for place in (folder, disk):
                shutil.rmtree(place, ignore_errors=True)
            disk.mkdir()
            old_run(folder, disk=disk if elsewhere else None)
            before = of_run(folder, disk)
            with STEPS.crash_after(num_kills):
                start()
            whole = STEPS.num > num_kills
            with STEPS.crash_after(again):
                folder_lock.restore(folder, lambda _: None)
            whole_return = STEPS.num > again
            folder_lock.restore(folder, lambda _: None)
            assert of_run(folder, disk) == before, (num_kills, again)
            assert not replaced_files.is_left(folder)
            again += 1 if num_kills % 20 == 0 else 17  # of every twentieth each, of the others a few
        num_kills += 1
    assert num_kills > 40


def test_once_the_first_step_is_made_a_kill_at_any_step_leaves_the_new_run_and_nothing_of_the_old(memory: Path) -> None:
    folder, disk = memory / "run", memory / "disk"
    config = config_of(folder, f"run.store_folder={disk}")
    after, whole = 0, True
    while whole:
        for place in (folder, disk):
            shutil.rmtree(place, ignore_errors=True)
        disk.mkdir()
        old_run(folder, disk=disk)
        set_aside(folder, config)
        new_run(folder, config)
        (folder / "metrics.jsonl").write_bytes(step_line())
        new = {name: found for name, found in of_run(folder, disk).items() if ".overwritten" not in name}
        with STEPS.crash_after(after):
            replaced_files.let_go(folder)
            replaced_files.delete_gone(folder)
        whole = STEPS.num > after
        with folder_lock.hold_folder(folder, lambda _: None):
            pass
        assert tree_of(folder).keys() == {name.removeprefix("0/") for name in new if name.startswith("0/")}
        assert of_run(folder, disk) == new
        after += 1
    assert after > 20


def test_where_something_cannot_be_moved_nothing_has_changed_and_it_is_said(memory: Path) -> None:
    folder, config = memory / "run", config_of(memory / "run")
    old_run(folder)
    before, failed, after, reached = of_run(folder), 0, 0, True
    while reached:
        try:
            with STEPS.fail_once_after(after):
                set_aside(folder, config)
            put_back(folder)  # it was a step that another way led around
        except ConfigError as error:
            failed += 1
            assert "everything is as it was" in str(error) and "Permission denied" in str(error)
        reached = STEPS.num > after
        assert of_run(folder) == before
        after += 1
    assert failed > 10


def test_what_ends_before_the_first_step_gives_the_folder_back_and_keeps_its_own_logs(tmp_path: Path) -> None:
    old_run(tmp_path)
    said, before, config = list[str](), of_run(tmp_path), config_of(tmp_path)
    with pytest.raises(ZeroDivisionError), folder_lock.hold_folder(tmp_path, said.append):
        set_aside(tmp_path, config)
        assert (tmp_path / "notes.txt").exists() and not (tmp_path / "model").exists()
        new_run(tmp_path, config)
        raise ZeroDivisionError
    assert of_run(tmp_path) == before
    assert (tmp_path / "failed-logs" / "trainer.log").read_text() == "new logs/trainer.log"
    assert len(said) == 1 and "is back" in said[0] and "failed-logs" in said[0]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_the_old_run_goes_when_a_step_of_the_new_one_is_in_its_journal(tmp_path: Path) -> None:
    old_run(tmp_path)
    said, config = list[str](), config_of(tmp_path)
    replaced = ReplacedRun(tmp_path, said.append)
    with folder_lock.hold_folder(tmp_path, unheard):
        set_aside(tmp_path, config)
        new_run(tmp_path, config)
        replaced.look()
        assert said == [] and replaced_files.is_aside(tmp_path)
        (tmp_path / "metrics.jsonl").write_bytes(step_line()[:-9])  # which a kill has cut short
        replaced.look()
        assert said == [] and replaced_files.is_aside(tmp_path)
        (tmp_path / "metrics.jsonl").write_bytes(step_line())
        replaced.look()
        replaced.look()
        replaced.wait()
        assert len(said) == 1 and "is deleted" in said[0]
    assert not [name for name in tree_of(tmp_path) if name.startswith(".overwritten")]
    assert (tmp_path / "posted.jsonl").read_text() == "new posted.jsonl"


def test_a_run_that_was_killed_after_its_first_step_stays_and_the_old_one_goes_at_the_next_start(tmp_path: Path) -> None:
    old_run(tmp_path)
    config = config_of(tmp_path)
    set_aside(tmp_path, config)
    new_run(tmp_path, config)
    (tmp_path / "metrics.jsonl").write_bytes(step_line())
    with folder_lock.hold_folder(tmp_path, unheard):
        assert (tmp_path / "checkpoints" / "latest").read_text() == "new checkpoints/latest"
        assert not [name for name in tree_of(tmp_path) if name.startswith(".overwritten")]


def test_leftovers_of_several_starts_are_all_cleared(tmp_path: Path) -> None:
    old_run(tmp_path)
    before, config = of_run(tmp_path), config_of(tmp_path)
    for name in (".overwritten-gone", ".overwritten-gone3/model"):
        (tmp_path / name).mkdir(parents=True)
    set_aside(tmp_path, config)
    new_run(tmp_path, config)
    with folder_lock.hold_folder(tmp_path, lambda _: None):
        assert of_run(tmp_path) == before
        assert not [name for name in tree_of(tmp_path) if name.startswith(".overwritten")]


def test_a_second_launcher_is_refused_and_leaves_what_is_aside_where_it_is(tmp_path: Path) -> None:
    old_run(tmp_path)
    config = config_of(tmp_path)
    reading, writing = os.pipe()
    if (other := os.fork()) == 0:
        with folder_lock.hold_folder(tmp_path, lambda _: None):
            set_aside(tmp_path, config)
            new_run(tmp_path, config)
            os.write(writing, b"begun")
            signal.pause()
        os._exit(0)
    try:
        assert os.read(reading, 5) == b"begun"
        assert folder_lock.restore(tmp_path, unheard) is False
        with pytest.raises(ConfigError, match=f"in use by process {other}"), folder_lock.hold_folder(tmp_path, unheard):
            pass
        assert replaced_files.is_aside(tmp_path)
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
    assert folder_lock.restore(tmp_path, lambda _: None) is True
    assert (tmp_path / "model" / "config.json").read_text() == "old model/config.json" and not (tmp_path / "lock").exists()


@pytest.mark.parametrize("way", ["a link", "the current folder"])
def test_the_folder_may_be_a_link_or_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    real = tmp_path / "real"
    old_run(real)
    before = of_run(real)
    if way == "a link":
        (folder := tmp_path / "link").symlink_to(real)
    else:
        monkeypatch.chdir(real)
        folder = Path()
    config = config_of(folder)
    check_run_folder(config, resume=False, overwrite=True)
    with suppress(ZeroDivisionError), folder_lock.hold_folder(folder, lambda _: None):
        set_aside(folder, config)
        new_run(folder, config)
        raise ZeroDivisionError
    assert of_run(real) == before


def test_a_folder_that_was_moved_while_a_run_was_aside_gives_it_back_all_the_same(tmp_path: Path) -> None:
    old_run(tmp_path / "before")
    before, config = of_run(tmp_path / "before"), config_of(tmp_path / "before")
    set_aside(tmp_path / "before", config)
    new_run(tmp_path / "before", config)
    (tmp_path / "before").rename(tmp_path / "after")
    assert folder_lock.restore(tmp_path / "after", lambda _: None)
    assert of_run(tmp_path / "after") == before


def test_a_linked_folder_in_the_run_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    old_run(tmp_path / "run")
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "large")
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "large")
    before = tree_of(tmp_path)
    with pytest.raises(ConfigError, match=r"checkpoints is a link to the folder .*large.*remove the link"):
        check_run_folder(config_of(tmp_path / "run"), resume=False, overwrite=True)
    assert tree_of(tmp_path) == before


@pytest.mark.skipif(os.getuid() == 0, reason="the superuser may write everywhere")
def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    old_run(tmp_path)
    (tmp_path / "model").chmod(0o555)
    with pytest.raises(ConfigError, match=r"model cannot be written to; make it writable"):
        check_run_folder(config_of(tmp_path), resume=False, overwrite=True)


def test_what_the_run_reads_is_not_what_it_replaces(tmp_path: Path) -> None:
    old_run(tmp_path)
    rows = f"environment.sources=[{{path='{tmp_path / 'data.jsonl'}'}}]"
    for key, option in (("model.path", f"model.path={tmp_path / 'checkpoints'}"), (r"environment\.sources\.0\.path", rows)):
        with pytest.raises(ConfigError, match=rf"{key} is .*would delete"):
            check_run_folder(config_of(tmp_path, option), resume=False, overwrite=True)
    check_run_folder(config_of(tmp_path, rows), resume=False, overwrite=True, gives_rows=True)


def test_a_first_run_does_not_delete_the_data_that_it_reads(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("{}")
    config = config_of(tmp_path, f"environment.sources=[{{path='{tmp_path / 'data.jsonl'}'}}]")
    with pytest.raises(ConfigError, match=r"sources\.0\.path is .*data\.jsonl.*move it out of there"):
        check_run_folder(config, resume=False, overwrite=False)


def test_room_for_both_is_asked_for_with_numbers(tmp_path: Path) -> None:
    old_run(tmp_path)
    huge = [f"model.{name}=65536" for name in ("hidden_size", "intermediate_size")] + ["model.num_layers=1000"]
    with pytest.raises(ConfigError, match=r"a finished run of \d.*until the first step.*takes [\d,.]+ [GT]B more.*are free.*--folder"):
        check_run_folder(config_of(tmp_path, *huge), resume=False, overwrite=True)

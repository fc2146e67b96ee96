"""`midflight ledger --prove`: an honest run is never accused, whatever it lived through; whatever is changed in it is found."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from midflight.archive.prove.proof import prove
from midflight.errors import NoRun
from midflight.run.replay.decisions import decide_again
from midflight.trajectories.store import Store

from .proving import (
    FREE,
    PROTECTED,
    ColumnChange,
    Forger,
    Tampering,
    columns_of,
    digest_of,
    honest_run,
    plain_rows,
    proof_after,
    recompute_chain,
)

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "explore"
if NIGHTLY:
    pytestmark = pytest.mark.timeout(1800)  # a hundred runs and a thousand tamperings: two minutes of a quiet core


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [honest_run(folder / f"seed-{seed}", seed) for seed in range(100 if NIGHTLY else 12)]


def test_no_honest_run_is_accused(runs: list[Path]) -> None:
    for folder in runs:
        proof = prove(folder)
        assert proof.holds, f"{folder}: {proof.mistakes}"
        assert proof.num_steps >= 8 and proof.num_rollouts >= 32
        assert prove(folder, digest=proof.digest).holds
    assert sum(not folder.name.startswith("seed-") or folder.name.count("-") > 1 for folder in runs) > 3, "some have died"


NUM_TAMPERINGS = 1000 if NIGHTLY else 150
FORGED_EVERY = 5
"""Of so many tamperings the chain is written anew after one."""


def test_every_tampering_is_found(runs: list[Path], tmp_path: Path) -> None:
    missed: list[str] = []
    for seed in range(NUM_TAMPERINGS):
        if seed % FORGED_EVERY == 0:
            continue
        tampering = Tampering(seed)
        proof = proof_after(runs[seed % len(runs)], tmp_path / "changed", tampering)
        if proof.holds:
            missed.append(f"{seed}: {tampering.what}")
    assert not missed


def test_a_chain_that_somebody_wrote_anew_is_found_by_the_digest_that_was_kept_outside(runs: list[Path], tmp_path: Path) -> None:
    kept = [digest_of(folder) for folder in runs]
    for seed in range(0, NUM_TAMPERINGS, FORGED_EVERY):
        number = seed // FORGED_EVERY % len(runs)
        forger = Forger(seed)
        by_itself = proof_after(runs[number], tmp_path / "changed", forger)
        assert by_itself.holds, f"by itself it fits ({seed}: {forger.what}): {by_itself.mistakes}"
        proof = prove(tmp_path / "changed", digest=kept[number])
        assert not proof.holds and "written anew" in proof.mistakes[0], f"{seed}: {forger.what}"


def test_every_column_of_a_store_is_protected_or_said_not_to_be(runs: list[Path]) -> None:
    page = Path("docs/audit.md").read_text()
    for table, columns in columns_of(runs[0] / "store.sqlite").items():
        told = (*PROTECTED.get(table, ()), *FREE.get(table, ()))
        assert set(columns) == set(told), f"{table}: say what the proof answers for, here and in docs/audit.md"
        assert table not in PROTECTED or f"`{table}`" in page


@pytest.mark.parametrize(("table", "column"), [(table, column) for table, columns in PROTECTED.items() for column in columns])
def test_a_change_of_each_protected_column_is_found(runs: list[Path], crashed: list[Path], tmp_path: Path, table: str, column: str) -> None:
    having = [folder for folder in (*runs, *crashed) if any_rows(folder, table)]
    for number in range(10 if NIGHTLY else 3):
        change = ColumnChange(table, column, number)
        proof = proof_after(having[number % len(having)], tmp_path / "changed", change)
        assert not proof.holds, change.what


def any_rows(folder: Path, table: str) -> bool:
    with closing(sqlite3.connect(folder / "store.sqlite")) as file:
        return file.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone() is not None


@pytest.fixture(scope="module")
def crashed(runs: list[Path]) -> list[Path]:
    """The folders of the same runs as they were when they died, those with a step."""
    graves = [folder for folder in sorted(runs[0].parent.iterdir()) if folder not in runs and (folder / "metrics.jsonl").exists()]
    for folder in graves:
        with closing(sqlite3.connect(folder / "store.sqlite")) as file:  # what is copied from now on is one file
            file.execute("PRAGMA journal_mode = DELETE")
    return [folder for folder in graves if any('"kind":"step"' in line for line in (folder / "metrics.jsonl").open())]


def test_no_run_is_accused_that_died_and_did_not_go_on(crashed: list[Path]) -> None:
    assert len(crashed) > 3
    for folder in crashed:
        assert prove(folder).mistakes == []


def test_a_digest_of_another_run_is_found(runs: list[Path]) -> None:
    other = digest_of(runs[1])
    proof = prove(runs[0], digest=other)
    assert not proof.holds and "of no step of this run" in proof.mistakes[0]


@pytest.mark.parametrize(
    ("name", "key"),
    [("summary.json", "digest"), ("model/config.json", "midflight_steps_digest"), ("checkpoints/version-00000004/state.json", "chain")],
)
def test_what_keeps_another_digest_than_the_journal_is_named(runs: list[Path], tmp_path: Path, name: str, key: str) -> None:
    right = digest_of(runs[0])

    def keeping(digest: str) -> Callable[[Path], None]:
        def write(folder: Path) -> None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(json.dumps({key: digest}))

        return write

    assert proof_after(runs[0], tmp_path / "changed", keeping(right)).holds
    proof = proof_after(runs[0], tmp_path / "changed", keeping("ab" * 32))
    assert proof.mistakes and proof.mistakes[0].startswith(name)


def test_a_run_of_an_older_midflight_is_refused_with_a_sentence(runs: list[Path], tmp_path: Path) -> None:
    def older(folder: Path) -> None:
        with closing(sqlite3.connect(folder / "store.sqlite")) as file:
            file.execute("DROP TABLE seals")

    with pytest.raises(NoRun, match="has no digests: an older Midflight made the run"):
        proof_after(runs[0], tmp_path / "changed", older)


def test_the_books_decide_as_they_did(runs: list[Path]) -> None:
    for folder in runs:
        found = decide_again(folder)
        assert found.num_leases >= 8 and found.num_groups >= 16 and found.num_admissions >= 16
        assert not found.different, f"{folder}: {found.different}"
        assert not found.num_unrecorded


def test_a_group_that_could_not_start_by_what_is_recorded_is_named(runs: list[Path], tmp_path: Path) -> None:
    def changed(folder: Path) -> None:
        with closing(sqlite3.connect(folder / "store.sqlite")) as file:
            (number, detail) = file.execute("SELECT number, detail FROM seals WHERE event = 'admitted' ORDER BY number LIMIT 1").fetchone()
            served, *others = msgspec.msgpack.decode(detail)
            value = msgspec.msgpack.encode([served - 100, *others])
            file.execute("UPDATE seals SET detail = ? WHERE number = ?", (value, number))
            file.commit()

    proof = proof_after(runs[0], tmp_path / "changed", changed)
    assert "of the chain of store.sqlite was changed (group 0-" in proof.mistakes[0]
    (decision,) = decide_again(tmp_path / "changed").different
    assert "was started, and would wait: " in decision.what and "allows at version -100" in decision.what


def test_a_run_that_did_not_record_admission_is_proven_and_says_so(runs: list[Path], tmp_path: Path) -> None:
    def of_before(folder: Path) -> None:
        with closing(sqlite3.connect(folder / "store.sqlite")) as file:
            file.execute("DELETE FROM seals WHERE event IN ('admitted', 'interrupted')")
            file.commit()
        recompute_chain(folder)

    proof = proof_after(runs[0], tmp_path / "changed", of_before)
    assert proof.holds, proof.mistakes
    found = decide_again(tmp_path / "changed")
    assert not found.different and not found.num_admissions and found.num_unrecorded >= 16


def test_other_limits_decide_otherwise(runs: list[Path], tmp_path: Path) -> None:
    shutil.copytree(runs[0], tmp_path / "run")
    file = tmp_path / "run" / "config.toml"
    file.write_text(file.read_text() + "min_group_size = 2\ndrop_zero_spread = false\n")
    before = decide_again(tmp_path / "run")
    file.write_text(file.read_text().replace("groups_per_step = 2", "groups_per_step = 3"))
    assert decide_again(tmp_path / "run").different and before.num_leases
    file.write_text(file.read_text().replace("groups_per_step = 3", "groups_per_step = 1"))
    assert any("was started, and would wait" in one.what for one in decide_again(tmp_path / "run").different)


def test_what_had_ended_before_a_run_kept_digests_is_named_and_not_accused(runs: list[Path], tmp_path: Path) -> None:
    def resumed(folder: Path) -> None:
        with closing(sqlite3.connect(folder / "store.sqlite")) as file:
            file.execute("DROP TABLE seals")
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            line.pop("digests", None)
            line.pop("digest", None)
        shutil.rmtree(folder / "checkpoints")
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        Store(folder / "store.sqlite", run="loop").close()

    proof = proof_after(runs[0], tmp_path / "changed", resumed)
    assert proof.holds, proof.mistakes
    assert "rollouts ended before this run kept digests" in proof.notes[0]
    with pytest.raises(NoRun, match="begun by an older Midflight"):
        decide_again(tmp_path / "changed")


def test_another_bound_on_age_since_then_accuses_nobody(runs: list[Path], tmp_path: Path) -> None:
    def loosened(folder: Path) -> None:
        text = (folder / "config.toml").read_text()
        (folder / "config.toml").write_text(text.replace("max_staleness = ", "max_staleness = 1"))

    for folder in runs:
        assert proof_after(folder, tmp_path / "changed", loosened).holds


@pytest.mark.parametrize("digest", ["", " ", "abc", "not a digest at all"])
def test_a_digest_that_is_none_is_refused(runs: list[Path], digest: str) -> None:
    with pytest.raises(NoRun, match="is no digest: give at least 16"):
        prove(runs[0], digest=digest)


def test_rows_that_cannot_be_read_and_digests_that_are_none_are_named(runs: list[Path], tmp_path: Path) -> None:
    def cut(folder: Path) -> None:
        with closing(sqlite3.connect(folder / "store.sqlite")) as file:
            rowid, blob = file.execute("SELECT rowid, rows FROM rollouts WHERE reward IS NOT NULL AND num_trainable > 0").fetchone()
            rows = plain_rows(folder, blob)
            rows[0][3] = rows[0][3][:-1]
            file.execute("UPDATE rollouts SET rows = ? WHERE rowid = ?", (msgspec.msgpack.encode(rows), rowid))
            file.commit()

    def no_number(folder: Path) -> None:
        text = (folder / "metrics.jsonl").read_text()
        (folder / "metrics.jsonl").write_text(text.replace('"batch":"', '"batch":"zz', 1))

    for change in (cut, no_number):
        assert not proof_after(runs[0], tmp_path / "changed", change).holds

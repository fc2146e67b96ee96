"""Readers of a run of which some tokens were removed, and one file is damaged: each says so, and reads all the others."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from midflight.archive.conversation import conversation_of
from midflight.archive.search import WordIndex
from midflight.archive.store_reader import reading, rollout_key, stores_of
from midflight.cli import main
from midflight.errors import StoreCorrupt, TokensRemoved
from midflight.trajectories import segments
from midflight.trajectories.segments import SEGMENTS, place_of
from midflight.trajectories.store import Store

from .proving import honest_run, proof_after
from .stores import Recorded

REMOVED, DAMAGED, WHOLE = "0-0-0-0", "0-1-0-0", "0-2-0-0"


def segment_of(folder: Path, rollout: str) -> Path:
    epoch, position, attempt, sample = rollout.split("-")
    with closing(sqlite3.connect(folder / "store.sqlite")) as index:
        where = "epoch = ? AND position = ? AND attempt = ? AND sample = ?"
        ((value,),) = index.execute(f"SELECT rows FROM rollouts WHERE {where}", (epoch, position, attempt, sample)).fetchall()
    place = place_of(value)
    assert place is not None
    return folder / SEGMENTS / f"{place.segment:016x}.segment"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three groups of one rollout, each in a file of its own: the first is trained and removed, the second is damaged."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "run"
    with Recorded(folder) as store:
        store.train(store.group(0, (1.0,)), version=1)
        store.group(1, (0.5,))
        store.group(2, (0.25,))
        store.remove_old(1, max_bytes=0)
    file = segment_of(folder, DAMAGED)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    (folder / "metrics.jsonl").touch()
    return folder


def test_a_conversation_says_which_file_is_damaged_or_that_its_tokens_were_removed(folder: Path) -> None:
    assert conversation_of(folder, rollout_key(WHOLE), with_advantages=False).branches
    with pytest.raises(StoreCorrupt, match=segment_of(folder, DAMAGED).name):
        conversation_of(folder, rollout_key(DAMAGED), with_advantages=False)
    with pytest.raises(TokensRemoved, match=r"run\.keep_trajectories removed these tokens"):
        conversation_of(folder, rollout_key(REMOVED), with_advantages=False)


def test_samples_are_printed_with_a_sentence_in_the_place_of_what_cannot_be_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samples", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "answer 0" in said and f"{REMOVED}: Reading" in said and f"{DAMAGED}: Reading" in said


def test_an_export_leaves_them_out_and_says_how_many(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder.parent / "out.jsonl"
    assert main(["export", str(folder), "--out", str(out)]) == 0
    assert [json.loads(line)["rollout"] for line in out.read_text().splitlines()] == [WHOLE]
    assert "2 rollouts are left out. The first: Reading" in capsys.readouterr().out
    segment_of(folder, WHOLE).unlink()
    assert main(["export", str(folder), "--out", str(folder.parent / "none.jsonl")]) == 2
    assert not (folder.parent / "none.jsonl").exists() and "keep_trajectories removed" in capsys.readouterr().err


def test_words_are_found_in_all_others(folder: Path) -> None:
    index = WordIndex(folder)
    assert index.grow(10.0).complete
    with reading(folder) as store:
        store.beside(index.path)
        found = store.ask("SELECT position FROM beside.told JOIN beside.said ON said.rowid = number WHERE said MATCH 'answer'")
    assert found == [(2,)]


def test_the_books_add_up_without_the_tokens(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", str(folder)]) == 0
    assert "does not add up" not in capsys.readouterr().out


def test_a_proof_says_how_many_it_cannot_compute_again_and_accuses_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1)
    run = honest_run(tmp_path / "honest", 3)
    whole = proof_after(run, tmp_path / "whole", lambda folder: None)
    gone: list[int] = []

    def remove(folder: Path) -> None:
        ((index, place),) = stores_of(folder)
        before = len(list(place.glob("*.segment")))
        with closing(Store(index, run="loop", segments=place)) as store:
            store.remove_old(4, max_bytes=0)
        gone.append(before - len(list(place.glob("*.segment"))))

    proof = proof_after(run, tmp_path / "less", remove)
    assert proof.holds, proof.mistakes
    assert gone[0] >= 4 and proof.num_rollouts == whole.num_rollouts - gone[0]
    assert f"the tokens of {gone[0]} rollouts were removed" in proof.notes[0]
    assert "an earlier start removed them, or somebody did" in proof.notes[1]

    def remove_as_told(folder: Path) -> None:
        (folder / "config.toml").write_text((folder / "config.toml").read_text() + '[run]\nkeep_trajectories = "500GB"\n')
        remove(folder)

    assert len(proof_after(run, tmp_path / "told", remove_as_told).notes) == 1


def test_a_proof_names_a_segment_that_somebody_took_away(tmp_path: Path) -> None:
    run = honest_run(tmp_path / "honest", 3)

    def take_away(folder: Path) -> None:
        next((folder / SEGMENTS).glob("*.segment")).unlink()

    proof = proof_after(run, tmp_path / "less", take_away)
    assert not proof.holds and "the segment is not there" in proof.mistakes[0]

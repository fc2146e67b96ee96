"""Rows of one's own: read where they lie, by number and in order, and a broken one is named by its place."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from midflight.environments.rows import SourceRows, open_rows, plain, rows_of_entry
from midflight.errors import ConfigError

SUMS = [{"question": f"{i} + {i} =", "answer": 2 * i} for i in range(5)]

TEXT = st.text(st.characters(codec="utf-8"), max_size=6) | st.text('a,"\n\r\ufeff ', max_size=6)


def rows_of(path: Path) -> SourceRows:
    return open_rows(path, option="environment.sources.0.path")


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def same(rows: SourceRows) -> list[dict[str, object]]:
    """All of them, after a check that order and number agree."""
    assert list(rows) == [rows[i] for i in range(len(rows))]
    return list(rows)


def lines(rows: list[dict[str, object]], end: str = "\n") -> str:
    return "".join(json.dumps(row) + end for row in rows)


@pytest.mark.parametrize(
    "text",
    [
        lines(SUMS),
        lines(SUMS).rstrip("\n"),
        lines(SUMS, "\r\n"),
        "\ufeff" + lines(SUMS),
        "\n" + lines(SUMS, "\n\n"),
        lines(SUMS, "\r\n\r\n"),
    ],
    ids=["plain", "no newline at the end", "Windows", "byte order mark", "empty lines", "empty lines of Windows"],
)
def test_json_lines_are_read_however_they_were_written(tmp_path: Path, text: str) -> None:
    assert same(rows_of(written(tmp_path / "sums.jsonl", text))) == SUMS


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    assert len(rows_of(written(tmp_path / "none.jsonl", ""))) == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "a"', 'expected a JSON object, got \'{"question": "a"\''),
        ("[1, 2]", "expected a JSON object, got '[1, 2]'"),
        ("{'question': 1}", "correct the line, or remove it"),
        (b'{"question": "\xff"}', "expected a JSON object"),
        ("[" * 100_000, "expected a JSON object"),
    ],
)
def test_a_broken_line_is_named_by_file_and_line(tmp_path: Path, line: str | bytes, message: str) -> None:
    raw = line.encode() if isinstance(line, str) else line
    rows = rows_of(written(tmp_path / "t.jsonl", lines(SUMS[:2]).encode() + b"\n" + raw + b"\n" + lines(SUMS[2:]).encode()))
    assert rows[3] == SUMS[2]
    for read in (lambda: rows[2], lambda: list(rows)):
        with pytest.raises(ConfigError) as caught:
            read()
        assert str(caught.value).startswith(f"{tmp_path}/t.jsonl:4: ") and message in str(caught.value)


def test_csv_has_a_header_and_texts_and_records_over_several_lines(tmp_path: Path) -> None:
    simple = rows_of(written(tmp_path / "a.csv", "question,answer\n1 + 1 =,2\n2 + 2 =,4\n"))
    assert same(simple) == [{"question": "1 + 1 =", "answer": "2"}, {"question": "2 + 2 =", "answer": "4"}]
    text = '\ufeffquestion\tanswer\r\n"one\n\ntwo"\tthree\r\n\r\n"say ""hi"""\t\r\n'
    quoted = rows_of(written(tmp_path / "b.tsv", text))
    assert same(quoted) == [{"question": "one\n\ntwo", "answer": "three"}, {"question": 'say "hi"', "answer": ""}]
    assert (quoted.place(0), quoted.place(1)) == (f"{tmp_path}/b.tsv:2", f"{tmp_path}/b.tsv:6")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; expected a header"),
        ("a,b\n1,2\n3\n", "t.csv:3: the record has 1 fields and the header 2 (a, b)"),
        ("a,a\n1,2\n", "t.csv:1: the header names 'a' twice"),
        ('a,b\n1,2\n"3,4\n', "t.csv:3: not valid CSV"),
        ("a,b\n1,2\r3,4\n", "t.csv:2: not valid CSV"),
        (b"a,b\n1,\xff\n", "t.csv:2: not UTF-8 text"),
    ],
)
def test_a_broken_record_is_named_by_file_and_line(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        list(rows_of(written(tmp_path / "t.csv", text)))
    assert message in str(caught.value)


@given(st.lists(st.tuples(TEXT, TEXT), max_size=6), st.sampled_from(["\n", "\r\n"]), st.booleans())
@settings(max_examples=200, deadline=None)
def test_what_is_written_as_csv_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, records: list[tuple[str, str]], end: str, marked: bool
) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator=end, quoting=csv.QUOTE_ALL).writerows([("a", "b"), *records])
    path = tmp_path_factory.mktemp("csv") / "t.csv"
    rows = rows_of(written(path, "\ufeff" * marked + text.getvalue()))
    assert same(rows) == [{"a": a, "b": b} for a, b in records]
    before = 1
    for number, record in enumerate(records):
        assert rows.place(number) == f"{path}:{before + 1}"
        before += 1 + sum(field.count("\n") for field in record)


def test_parquet_and_saved_datasets_are_read_with_the_same_rows(tmp_path: Path) -> None:
    dataset = datasets.Dataset.from_list(SUMS)
    dataset.to_parquet(tmp_path / "sums.parquet")
    dataset.save_to_disk(tmp_path / "saved")
    assert same(rows_of(tmp_path / "sums.parquet")) == same(rows_of(tmp_path / "saved")) == SUMS
    datasets.DatasetDict(train=dataset, test=dataset).save_to_disk(tmp_path / "both")
    with pytest.raises(ConfigError, match=r"several splits; name one of them: .*both/train, .*both/test"):
        rows_of(tmp_path / "both")


def test_what_cannot_be_opened_is_said_with_what_there_is(tmp_path: Path) -> None:
    written(tmp_path / "train.jsonl", "{}\n")
    with pytest.raises(ConfigError, match=r"environment.sources.0.path is '.*trian.jsonl', and there is no such .* there is train.jsonl"):
        rows_of(tmp_path / "trian.jsonl")
    with pytest.raises(ConfigError, match=r"expected a file that ends in .jsonl"):
        rows_of(written(tmp_path / "rows.txt", ""))
    with pytest.raises(ConfigError, match="cannot be read as Parquet"):
        rows_of(written(tmp_path / "rows.parquet", "no"))
    with pytest.raises(ConfigError, match="load_from_disk cannot read"):
        rows_of(tmp_path)


# --- What a function returns ------------------------------------------------------------------------------------------


class Torch(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> dict[str, object]:
        return {"question": f"q{number}", "n": torch.tensor(number), "list": np.arange(2)}


def generated(count: int = 2) -> Iterator[dict[str, object]]:
    yield from SUMS[:count]


def saved() -> object:
    return datasets.Dataset.from_list(SUMS).with_format("torch")


def torches() -> Torch:
    return Torch()


def broken() -> list[object]:
    return [{"question": "a"}, "b", {"question": object()}]


def failing() -> None:
    raise RuntimeError("no network")


def nothing() -> None:
    return None


def entry(name: str, **options: object) -> SourceRows:
    return rows_of_entry(f"{__name__}:{name}", options, option="environment.sources.0.entry")  # type: ignore[arg-type]


def test_a_function_may_return_an_iterable_a_dataset_or_a_torch_dataset() -> None:
    assert same(entry("generated")) == SUMS[:2] and same(entry("generated", count=4)) == SUMS[:4]
    assert same(entry("SUMS")) == SUMS and same(entry("saved")) == SUMS
    assert same(entry("torches"))[2] == {"question": "q2", "n": 2, "list": [0, 1]}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("failing", {}, "failing failed with RuntimeError: no network"),
        ("generated", {"cout": 3}, "got an unexpected keyword argument 'cout'"),
        ("nothing", {}, "nothing returned NoneType, expected an iterable of dicts"),
        ("SUMS", {"count": 3}, "SUMS is no function, so it takes no options"),
    ],
)
def test_a_function_that_returns_no_rows_is_named_with_the_reason(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        entry(name, **options)
    assert message in str(caught.value) and "environment.sources.0.entry" in str(caught.value)


def test_a_row_that_is_no_dict_of_plain_values_is_named_by_number_and_column() -> None:
    rows = entry("broken")
    with pytest.raises(ConfigError, match=r"broken, row 1 is str 'b', expected a dict"):
        rows[1]
    with pytest.raises(ConfigError, match=r"broken, row 2: column 'question' is object, which has no form in JSON"):
        rows[2]


def test_an_iterable_without_an_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midflight.environments.rows.MAX_ITERATED", 3)
    with pytest.raises(ConfigError, match="more than 3 rows"):
        entry("generated", count=4)


def test_numbers_of_arrays_become_plain() -> None:
    assert plain({"a": np.float32(0.5), "b": [np.int64(3)], "c": None}, "here") == {"a": 0.5, "b": [3], "c": None}

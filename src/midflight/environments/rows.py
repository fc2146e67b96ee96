"""Rows of a user's own. JSON lines and CSV rows are found by their offsets in the file, Parquet and
saved datasets are mapped into memory, and a function gives rows itself. A row is read only when it
is asked for, so there may be any number of rows.
"""

import codecs
import csv
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import msgspec
import numpy as np

from midflight.entries import load_entry
from midflight.errors import ConfigError
from midflight.types import Json

Columns = dict[str, Json]

CHUNK = 16 * 2**20
"""Bytes that are read at a time to count lines."""
SHOWN = 80
"""The number of letters of a broken row that are shown."""
MAX_ITERATED = 1_000_000
"""The number of rows that an iterable may have, which is kept in memory as a whole."""
MAX_COMPARED = 1000
"""The number of rows of a function that are compared with those of another call."""


class SourceRows(Protocol):
    """Rows by number, from 0. Raises `ConfigError` with the place of a broken one."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Columns: ...

    def __iter__(self) -> Iterator[Columns]:
        """All rows in order. This is faster than reading them one by one."""
        ...

    def place(self, number: int) -> str:
        """The place of a row for messages, such as `tasks.jsonl:17`."""
        ...


def open_rows(path: Path, *, option: str) -> SourceRows:
    """Opens the rows of a file or folder, by the ending of its name. Raises `ConfigError` with the
    fault. Only the file is kept open.
    """
    if path.is_dir():
        return DatasetRows(_saved(path, option), str(path))
    if not path.is_file():
        near: list[str] = []
        if path.parent.is_dir():
            near = sorted(other.name for other in path.parent.glob("*") if _known(other))
        there = f"; in {path.parent} there is {', '.join(near)}" if near else ""
        raise ConfigError(
            f"{option} is {str(path)!r}, and there is no such file or folder (the current folder "
            f"is {Path.cwd()}){there}."
        )
    kind = path.suffix.lower()
    if kind in (".jsonl", ".ndjson"):
        return JsonLines(path)
    if kind in (".csv", ".tsv"):
        return CsvRows(path, separator="\t" if kind == ".tsv" else ",")
    if kind == ".parquet":
        return DatasetRows(_parquet(path, option), str(path))
    raise ConfigError(
        f"{option} is {str(path)!r}: expected a file that ends in .jsonl, .csv, .tsv or .parquet, "
        "or a folder of datasets.save_to_disk; write the rows as JSON lines, one object a line."
    )


def _known(path: Path) -> bool:
    if path.suffix.lower() in (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet"):
        return True
    return (path / "dataset_info.json").is_file()


# --- Lines of a file ------------------------------------------------------------------------------


class _RowPlaces:
    """The places of rows in a file. Two numbers for each row are in memory."""

    def __init__(self, path: Path, spans: Iterable[tuple[int, int]]) -> None:
        """`spans` are the first byte of each row, and the one after its last."""
        self.path = path
        self._spans = np.fromiter(spans, np.dtype((np.int64, 2)))
        self._file = path.open("rb")

    def __len__(self) -> int:
        return len(self._spans)

    def raw(self, number: int) -> bytes:
        begin, end = self._spans[number].tolist()
        self._file.seek(begin)
        read = self._file.read(end - begin)
        return read.removeprefix(codecs.BOM_UTF8) if begin == 0 else read

    def place(self, number: int) -> str:
        """The line of the file at which a row begins. Empty lines count too."""
        left = int(self._spans[number, 0])
        before = 0
        with self.path.open("rb") as file:
            while chunk := file.read(min(left, CHUNK)):
                before += chunk.count(b"\n")
                left -= len(chunk)
        return f"{self.path}:{before + 1}"


class JsonLines:
    """A file with a JSON object on each line. Empty lines are passed over."""

    def __init__(self, path: Path) -> None:
        self._places = _RowPlaces(path, _line_spans(path))
        self._decode = msgspec.json.Decoder(dict[str, Any]).decode

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> Columns:
        line = self._places.raw(number)
        try:
            return self._decode(line)
        except _UNREADABLE as error:
            shown = line.decode(errors="replace").strip()
            shown = shown if len(shown) <= SHOWN else f"{shown[:SHOWN]} ..."
            raise ConfigError(
                f"{self.place(number)}: expected a JSON object, got {shown!r} ({error}); correct "
                "the line, or remove it."
            ) from error

    def __iter__(self) -> Iterator[Columns]:
        decode = self._decode
        with self._places.path.open("rb") as file:
            lines = (line for line in file if not _is_empty(line))
            for number, line in enumerate(lines):
                try:
                    yield decode(line)
                except _UNREADABLE:
                    yield self[number]  # without a byte order mark, or with the fault

    def place(self, number: int) -> str:
        return self._places.place(number)


_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def _is_empty(line: bytes) -> bool:
    return len(line) <= 2 and not line.strip()


def _line_spans(path: Path) -> Iterator[tuple[int, int]]:
    """The bytes of each line that is not empty."""
    begin = 0
    with path.open("rb") as file:
        for line in file:
            end = begin + len(line)
            if not _is_empty(line):
                yield begin, end
            begin = end


class CsvRows:
    """A file with a header, then records. Every value is a text. A record may take several lines if
    these are in quotation marks.
    """

    def __init__(self, path: Path, *, separator: str) -> None:
        csv.field_size_limit(2**31 - 1)
        self._path = path
        self._separator = separator
        self._places = _RowPlaces(path, self._spans())
        """The header is the first."""
        if not len(self._places):
            raise ConfigError(
                f"{path} is empty; expected a header with the names of the columns, then a record "
                "a line."
            )
        self._header = self._fields(-1)
        twice = sorted({name for name in self._header if self._header.count(name) > 1})
        if twice:
            raise ConfigError(
                f"{self.place(-1)}: the header names {', '.join(map(repr, twice))} twice; give "
                "each column a name of its own."
            )

    def _spans(self) -> Iterator[tuple[int, int]]:
        """The bytes of the header and of each record."""
        with self._path.open("rb") as file:
            reader = self._reader(self._texts(file))
            begin = 0
            first_line = 1
            try:
                for record in reader:
                    end = file.tell()
                    if record:
                        yield begin, end
                    begin = end
                    first_line = reader.line_num + 1
            except csv.Error as error:
                raise ConfigError(
                    f"{self._path}:{first_line}: not valid CSV ({error}); correct the record that "
                    "begins there."
                ) from error

    def _reader(self, texts: Iterable[str]) -> Any:
        return csv.reader(texts, delimiter=self._separator, strict=True)

    def _texts(self, file: BinaryIO) -> Iterator[str]:
        for number, line in enumerate(file, start=1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"{self._path}:{number}: not UTF-8 text ({error}); save the file as UTF-8."
                ) from error

    def __len__(self) -> int:
        return len(self._places) - 1

    def __getitem__(self, number: int) -> Columns:
        return self._row(self._fields(number), number)

    def __iter__(self) -> Iterator[Columns]:
        with self._path.open("rb") as file:
            records = (record for record in self._reader(self._texts(file)) if record)
            next(records, None)  # the header
            for number, fields in enumerate(records):
                yield self._row(fields, number)

    def _fields(self, number: int) -> list[str]:
        """The fields of a record; -1 is the header."""
        return next(self._reader([self._places.raw(number + 1).decode()]))

    def _row(self, fields: list[str], number: int) -> Columns:
        if len(fields) != len(self._header):
            raise ConfigError(
                f"{self.place(number)}: the record has {len(fields)} fields and the header "
                f"{len(self._header)} ({', '.join(self._header)}); correct it, with quotation "
                "marks round fields that hold a separator."
            )
        return dict(zip(self._header, fields, strict=True))

    def place(self, number: int) -> str:
        return self._places.place(number + 1)


# --- What libraries hold --------------------------------------------------------------------------


class DatasetRows:
    """A `datasets.Dataset`, whose columns are in files that are mapped into memory."""

    def __init__(self, dataset: Any, origin: str) -> None:
        self._dataset = dataset.with_format(None)
        self._origin = origin

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, number: int) -> Columns:
        return plain(self._dataset[number], self.place(number))

    def __iter__(self) -> Iterator[Columns]:
        number = 0
        for batch in self._dataset.with_format("arrow").iter(1000):
            for row in cast("Iterable[object]", batch.to_pylist()):
                yield plain(row, self.place(number))
                number += 1

    def place(self, number: int) -> str:
        return f"{self._origin}, row {number}"


def _saved(path: Path, option: str) -> Any:
    datasets = _library(f"{option} is a folder, {str(path)!r}")
    try:
        found = datasets.load_from_disk(str(path))
    except Exception as error:  # another library may fail in any way
        raise ConfigError(
            f"{option} is {str(path)!r}, which datasets.load_from_disk cannot read: {error}; save "
            "it again."
        ) from error
    if not isinstance(found, datasets.Dataset):
        parts = ", ".join(f"{path}/{name}" for name in found)
        raise ConfigError(
            f"{option} is {str(path)!r}, which holds several splits; name one of them: {parts}."
        )
    return found


def _parquet(path: Path, option: str) -> Any:
    """A Parquet file. It is written once, uncompressed, into the cache of `datasets`, and mapped
    from there.
    """
    datasets = _library(f"{option} is a Parquet file, {str(path)!r}")
    datasets.disable_progress_bars()
    try:
        return datasets.Dataset.from_parquet(str(path))
    except Exception as error:
        why = error.__cause__ or error
        raise ConfigError(
            f"{option} is {str(path)!r}, which cannot be read as Parquet: {why}; write it again."
        ) from error


def _library(said: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{said}, which the package datasets reads; install it with: pip install "
            "'midflight[data]'."
        ) from error
    return datasets


# --- What a function returns ----------------------------------------------------------------------


class SequenceRows:
    """A list, or another object that has a length and gives rows by number, such as a torch
    `Dataset`.
    """

    def __init__(self, given: Sequence[object], origin: str, *, option: str) -> None:
        self._given = given
        self._origin = origin
        self._option = option

    def __len__(self) -> int:
        return len(self._given)

    def __getitem__(self, number: int) -> Columns:
        try:
            row = self._given[number]
        except Exception as error:
            raise _broken(self._option, self._origin, number, error) from error
        return plain(row, self.place(number))

    def __iter__(self) -> Iterator[Columns]:
        return (self[number] for number in range(len(self)))

    def place(self, number: int) -> str:
        return f"{self._origin}, row {number}"


def _broken(option: str, entry: str, number: int, error: Exception) -> ConfigError:
    return ConfigError(
        f"{option}: {entry} failed at row {number} (counted from 0) with {type(error).__name__}: "
        f"{error}; mend it, or leave that row out."
    )


def rows_of_entry(entry: str, arguments: Mapping[str, Json], *, option: str) -> SourceRows:
    """The rows that the function at `module:function` returns, or the object there if it is no
    function. Raises `ConfigError` if these are no rows.
    """
    found = load_entry(entry, option=option, such_as="my_tasks:rows")
    if callable(found) and not hasattr(found, "__getitem__"):
        try:
            found = found(**arguments)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            given = f" with {dict(arguments)}" if arguments else ""
            raise ConfigError(
                f"{option}: calling {entry}{given} failed with {type(error).__name__}: {error}; "
                "mend that function."
            ) from error
    elif arguments:
        raise ConfigError(f"{option}: {entry} is no function, so it takes no options; remove them.")
    return _given(found, entry, option)


def _given(found: Any, entry: str, option: str) -> SourceRows:
    if _has(found, "with_format", "column_names", "__getitem__"):  # a datasets.Dataset
        return DatasetRows(found, entry)
    is_text_or_dict = isinstance(found, str | bytes | Mapping)
    if _has(found, "__len__", "__getitem__") and not is_text_or_dict:
        return SequenceRows(found, entry, option=option)
    if not isinstance(found, Iterable) or is_text_or_dict:
        raise ConfigError(
            f"{option}: {entry} returned {type(found).__name__}, expected an iterable of dicts, or "
            "a Dataset of datasets or torch."
        )
    kept: list[object] = []
    try:
        kept.extend(islice(cast("Iterable[object]", found), MAX_ITERATED + 1))
    except Exception as error:
        raise _broken(option, entry, len(kept), error) from error
    if len(kept) > MAX_ITERATED:
        raise ConfigError(
            f"{option}: {entry} returned an iterable of more than {MAX_ITERATED:,} rows, which "
            "would be kept in memory; write them to a file and name it as path, or return "
            "something with a length that gives rows by number."
        )
    return SequenceRows(kept, entry, option=option)


class RowsSample(msgspec.Struct, frozen=True):
    """The number of rows that a function gave, and some of them, to compare two calls of it."""

    num_rows: int
    rows: dict[int, tuple[str, str]]
    """The hash and the first letters of a row, by its number."""

    def difference(self, later: "RowsSample") -> str:
        """What another call gave in another way, in words; empty if there is nothing."""
        if self.num_rows != later.num_rows:
            return f"{self.num_rows:,} rows, and then {later.num_rows:,}"
        for number, (digest, shown) in self.rows.items():
            other_digest, other_shown = later.rows[number]
            if digest != other_digest:
                return f"{shown} as row {number} (counted from 0), and then {other_shown}"
        return ""


def sample_of(rows: SourceRows) -> RowsSample:
    """A sample of the rows, evenly from the first to the last."""
    step = max(1, -(-len(rows) // MAX_COMPARED))
    sampled: dict[int, tuple[str, str]] = {}
    for number in range(0, len(rows), step):
        text = msgspec.json.encode(rows[number])
        sampled[number] = (hashlib.sha256(text).hexdigest(), text[:SHOWN].decode(errors="replace"))
    return RowsSample(len(rows), sampled)


def _has(found: object, *names: str) -> bool:
    return all(hasattr(found, name) for name in names)


def plain(row: object, place: str) -> Columns:
    """A row as JSON has it: numbers of NumPy and torch become Python's, and dates become texts.
    Raises `ConfigError` with the column that has no such form.
    """
    if not isinstance(row, Mapping):
        raise ConfigError(
            f"{place} is {type(row).__name__} {str(row)[:SHOWN]!r}, expected a dict of columns."
        )
    columns = cast("Mapping[object, object]", row)
    try:
        return cast(Columns, msgspec.to_builtins(dict(columns), str_keys=True, enc_hook=_number))
    except (TypeError, ValueError, NotImplementedError, RecursionError):
        for name, value in columns.items():
            try:
                msgspec.to_builtins(value, str_keys=True, enc_hook=_number)
            except Exception as error:
                raise ConfigError(
                    f"{place}: column {name!r} is {type(value).__name__}, which has no form in "
                    "JSON; make it a text, a number or a list, or leave it out."
                ) from error
        raise


def _number(value: Any) -> object:
    """A number of NumPy or torch as Python's, or an array of them as lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise NotImplementedError(f"{type(value).__name__} has no form in JSON")

"""Logs as one JSON object a line, for machines that collect them: `--log-format json`. By default
they are text, and nothing here is used.

Keys: `time` (UTC), `level`, `process`, `logger`, `message`, and `trace` where there is a traceback.
What libraries of other languages write by themselves, and stacks that are asked for, stay as they
are.
"""

import io
import logging
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec

PROCESS_VARIABLE = "MIDFLIGHT_JSON_LOG"
"""In the environment of a process whose log is to be JSON: its name."""


def json_line(
    process: str,
    message: str,
    *,
    level: str = "info",
    logger: str = "",
    trace: str = "",
    numbers: Mapping[str, object] | None = None,
) -> str:
    """Without its end. What has no value is left out."""
    record = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "level": level,
        "process": process,
        "logger": logger,
    }
    kept = {
        key: value
        for key, value in {**record, "message": message, "trace": trace, **(numbers or {})}.items()
        if value not in ("", None)
    }
    return msgspec.json.encode(kept).decode()


class JsonRecords(logging.Handler):
    """Writes records of `logging` to standard error's descriptor, each in one piece."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def emit(self, record: logging.LogRecord) -> None:
        trace = (
            ""
            if record.exc_info is None or record.exc_info[1] is None
            else "".join(traceback.format_exception(record.exc_info[1]))
        )
        told = json_line(
            self._process,
            record.getMessage(),
            level=record.levelname.lower(),
            logger=record.name,
            trace=trace,
        )
        os.write(2, told.encode() + b"\n")


class PrintedLines(io.TextIOBase):
    """Stands for standard output and standard error: each line that is printed is a record."""

    encoding = "utf-8"  # type: ignore[assignment]

    def __init__(self, process: str, *, level: str) -> None:
        super().__init__()
        self._process = process
        self._level = level
        self._left = ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._left = (self._left + text).split("\n")
        for line in lines:
            if line.strip():
                os.write(2, json_line(self._process, line, level=self._level).encode() + b"\n")
        return len(text)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2


def as_asked() -> None:
    """For a child at its start: from now on its log is JSON, if the launcher wants it so."""
    if process := os.environ.get(PROCESS_VARIABLE):
        logging.getLogger().addHandler(JsonRecords(process))
        sys.stdout = PrintedLines(process, level="info")
        sys.stderr = PrintedLines(process, level="error")
        sys.excepthook = lambda kind, error, trace: log_failure(error)
        threading.excepthook = lambda found: (
            None if found.exc_value is None else log_failure(found.exc_value)
        )


def log_failure(error: BaseException) -> None:
    """The traceback of a part's end, as text or as one record. `OSError` where the disk is full."""
    if process := os.environ.get(PROCESS_VARIABLE):
        trace = "".join(traceback.format_exception(error))
        os.write(
            2,
            json_line(
                process, f"{type(error).__name__}: {error}", level="error", trace=trace
            ).encode()
            + b"\n",
        )
    else:
        traceback.print_exception(error)
        sys.stderr.flush()

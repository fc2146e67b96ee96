"""Logs as one JSON object a line, for machines that collect them: `--log-format json`. By default
they are text, and nothing here is used.

Keys: `time` (UTC), `level`, `process`, `logger`, `message`, and `trace` if there is a traceback.
Output that libraries of other languages write by themselves, and stacks that are asked for, stay as
they are.
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
"""The environment variable that makes the log of a process JSON. Its value names the process."""


def json_line(
    process: str,
    message: str,
    *,
    level: str = "info",
    logger: str = "",
    trace: str = "",
    numbers: Mapping[str, object] | None = None,
) -> str:
    """Returns the line without its end. Keys without a value are left out."""
    record: dict[str, object] = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "level": level,
        "process": process,
        "logger": logger,
        "message": message,
        "trace": trace,
    }
    record.update(numbers or {})
    kept = {key: value for key, value in record.items() if value not in ("", None)}
    return msgspec.json.encode(kept).decode()


class JsonRecords(logging.Handler):
    """Writes records of `logging` to standard error's descriptor, each in one piece."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def emit(self, record: logging.LogRecord) -> None:
        trace = ""
        if record.exc_info is not None and record.exc_info[1] is not None:
            trace = "".join(traceback.format_exception(record.exc_info[1]))
        told = json_line(
            self._process,
            record.getMessage(),
            level=record.levelname.lower(),
            logger=record.name,
            trace=trace,
        )
        os.write(2, told.encode() + b"\n")


class PrintedLines(io.TextIOBase):
    """Replaces standard output or standard error: each line that is printed becomes a record."""

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


def use_json_logs() -> None:
    """Makes the log of this process JSON from now on, if the launcher asked for that. A child calls
    it at its start.
    """
    process = os.environ.get(PROCESS_VARIABLE)
    if not process:
        return
    logging.getLogger().addHandler(JsonRecords(process))
    sys.stdout = PrintedLines(process, level="info")
    sys.stderr = PrintedLines(process, level="error")
    sys.excepthook = lambda kind, error, trace: log_failure(error)
    threading.excepthook = _log_failure_of_thread


def _log_failure_of_thread(failed: threading.ExceptHookArgs) -> None:
    if failed.exc_value is not None:
        log_failure(failed.exc_value)


def log_failure(error: BaseException) -> None:
    """Writes the traceback of the error that ended a part, as text or as one record. Raises
    `OSError` if the disk is full.
    """
    process = os.environ.get(PROCESS_VARIABLE)
    if not process:
        traceback.print_exception(error)
        sys.stderr.flush()
        return
    trace = "".join(traceback.format_exception(error))
    line = json_line(process, f"{type(error).__name__}: {error}", level="error", trace=trace)
    os.write(2, line.encode() + b"\n")

"""Logs as JSON: whatever a process prints, logs or dies of is one object a line."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from midflight.observe.logs import PROCESS_VARIABLE

PROGRAM = """
import logging, sys, traceback, warnings
from midflight.observe import logs
logs.use_json_logs()
print("one", "two")
print("a part of a line", end=""); print(" and its end")
logging.getLogger("mine").warning("look at %s", {"a": 1})
logging.getLogger("mine").info("not said by default")
sys.stderr.write("first\\n\\nsecond\\n")
try:
    1 / 0
except ZeroDivisionError as error:
    logging.getLogger("mine").exception("it failed")
    logs.log_failure(error)
assert sys.stderr.fileno() == 2 and not sys.stdout.isatty()
import threading
thread = threading.Thread(target=lambda: [][0]); thread.start(); thread.join()
"""


def said(**environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60, env={**os.environ, **environ}
    )
    return done.stderr


def test_each_message_is_one_object_with_its_process_and_level() -> None:
    told = [json.loads(line) for line in said(**{PROCESS_VARIABLE: "engine1"}).splitlines()]
    assert {line["process"] for line in told} == {"engine1"} and all(line["time"] for line in told)
    assert [(line["level"], line["message"]) for line in told] == [
        ("info", "one two"),
        ("info", "a part of a line and its end"),
        ("warning", "look at {'a': 1}"),
        ("error", "first"),
        ("error", "second"),
        ("error", "it failed"),
        ("error", "ZeroDivisionError: division by zero"),
        ("error", "IndexError: list index out of range"),
    ]
    assert told[2]["logger"] == "mine" and "trace" not in told[2]
    assert all("1 / 0" in line["trace"] or "line 11" in line["trace"] for line in told[5:7]), "a traceback is part of its message"


def test_by_default_logs_are_text() -> None:
    assert said(**{PROCESS_VARIABLE: ""}).splitlines()[0] == "look at {'a': 1}"

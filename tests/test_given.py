"""Objects that a Python program gives to its run."""

from __future__ import annotations

import io
import subprocess
import sys
import threading

import pytest

from midflight import given
from midflight.entries import load_entry
from midflight.errors import ConfigError

WRITTEN = """
from __future__ import annotations
import sys
from typing import Literal
from midflight import given
bonus = 2
def reward(text: Literal["four"]) -> int: return len(text) + bonus
sys.stdout.buffer.write(given.pack({"reward": reward, "square": lambda x: x * x}) + b"the spec\\n")
"""
READ = """
import sys
from midflight import given
from midflight.entries import load_entry
given.read(sys.stdin.buffer)
print(sys.stdin.readline().strip(), "cloudpickle" in sys.modules)
found = [load_entry(given.entry_of(name), option="x", such_as="y") for name in ("reward", "square")]
print(found[0]("four"), found[1](3))
import typing
print(typing.get_type_hints(found[0])["text"])
"""


def test_functions_of_a_program_are_found_by_name_in_its_child_and_what_follows_them_stays_to_be_read() -> None:
    written = subprocess.run([sys.executable, "-c", WRITTEN], capture_output=True, check=True, timeout=30)
    read = subprocess.run([sys.executable, "-c", READ], input=written.stdout, capture_output=True, check=True, timeout=30)
    assert read.stdout.decode().splitlines() == ["the spec False", "6 9", "typing.Literal['four']"]


def test_an_object_that_cannot_travel_is_named_with_the_remedy() -> None:
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"waits cannot be sent .*lock.*module:function"):
        given.pack({"length": len, "waits": lambda: lock})


def test_a_run_without_the_program_says_where_the_object_is() -> None:
    given.read(io.BytesIO(given.NOTHING))
    with pytest.raises(ConfigError, match=r"midflight\.given:reward.*object of a Python program"):
        load_entry("midflight.given:reward", option="environment.entry", such_as="x:y")
    assert not hasattr(given, "torch")  # as compilers of PyTorch ask every module that is loaded


def test_a_name_that_was_not_given_is_refused_with_the_nearest() -> None:
    given.read(io.BytesIO(given.pack({"correct": len})))
    try:
        with pytest.raises(ConfigError, match=r"no 'corect'.*correct"):
            load_entry("midflight.given:corect", option="environment.entry", such_as="x:y")
    finally:
        given.read(io.BytesIO(given.NOTHING))

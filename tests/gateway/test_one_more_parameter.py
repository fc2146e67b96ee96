"""A new sampling parameter is one line."""

from __future__ import annotations

import os
import subprocess
import sys


def test_one_line_makes_a_parameter_accepted_bounded_merged_refused_by_name_and_sent() -> None:
    """In a process of its own, because bodies and tables are made when modules are imported."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ran = subprocess.run([sys.executable, "-m", "tests.gateway.one_more_parameter"], env=env, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (0, "one more\n"), ran.stderr

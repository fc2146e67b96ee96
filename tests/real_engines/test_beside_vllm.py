"""A version beside the served one in a worker of vLLM, as vLLM's own engine loads it there."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.real_engines.process import interpreter
from tests.real_engines.sites import save, untied

from midflight.engines.servers.command import INSIDE

pytestmark = pytest.mark.timeout(400)
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def test_answers_stay_while_a_version_comes_and_after_the_swap_are_those_of_its_folder_and_it_is_taken_back(tmp_path: Path) -> None:
    folders = [save(untied(version), tmp_path / str(version)) for version in (0, 1)]
    words = [interpreter("vllm"), Path(__file__).with_name("beside_vllm.py"), INSIDE, *folders]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, words)], env=environ | SETTINGS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == dict.fromkeys(found, True) and len(found) == 8

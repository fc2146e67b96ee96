"""A run where `/dev/shm` is too small for its versions, as in a container: they lie in the run's folder. Real processes, in a mount
namespace of their own."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from .processes import CONFIG, ENVIRON, steps

SMALL = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"', "sh")


def small_is_possible() -> bool:
    try:
        return subprocess.run([*SMALL, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def trained(folder: Path, *words: str) -> tuple[str, set[str]]:
    """Trains to the end. What the command said, and the names of files that it had in `weights/`."""
    said, seen = folder / "said.txt", set[str]()
    command = [*SMALL, sys.executable, "-m", "midflight", "train", *words, "--set", "warm_start.max_steps=2"]
    with said.open("wb") as output, subprocess.Popen(command, cwd=folder, env=ENVIRON, stdout=output, stderr=output) as process:
        try:
            while process.poll() is None:
                seen |= {path.name for path in (folder / "run" / "weights").glob("*")}
                time.sleep(0.02)
        finally:
            process.kill()
    assert process.returncode == 0, said.read_text()
    return said.read_text(), seen


@pytest.mark.skipif(not small_is_possible(), reason="this user may not mount a small /dev/shm")
def test_versions_lie_in_the_runs_folder_and_a_run_that_was_begun_with_files_goes_on_so(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(CONFIG)
    _, seen = trained(tmp_path, "small.toml", "--folder", "run", "--set", "run.steps=2")
    assert len(seen) == 3 and all(name.startswith("midflight-") and name.endswith(".weights") for name in seen)
    assert list((tmp_path / "run" / "weights").iterdir()) == [] and [line["version"] for line in steps(tmp_path / "run")] == [1, 2]

    config = tmp_path / "run" / "config.toml"
    written = config.read_text()
    assert 'transport = "shared_memory"' in written
    config.write_text(written.replace('transport = "shared_memory"', 'transport = "file"'))
    (tmp_path / "run" / "weights" / seen.pop().replace(".weights", "-left.weights")).write_bytes(b"of a run that was killed")
    said, seen = trained(tmp_path, "run/config.toml", "--resume", "--set", "run.steps=4")
    assert 'weights.transport was "file", which is gone; it is read as "auto".' in said
    assert len(seen) >= 3 and list((tmp_path / "run" / "weights").iterdir()) == []
    assert [line["version"] for line in steps(tmp_path / "run")] == [1, 2, 3, 4]
    assert 'transport = "shared_memory"' in config.read_text()

"""Bakes the commit into wheels and source distributions, as the file `midflight/commit`; everything
else is in pyproject.toml.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent


def bake(package: Path) -> None:
    """Nothing where git is not there, as in a source distribution, which brings the file along."""
    if not (ROOT / ".git").exists() or not package.is_dir():
        return
    done = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        (package / "commit").write_text(done.stdout)


class BuildWithCommit(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            bake(Path(self.build_lib) / "midflight")


class SourceWithCommit(sdist):
    def make_release_tree(self, base_dir: Any, files: Any) -> None:
        super().make_release_tree(base_dir, files)
        bake(Path(base_dir) / "src" / "midflight")


setup(cmdclass={"build_py": BuildWithCommit, "sdist": SourceWithCommit})

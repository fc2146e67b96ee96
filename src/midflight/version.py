"""The version of the package and the commit that it was built from. The version is written only
here; the package, the command line and the OpenAPI document read it.
"""

import subprocess
from pathlib import Path

__version__ = "0.2.0"

_PACKAGE = Path(__file__).parent


def commit() -> str | None:
    """The commit that the package was built from. A wheel has it in a file; in a checkout git is
    asked, and `+` means that files were changed since.

    None if neither knows it.
    """
    baked = _PACKAGE / "commit"
    if baked.is_file():
        return baked.read_text().strip() or None
    if not (_PACKAGE.parents[1] / ".git").exists():
        return None
    try:
        asked = [
            "git",
            "-C",
            str(_PACKAGE.parents[1]),
            "describe",
            "--always",
            "--exclude=*",
            "--abbrev=12",
            "--dirty=+",
        ]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=5.0, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    return done.stdout.strip() or None


def described() -> str:
    """Version and commit, such as `0.2.0 (commit 0123456789ab)`."""
    found = commit()
    return __version__ if found is None else f"{__version__} (commit {found})"

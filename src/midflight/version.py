"""The version, written here only: the package, the command line and the OpenAPI document say this
one. And the commit it was built from.
"""

import subprocess
from pathlib import Path

__version__ = "0.2.0"

_PACKAGE = Path(__file__).parent


def commit() -> str | None:
    """That the package was built from: written beside it in a wheel, asked of git in a checkout,
    with `+` where files were changed since.

    None where neither tells.
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
    return done.stdout.strip() or None if done.returncode == 0 else None


def described() -> str:
    """`0.2.0 (commit 0123456789ab)`."""
    return f"{__version__} (commit {found})" if (found := commit()) is not None else __version__

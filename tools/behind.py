"""Puts the packages of this interpreter's environment behind those of another one, which then finds
them where it has none of its own.

.venv/bin/python tools/behind.py .venv-agents
"""

import subprocess
import sys
import sysconfig
from pathlib import Path


def main() -> None:
    asked = [
        f"{sys.argv[1]}/bin/python",
        "-c",
        "import sysconfig; print(sysconfig.get_path('purelib'))",
    ]
    theirs = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    (Path(theirs) / "zz_common.pth").write_text(sysconfig.get_path("purelib") + "\n")


if __name__ == "__main__":
    main()

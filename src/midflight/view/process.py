"""The viewer's process beside a run: `python -m midflight.view.process DESCRIPTOR HOST FOLDER`. It
ends with the launcher, which gives it a guard.
"""

import os
import socket
import sys
from pathlib import Path

from midflight.view import app
from midflight.view.visit import RunFolders

NICENESS = 10
"""The niceness of the viewer's process: the run comes first."""


def main(descriptor: int, host: str, folder: Path) -> None:
    """Serves the viewer. The token comes in an environment variable, which only this user sees."""
    os.nice(NICENESS)
    token = os.environ.pop("MIDFLIGHT_CONTROL_TOKEN")
    viewer = app.build(RunFolders([folder]), host=host, token=token)
    app.serve(viewer, socket.socket(fileno=descriptor))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))

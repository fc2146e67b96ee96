"""A viewer beside a run. Its address is open from the beginning, and its process starts when a
browser first opens the address.

The viewer reads the run's folder and knows nothing of its processes: it can't stop the run, and the
run does not need it.
"""

import asyncio
import importlib.util
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from midflight.config.sections import Config
from midflight.observe.atomic_write import write_whole
from midflight.run.api.dashboard import VIEWER, ViewerAddress
from midflight.run.endpoint import TOKEN_VARIABLE
from midflight.run.launcher.folder import LOGS
from midflight.run.places.process import LocalProcess, child_environ
from midflight.wire.server import listen

HOST = "127.0.0.1"


def has_viewer() -> bool:
    """True if a run has an address for a viewer, because one is installed."""
    return importlib.util.find_spec("nicegui") is not None


def open_address(port: int) -> socket.socket:
    """The listening socket of a viewer. Raises `ConfigError` if the port cannot be had."""
    return listen(HOST, port, port_option="observe.view_port")


class RunViewer:
    """Opens the address, and starts the viewer for its first visitor. When the viewer ends, it
    reports that and does not start it again.
    """

    def __init__(self, config: Config, *, token: str, say: Callable[[str], None]) -> None:
        self._folder = Path(config.run.folder)
        self._log = self._folder / LOGS / "view.log"
        self._port = config.observe.view_port
        self._wanted = has_viewer()
        self._token = token
        self._say = say

    async def run(self) -> None:
        """Waits for a visitor, then for the viewer's end, then for ever; ended by its task group,
        which ends the viewer.
        """
        try:
            await self._serve()
        except Exception as error:  # a run goes on without its viewer, for any error
            self._say(
                f"no viewer beside this run ({error}); the run goes on. Look at it with: midflight "
                f"view {self._folder}"
            )
        await asyncio.Event().wait()

    async def _serve(self) -> None:
        if not self._wanted:
            return
        try:
            with open_address(self._port) as listener:
                viewing = ViewerAddress(f"http://{HOST}:{listener.getsockname()[1]}")
                write_whole(self._folder / VIEWER, msgspec.json.encode(viewing))
                await _visited(listener)
                status = await self._watch(listener)
        finally:
            (self._folder / VIEWER).unlink(missing_ok=True)
        self._say(
            f"the viewer ended with status {status} ({self._log}); the run goes on. Look at it with: "
            f"midflight view {self._folder}"
        )

    async def _watch(self, listener: socket.socket) -> int:
        """Waits for the end of a viewer, which ends with this process, or when this wait does."""
        arguments = [str(listener.fileno()), HOST, str(self._folder)]
        viewer = LocalProcess("viewer", log=self._log)
        await viewer.launch(
            [sys.executable, "-m", "midflight.view.process", *arguments],
            environ=child_environ({TOKEN_VARIABLE: self._token, "OMP_NUM_THREADS": "1"}),
            inherited=[listener],
        )
        try:
            return await viewer.ended()
        finally:
            viewer.signal(signal.SIGKILL)


async def _visited(listener: socket.socket) -> None:
    """Waits for the first connection, and leaves it for the viewer to accept; ended by its task
    group.
    """
    loop = asyncio.get_running_loop()
    came = asyncio.Event()
    loop.add_reader(listener, came.set)
    try:
        await came.wait()
    finally:
        loop.remove_reader(listener)

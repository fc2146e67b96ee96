"""What stands in for the makers of sandboxes: boxes in which scripts really run, and the frame of a maker's API over HTTP.

A box is a folder of this machine; each script has namespaces of its own with the box's folders in them. Nothing of the makers' is here but how
they are asked and how they answer.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

SHOWN = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")


class Machine:
    """One box. `asked` is what its maker was asked for."""

    def __init__(self, asked: Any, env: Mapping[str, str]) -> None:
        self.asked, self.env = asked, env
        self.folder = Path(tempfile.mkdtemp(prefix="box-"))

    def run(self, words: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
        """Waits for its end. Its output is all of it."""
        for name in ("tmp", "app", "logs", "tests"):
            (self.folder / name).mkdir(exist_ok=True)
        inside = ["bwrap", "--unshare-pid", "--unshare-net", "--die-with-parent", "--clearenv", "--proc", "/proc", "--dev", "/dev"]
        inside += [word for path in SHOWN if Path(path).exists() for word in ("--ro-bind", path, path)]
        inside += [word for each in self.folder.iterdir() for word in ("--bind", str(each), f"/{each.name}")]
        variables = {"PATH": "/usr/local/bin:/usr/bin:/bin", **self.env, **(env or {})}
        inside += [word for name, value in variables.items() for word in ("--setenv", name, value)]
        return subprocess.run([*inside, "--chdir", "/tmp", *words], stdin=subprocess.DEVNULL, capture_output=True)

    def end(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class Makers:
    """The boxes of one maker, and what it was asked."""

    env: ClassVar[Mapping[str, str]] = {}
    """What its boxes give to every program."""

    def __init__(self) -> None:
        self.boxes: dict[str, Machine] = {}
        self.made: list[Machine] = []
        self.is_down = False

    def make(self, asked: Any, name: str | None = None) -> str:
        name = name or uuid.uuid4().hex
        self.boxes[name] = Machine(asked, self.env)
        self.made.append(self.boxes[name])
        return name

    def end(self, name: str) -> None:
        if (machine := self.boxes.pop(name, None)) is not None:
            machine.end()

    def close(self) -> None:
        for name in list(self.boxes):
            self.end(name)


class Api(Makers):
    """A maker's API on a port of this machine, within `with`. Each method of `routes` gets the request, its body, and the parts of the path."""

    routes: ClassVar[Sequence[tuple[str, str, str]]] = ()
    """Method, pattern of the whole path, name of the function here."""

    def __enter__(self) -> Api:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self.close()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.server_address[1]}"

    def found(self, method: str, path: str) -> tuple[Callable[..., None], tuple[str, ...]] | None:
        for of, pattern, name in self.routes:
            if of == method and (match := re.fullmatch(pattern, path)):
                return getattr(self, name), match.groups()
        return None


class Asked(BaseHTTPRequestHandler):
    """One request. `json` and `answer` are what routes need of it."""

    protocol_version = "HTTP/1.1"
    api: ClassVar[Api]

    def _any(self) -> None:
        if self.headers.get("Transfer-Encoding") == "chunked":
            chunks = []
            while size := int(self.rfile.readline().strip() or b"0", 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            self.body = b"".join(chunks)
        else:
            self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        if self.api.is_down:
            self.answer(503, {"code": 503, "statusCode": 503, "message": "no capacity"})
        elif (found := self.api.found(self.command, path)) is None:
            self.answer(404, {"code": 404, "statusCode": 404, "message": f"nobody answers {self.command} {path}"})
        else:
            found[0](self, *found[1])

    do_GET = do_POST = do_DELETE = do_PUT = do_HEAD = _any

    @property
    def json(self) -> Any:
        return json.loads(self.body or b"null")

    def answer(self, status: int, said: Any = None, *, kind: str = "application/json") -> None:
        data = said if isinstance(said, bytes) else b"" if said is None else json.dumps(said).encode()
        self.send_response(status)
        if data:
            self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        del format, args


def _handler(api: Api) -> type[Asked]:
    return type("Handler", (Asked,), {"api": api})

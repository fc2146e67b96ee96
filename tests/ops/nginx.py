"""The real nginx with the files of `ops/nginx`, in a folder of its own."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

OPS = Path(__file__).parents[2] / "ops" / "nginx"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
MISSING = "nginx is not here (apt-get install nginx)"
WHOLE = """
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 1024; }}
http {{
    access_log {folder}/access.log;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/midflight.conf;
    include {folder}/midflight-gateways.conf;
}}
"""


def write_addresses(run: Path, urls: Sequence[str]) -> None:
    """The `endpoint.json` of each gateway, as a run writes them."""
    for number, url in enumerate(urls):
        folder = run / "shards" / str(number) if number else run
        folder.mkdir(parents=True, exist_ok=True)
        said = {"url": url, "control_token": "a-token-of-a-test", "run": "r", "model_path": "/m", "api_version": 1}
        (folder / "endpoint.json").write_text(json.dumps(said, separators=(",", ":")))


def addresses(run: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", str(OPS / "gateways.sh"), str(run)], capture_output=True, text=True, check=False)


@contextmanager
def one_address(run: Path, folder: Path) -> Generator[str]:
    """nginx before the gateways of a run. Gives its address."""
    assert NGINX is not None, MISSING
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    written = addresses(run)
    assert written.returncode == 0, written.stderr
    (folder / "midflight-gateways.conf").write_text(written.stdout)
    ours = (OPS / "midflight.conf").read_text()
    (folder / "midflight.conf").write_text(re.sub(r"listen 8000;", f"listen 127.0.0.1:{port};", ours))
    (folder / "nginx.conf").write_text(WHOLE.format(folder=folder))
    said = folder / "said.log"
    with said.open("wb") as out:
        command = [NGINX, "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(folder / "nginx.conf")]
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + 20
        while socket.socket().connect_ex(("127.0.0.1", port)) != 0:
            assert process.poll() is None and time.monotonic() < end, said.read_text()
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)

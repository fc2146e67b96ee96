"""Output tokens per second over HTTP, with all cores of this machine: `midflight serve` beside vLLM's own server.

    python benchmarks/serving.py [--vllm-python .venv-vllm/bin/python] [--threads 2] [--rounds 5]

Both serve the same folder to the same client: token ids to `/v1/completions`, all requests at once, whole answers of a fixed length. One
server answers while the other waits, in alternating rounds; medians. vLLM compiles its forward, and keeps no prefixes: every prompt is new.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import psutil
from engine import CONTEXT, model
from smoke import options_of

from midflight.text.byte_tokenizer import write_byte_tokenizer

PATIENCE_SECONDS = 400.0
"""For a server that compiles."""


class Server:
    """A child that answers on `port` when `ready` does."""

    def __init__(self, command: list[str], *, port: int, environ: dict[str, str], stack: ExitStack) -> None:
        self.url = f"http://127.0.0.1:{port}/v1/completions"
        self._log = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="midflight-"))) / "log"
        log = stack.enter_context(self._log.open("w"))
        self._child = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | environ)
        stack.callback(self._end)

    async def ready(self, session: aiohttp.ClientSession) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            if self._child.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"a server did not come up:\n{self._log.read_text()[-3000:]}")
            try:
                await one(session, self.url, prompt=[65] * 8, answer=2)
            except (aiohttp.ClientError, TimeoutError):
                await asyncio.sleep(0.5)
            else:
                return

    def cpu_seconds(self) -> float:
        """Of the process and its children."""
        own = psutil.Process(self._child.pid)
        times = [each.cpu_times() for each in (own, *own.children(recursive=True))]
        return sum(spent.user + spent.system for spent in times)

    def _end(self) -> None:
        family = psutil.Process(self._child.pid).children(recursive=True)
        self._child.terminate()
        try:
            self._child.wait(30)
        except subprocess.TimeoutExpired:
            self._child.kill()
        for each in family:
            if each.is_running():
                each.kill()


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def midflight(folder: Path, options: argparse.Namespace, stack: ExitStack) -> Server:
    port = free_port()
    command = [sys.executable, "-m", "midflight", "serve", "--model", str(folder), "--port", str(port), "--max-context", str(CONTEXT)]
    command += ["--max-running", str(max(options.running)), "--set", f"engine.threads={options.threads}", "--set", "engine.prefix_mb=0"]
    return Server(command, port=port, environ={"HF_HUB_OFFLINE": "1"}, stack=stack)


def vllm(folder: Path, options: argparse.Namespace, stack: ExitStack) -> Server:
    port, python = free_port(), options.vllm_python.absolute()
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", "policy"]
    command += ["--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", str(CONTEXT)]
    command += ["--max-num-seqs", str(max(options.running)), "--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
    environ = {"OMP_NUM_THREADS": str(options.threads), "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environ |= {"PATH": f"{python.parent}:/usr/bin:/bin", "PYTHONPATH": ""}
    return Server(command, port=port, environ=environ, stack=stack)


async def one(session: aiohttp.ClientSession, url: str, *, prompt: list[int], answer: int) -> int:
    body = {"model": "policy", "prompt": prompt, "max_tokens": answer, "ignore_eos": True, "temperature": 1.0}
    async with session.post(url, json=body) as got:
        got.raise_for_status()
        return int((await got.json())["usage"]["completion_tokens"])


async def rate(session: aiohttp.ClientSession, server: Server, *, running: int, options: argparse.Namespace) -> tuple[float, float]:
    """Tokens per second of wall time, and of the server's CPU time. As many requests as make the smallest load a few seconds' work."""
    prompts = [[random.randrange(256) for _ in range(options.prompt)] for _ in range(running)]
    began, cpu = time.perf_counter(), server.cpu_seconds()
    found = await asyncio.gather(*(one(session, server.url, prompt=prompt, answer=options.answer) for prompt in prompts))
    return sum(found) / (time.perf_counter() - began), sum(found) / (server.cpu_seconds() - cpu + 1e-9)


async def table(servers: dict[str, Server], options: argparse.Namespace) -> None:
    print("tokens/s of wall time (of the server's CPU time)\n")
    print(f"| requests | {' | '.join(servers)} | midflight / vllm |\n{'|---' * (len(servers) + 2)}|")
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_SECONDS)) as session:
        for server in servers.values():
            await server.ready(session)
        for running in options.running:
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
            for number in range(options.rounds + 1):
                for name in list(servers)[:: 1 if number % 2 else -1]:
                    measured = await rate(session, servers[name], running=running, options=options)
                    if number:  # the first warms up
                        found[name].append(measured)
            medians = {name: [statistics.median(each) for each in zip(*pairs, strict=True)] for name, pairs in found.items()}
            cells = [f"{wall:,.0f} ({cpu:,.0f})" for wall, cpu in medians.values()]
            ratio = f"{medians['midflight'][0] / medians['vllm'][0]:.2f}" if "vllm" in medians else ""
            print(f"| {running} | {' | '.join(cells)} | {ratio} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 8, 32, 64], help="requests at once")
    parser.add_argument("--threads", type=int, default=2, help="of each server")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vllm-python", type=Path, help="interpreter of an environment with vLLM")
    options = options_of(parser, running=[1, 4], threads=1, answer=8, hidden=64, rounds=1)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="midflight-")))
        model(options.hidden).save_pretrained(folder)
        write_byte_tokenizer(folder)
        servers = {"midflight": midflight(folder, options, stack)}
        if options.vllm_python:
            servers["vllm"] = vllm(folder, options, stack)
        asyncio.run(table(servers, options))


if __name__ == "__main__":
    main()

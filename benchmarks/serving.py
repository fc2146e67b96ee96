"""Output tokens per second over HTTP, with all cores of this machine: `midflight serve` beside
servers of other people.

    python benchmarks/serving.py [--model FOLDER] [--threads 2] [--rounds 5] [--generate] \\
        [--vllm-python .venv-vllm/bin/python] \\
        [--llama-python .venv-llama/bin/python --gguf FILE ...]

| side | what it is |
|---|---|
| midflight | `midflight serve` with an embedded engine |
| vllm | vLLM's own server on a CPU, which compiles its forward |
| llama NAME | llama-cpp-python's server over a GGUF file, which answers one request after the other; one side for each `--gguf` |
| generate | `transformers`' own `generate` behind the same route: all requests that wait are one batch (`serving_generate.py`) |

All serve the same folder, by default a made model of 3.2 million parameters, to the same client:
token ids to `/v1/completions` (llama.cpp takes their text), all requests at once, whole answers of
a fixed length. One server answers while the others wait, in alternating rounds; medians. Nobody
keeps prefixes: every prompt is new. With the table stand two bounds that no server passes: what
reading the weights once a step takes at the speed of a copy, and what their products take at the
speed of one large product.
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
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import psutil
import torch
from engine import CONTEXT, model
from smoke import options_of

from midflight.models.sizes import sizes_of
from midflight.text.byte_tokenizer import write_byte_tokenizer
from midflight.text.tokenizer import Tokenizer

PATIENCE_SECONDS = 900.0
"""For a server that compiles, and for one that answers one request after the other."""


class Server:
    """A child that answers on `port` when `ready` does."""

    def __init__(
        self,
        command: list[str],
        *,
        port: int,
        environ: dict[str, str],
        stack: ExitStack,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """`tokenizer`: of a server that takes texts only."""
        self._tokenizer = tokenizer
        self.url = f"http://127.0.0.1:{port}/v1/completions"
        self._log = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="midflight-"))) / "log"
        )
        log = stack.enter_context(self._log.open("w"))
        self._child = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | environ)
        stack.callback(self._end)

    async def ready(self, session: aiohttp.ClientSession) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            if self._child.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"a server did not come up:\n{self._log.read_text()[-3000:]}")
            try:
                await one(session, self, prompt=[65] * 8, answer=2)
            except (aiohttp.ClientError, TimeoutError):
                await asyncio.sleep(0.5)
            else:
                return

    def body(self, prompt: list[int], answer: int) -> dict[str, object]:
        """A request for `answer` tokens, however they end."""
        if self._tokenizer is None:
            return {
                "model": "policy",
                "prompt": prompt,
                "max_tokens": answer,
                "ignore_eos": True,
                "temperature": 1.0,
            }
        never = {str(token_id): -100.0 for token_id in self._tokenizer.eos_token_ids}
        text = self._tokenizer.decode(prompt)
        return {
            "model": "policy",
            "prompt": text,
            "max_tokens": answer,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "logit_bias": never,
        }

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
    command = [
        sys.executable,
        "-m",
        "midflight",
        "serve",
        "--model",
        str(folder),
        "--port",
        str(port),
        "--max-context",
        str(CONTEXT),
    ]
    command += [
        "--max-running",
        str(max(options.running)),
        "--set",
        f"engine.threads={options.threads}",
        "--set",
        "engine.prefix_mb=0",
    ]
    return Server(command, port=port, environ={"HF_HUB_OFFLINE": "1"}, stack=stack)


def vllm(folder: Path, options: argparse.Namespace, stack: ExitStack) -> Server:
    port = free_port()
    python = options.vllm_python.absolute()
    command = [
        str(python),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(folder),
        "--served-model-name",
        "policy",
    ]
    command += [
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
        "--dtype",
        "float32",
        "--max-model-len",
        str(CONTEXT),
    ]
    command += [
        "--max-num-seqs",
        str(max(options.running)),
        "--no-enable-prefix-caching",
        "--disable-uvicorn-access-log",
    ]
    environ = {
        "OMP_NUM_THREADS": str(options.threads),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    environ |= {"PATH": f"{python.parent}:/usr/bin:/bin", "PYTHONPATH": ""}
    return Server(command, port=port, environ=environ, stack=stack)


def llama(gguf: Path, folder: Path, options: argparse.Namespace, stack: ExitStack) -> Server:
    port = free_port()
    python = options.llama_python.absolute()
    command = [
        str(python),
        "-m",
        "llama_cpp.server",
        "--model",
        str(gguf),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    command += [
        "--n_ctx",
        str(CONTEXT),
        "--n_threads",
        str(options.threads),
        "--n_threads_batch",
        str(options.threads),
    ]
    environ = {"PYTHONPATH": "", "OMP_NUM_THREADS": str(options.threads)}
    return Server(
        command, port=port, environ=environ, stack=stack, tokenizer=Tokenizer.load(folder)
    )


def generate(folder: Path, options: argparse.Namespace, stack: ExitStack) -> Server:
    port = free_port()
    command = [
        sys.executable,
        str(Path(__file__).with_name("serving_generate.py")),
        str(folder),
        str(port),
        str(options.threads),
    ]
    return Server(command, port=port, environ={"HF_HUB_OFFLINE": "1"}, stack=stack)


async def one(
    session: aiohttp.ClientSession, server: Server, *, prompt: list[int], answer: int
) -> int:
    async with session.post(server.url, json=server.body(prompt, answer)) as got:
        got.raise_for_status()
        return int((await got.json())["usage"]["completion_tokens"])


async def rate(
    session: aiohttp.ClientSession, server: Server, *, running: int, options: argparse.Namespace
) -> tuple[float, float]:
    """Tokens per second of wall time, and of the server's CPU time. As many requests as make the
    smallest load a few seconds' work.
    """
    prompts = [
        [random.randrange(options.vocabulary) for _ in range(options.prompt)]
        for _ in range(running)
    ]
    began = time.perf_counter()
    cpu = server.cpu_seconds()
    found = await asyncio.gather(
        *(one(session, server, prompt=prompt, answer=options.answer) for prompt in prompts)
    )
    return sum(found) / (time.perf_counter() - began), sum(found) / (
        server.cpu_seconds() - cpu + 1e-9
    )


async def table(servers: dict[str, Server], options: argparse.Namespace) -> None:
    print("tokens/s of wall time (of the server's CPU time)\n")
    others = [name for name in servers if name != "midflight"]
    heads = ["requests", *servers, *(f"midflight / {name}" for name in others)]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=PATIENCE_SECONDS)
    ) as session:
        for server in servers.values():
            await server.ready(session)
        for running in options.running:
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
            for number in range(options.rounds + 1):
                for name in list(servers)[:: 1 if number % 2 else -1]:
                    measured = await rate(session, servers[name], running=running, options=options)
                    if number:  # the first warms up
                        found[name].append(measured)
            medians = {
                name: [statistics.median(each) for each in zip(*pairs, strict=True)]
                for name, pairs in found.items()
            }
            cells = [f"{wall:,.0f} ({cpu:,.0f})" for wall, cpu in medians.values()]
            cells += [f"{medians['midflight'][0] / medians[name][0]:.2f}" for name in others]
            print(f"| {running} | {' | '.join(cells)} |", flush=True)


def best_seconds(deed: Callable[[], object]) -> float:
    """Of seven times, the shortest."""
    found = list[float]()
    for _ in range(7):
        began = time.perf_counter()
        deed()
        found.append(time.perf_counter() - began)
    return min(found)


def roofline(folder: Path, options: argparse.Namespace) -> str:
    """What no step can be faster than, with the weights in float32."""
    torch.set_num_threads(options.threads)
    sizes = sizes_of(folder)
    source = torch.ones(2**26)
    square = torch.ones(2048, 2048)
    target = torch.ones_like(source)
    product = torch.empty_like(square)
    bandwidth = 2 * source.nbytes / best_seconds(lambda: target.copy_(source))
    products = 2 * 2048**3 / best_seconds(lambda: torch.mm(square, square, out=product))
    weights = sizes.weight_bytes("float32")
    work = 2 * sizes.num_parameters
    return (
        f"bounds: {weights / 1e6:,.0f} MB of weights a step at the {bandwidth / 1e9:.1f} GB/s of a "
        f"copy are {bandwidth / weights:,.1f} steps/s; their products at the {products / 1e9:,.0f} "
        f"GFLOP/s of a large one are {products / work:,.0f} tokens/s, however many requests."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--running", type=int, nargs="+", default=[1, 8, 32, 64], help="requests at once"
    )
    parser.add_argument("--threads", type=int, default=2, help="of each server")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, help="folder of the model, instead of a made one")
    parser.add_argument("--vllm-python", type=Path, help="interpreter of an environment with vLLM")
    parser.add_argument(
        "--llama-python",
        type=Path,
        help="interpreter of an environment with llama-cpp-python[server]",
    )
    parser.add_argument(
        "--gguf", type=Path, nargs="+", default=[], help="the model's GGUF files, for llama.cpp"
    )
    parser.add_argument("--generate", action="store_true", help="beside `generate` of transformers")
    options = options_of(
        parser, running=[1, 4], threads=1, answer=8, hidden=64, rounds=1, generate=True
    )
    with ExitStack() as stack:
        folder = options.model or made(options.hidden, stack)
        options.vocabulary = (
            min(256, sizes_of(folder).vocab_size)
            if options.model is None
            else sizes_of(folder).vocab_size
        )
        print(roofline(folder, options), flush=True)
        servers = {"midflight": midflight(folder, options, stack)}
        if options.vllm_python:
            servers["vllm"] = vllm(folder, options, stack)
        for gguf in options.gguf:
            servers[f"llama {gguf.stem}"] = llama(gguf, folder, options, stack)
        if options.generate:
            servers["generate"] = generate(folder, options, stack)
        asyncio.run(table(servers, options))


def made(hidden: int, stack: ExitStack) -> Path:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="midflight-")))
    model(hidden).save_pretrained(folder)
    write_byte_tokenizer(folder)
    return folder


if __name__ == "__main__":
    main()

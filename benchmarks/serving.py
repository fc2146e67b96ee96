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
| generate | `transformers`' own `generate` behind the same route: all requests that wait are one batch (`sides/generate_server.py`) |

All serve the same folder, by default a made model of 3.2 million parameters, to the same client:
token ids to `/v1/completions` (llama.cpp takes their text), all requests at once, whole answers of
a fixed length. One server answers while the processes of the others are stopped (vLLM's take a fifth
of a core while they wait for requests), in alternating rounds; medians. Nobody keeps prefixes: every
prompt is new. With the table stand two bounds that no server passes: what
reading the weights once a step takes at the speed of a copy, and what their products take at the
speed of one large product.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import aiohttp
import torch
from harness.arguments import Arguments
from harness.models import small_model, write_model
from harness.processes import (
    PATIENCE_SECONDS,
    end,
    environment,
    family,
    family_cpu_seconds,
    free_port,
    side,
)
from harness.report import Report
from harness.rounds import Cost, median_of, turns
from harness.runs import sets

from midflight.models.sizes import sizes_of
from midflight.text.tokenizer import Tokenizer

CONTEXT = 256


class Server:
    """A child that answers on `port` when `ready` does."""

    def __init__(
        self,
        command: Sequence[object],
        *,
        port: int,
        environ: dict[str, str],
        stack: ExitStack,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """`tokenizer`: of a server that takes texts only."""
        self._tokenizer = tokenizer
        self.url = f"http://127.0.0.1:{port}/v1/completions"
        place = stack.enter_context(tempfile.TemporaryDirectory(prefix="midflight-"))
        self._log = Path(place) / "log"
        log = stack.enter_context(self._log.open("w"))
        self._child = subprocess.Popen(
            [str(word) for word in command], stdout=log, stderr=log, env=environ
        )
        stack.callback(end, self._child)

    async def ready(self, session: aiohttp.ClientSession) -> None:
        """Waits until it answers. `SystemExit` where it ends or takes too long."""
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            if self._child.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"a server did not come up:\n{self._log.read_text()[-3000:]}")
            try:
                await self.ask(session, prompt=[65] * 8, answer=2)
            except (aiohttp.ClientError, TimeoutError):
                await asyncio.sleep(0.5)
            else:
                return

    async def ask(self, session: aiohttp.ClientSession, *, prompt: list[int], answer: int) -> int:
        """The number of tokens of its answer."""
        async with session.post(self.url, json=self._body(prompt, answer)) as got:
            got.raise_for_status()
            return int((await got.json())["usage"]["completion_tokens"])

    def _body(self, prompt: list[int], answer: int) -> dict[str, object]:
        """A request for `answer` tokens, however they end."""
        body: dict[str, object] = {"model": "policy", "max_tokens": answer, "temperature": 1.0}
        if self._tokenizer is None:
            return body | {"prompt": prompt, "ignore_eos": True}
        never = {str(token_id): -100.0 for token_id in self._tokenizer.eos_token_ids}
        text = self._tokenizer.decode(prompt)
        return body | {"prompt": text, "top_p": 1.0, "top_k": 0, "logit_bias": never}

    def cpu_seconds(self) -> float:
        """Adds up the process and its children."""
        return family_cpu_seconds(self._child.pid)

    @contextmanager
    def stopped(self) -> Generator[None]:
        """Its processes do nothing within the block."""
        members = family(self._child.pid)
        for pid in members:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in members:
                os.kill(pid, signal.SIGCONT)


def midflight(folder: Path, options: argparse.Namespace, stack: ExitStack) -> Server:
    port = free_port()
    command = [sys.executable, "-m", "midflight", "serve", "--model", folder, "--port", port]
    command += ["--max-context", CONTEXT, "--max-running", max(options.running)]
    command += sets([f"engine.threads={options.threads}", "engine.prefix_mb=0"])
    environ = environment(threads=options.threads)
    return Server(command, port=port, environ=environ, stack=stack)


def vllm(folder: Path, options: argparse.Namespace, stack: ExitStack) -> Server:
    port = free_port()
    python = options.vllm_python.absolute()
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    command += ["--served-model-name", "policy", "--host", "127.0.0.1", "--port", port]
    command += ["--dtype", "float32", "--max-model-len", CONTEXT]
    command += ["--max-num-seqs", max(options.running), "--no-enable-prefix-caching"]
    command += ["--disable-uvicorn-access-log"]
    environ = environment(
        threads=options.threads,
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_NO_USAGE_STATS="1",
        PATH=f"{python.parent}:/usr/bin:/bin",
        PYTHONPATH="",
    )
    return Server(command, port=port, environ=environ, stack=stack)


def llama(gguf: Path, folder: Path, options: argparse.Namespace, stack: ExitStack) -> Server:
    port = free_port()
    command = [options.llama_python.absolute(), "-m", "llama_cpp.server", "--model", gguf]
    command += ["--host", "127.0.0.1", "--port", port, "--n_ctx", CONTEXT]
    command += ["--n_threads", options.threads, "--n_threads_batch", options.threads]
    return Server(
        command,
        port=port,
        environ=environment(threads=options.threads, PYTHONPATH=""),
        stack=stack,
        tokenizer=Tokenizer.load(folder),
    )


def generate(folder: Path, options: argparse.Namespace, stack: ExitStack) -> Server:
    port = free_port()
    command = side("generate_server", folder, port, options.threads)
    environ = environment(threads=options.threads)
    return Server(command, port=port, environ=environ, stack=stack)


async def answered(
    session: aiohttp.ClientSession, server: Server, *, running: int, options: argparse.Namespace
) -> Cost:
    """What so many requests at once take: seconds a token of the clock, and of the server's CPU."""
    asked = []
    for _ in range(running):
        prompt = [random.randrange(options.vocabulary) for _ in range(options.prompt)]
        asked.append(server.ask(session, prompt=prompt, answer=options.answer))
    began = time.perf_counter()
    cpu = server.cpu_seconds()
    tokens = sum(await asyncio.gather(*asked))
    wall = time.perf_counter() - began
    return Cost(wall / tokens, (server.cpu_seconds() - cpu + 1e-9) / tokens)


async def print_rates(
    servers: dict[str, Server], options: argparse.Namespace, report: Report
) -> None:
    report.say("tokens/s of wall time (of the server's CPU time)")
    others = [name for name in servers if name != "midflight"]
    table = report.table("requests", *servers, *(f"midflight / {name}" for name in others))
    limit = aiohttp.ClientTimeout(total=PATIENCE_SECONDS)
    async with aiohttp.ClientSession(timeout=limit) as session:
        for server in servers.values():
            await server.ready(session)
        for running in options.running:
            found: dict[str, list[Cost]] = {name: [] for name in servers}
            for name, counts in turns(servers, rounds=options.rounds, warmup=1):
                with ExitStack() as stack:
                    for other in servers.keys() - {name}:
                        stack.enter_context(servers[other].stopped())
                    await servers[name].ready(session)
                    cost = await answered(session, servers[name], running=running, options=options)
                if counts:
                    found[name].append(cost)
            wall = {name: median_of(costs, lambda c: 1 / c.wall) for name, costs in found.items()}
            cells: list[str] = []
            for name, costs in found.items():
                cells.append(f"{wall[name]:,.0f} ({median_of(costs, lambda c: 1 / c.cpu):,.0f})")
            for name in others:
                ratio = wall["midflight"] / wall[name]
                cells.append(f"{ratio:.2f}")
                report.figure(f"serving {running}: midflight / {name}", ratio)
            table.row(running, *cells)


# --- What no step can be faster than --------------------------------------------------------------


def best_seconds(deed: Callable[[], object]) -> float:
    """The shortest of seven times."""
    found: list[float] = []
    for _ in range(7):
        began = time.perf_counter()
        deed()
        found.append(time.perf_counter() - began)
    return min(found)


def bounds(folder: Path, options: argparse.Namespace) -> str:
    """Says what no step can be faster than, with the weights in float32."""
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
    arguments = Arguments(__doc__, rounds=5)
    arguments.option("--running", [1, 8, 32, 64], smoke=[1, 4], help="requests at once")
    arguments.option("--threads", 2, smoke=1, help="of each server")
    arguments.option("--prompt", 32)
    arguments.option("--answer", 128, smoke=8)
    arguments.option("--hidden", 256, smoke=64)
    arguments.option("--model", None, type=Path, help="folder of the model, instead of a made one")
    arguments.option(
        "--vllm-python", None, type=Path, help="interpreter of an environment with vLLM"
    )
    arguments.option(
        "--llama-python",
        None,
        type=Path,
        help="interpreter of an environment with llama-cpp-python[server]",
    )
    arguments.option("--gguf", [], type=Path, help="the model's GGUF files, for llama.cpp")
    arguments.option("--generate", False, smoke=True, help="beside `generate` of transformers")
    options = arguments.parse()
    report = Report(options)
    with ExitStack() as stack:
        folder = options.model or made_folder(options.hidden, stack)
        vocab_size = sizes_of(folder).vocab_size
        # the rest of a made model's vocabulary is no letter
        options.vocabulary = vocab_size if options.model else min(256, vocab_size)
        report.say(bounds(folder, options))
        servers = {"midflight": midflight(folder, options, stack)}
        if options.vllm_python:
            servers["vllm"] = vllm(folder, options, stack)
        for gguf in options.gguf:
            servers[f"llama {gguf.stem}"] = llama(gguf, folder, options, stack)
        if options.generate:
            servers["generate"] = generate(folder, options, stack)
        asyncio.run(print_rates(servers, options, report))
    report.close()


def made_folder(hidden: int, stack: ExitStack) -> Path:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="midflight-")))
    write_model(small_model(hidden), folder)
    return folder


if __name__ == "__main__":
    main()

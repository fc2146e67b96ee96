"""What the gateway costs: latency, requests and streamed tokens per second, pauses, memory; beside
other proxies in the same run.

The engine behind it is trivial (a letter a token, at once), so that the gateway is what is
measured; every session and token is recorded as in training. The others stand before a static
upstream that is faster than any of them. Rounds alternate the sides.

    python benchmarks/gateway.py [--seconds 5] [--rounds 3] [--peers VENV] [--sessions 10000]

`--peers` is a virtual environment with `litellm[proxy]` and `sglang-router`; without it they are
left out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from smoke import options_of

HERE = Path(__file__).parent
UNGUARDED = {"LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"}
"""litellm does not start without a key otherwise; all of this listens on loopback only."""
LITELLM_CONFIG = """
model_list:
  - model_name: policy
    litellm_params: {{model: openai/policy, api_base: "http://127.0.0.1:{port}/v1", api_key: sk-any}}
"""


@dataclass
class Side:
    """A server under load. `keys` is a file of API keys, where requests need them."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    keys: Path | None = None

    def cpu_seconds(self) -> float:
        """Of the process and its children so far."""
        return sum(cpu_of(pid) for pid in family(self.process.pid))

    def peak_mb(self) -> float:
        return sum(_status_mb(pid, "VmRSS") for pid in family(self.process.pid))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--peers", type=Path, help="virtual environment with litellm[proxy] and sglang-router"
    )
    parser.add_argument(
        "--sessions",
        type=int,
        default=10_000,
        help="of 2 000 tokens, for the memory; 0 leaves it out",
    )
    parser.add_argument(
        "--step-us",
        type=int,
        default=0,
        help="from one step of the trivial engine to the next: above 0 no token waits for another",
    )
    parser.add_argument(
        "--pauses", type=float, nargs="+", default=[0.1, 1.0, 5.0], help="seconds of each pause"
    )
    options = options_of(parser, seconds=0.2, rounds=1, sessions=20, pauses=[0.05])
    with contextlib.ExitStack() as stack:
        sides = list(started(stack, options.peers, step_us=options.step_us))
        results: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
        for number in range(options.rounds):
            for side in sides:
                for kind, connections, stream in (
                    ("1", 1, False),
                    ("32", 32, False),
                    ("stream 64", 64, True),
                ):
                    if not (stream and side.name in ("litellm", "aiohttp")):
                        results[side.name, kind].append(
                            measured(side, connections, options.seconds, stream=stream)
                        )
            print(f"round {number + 1} of {options.rounds} done", file=sys.stderr)
        report(sides, results)
        asyncio.run(
            pauses(next(side for side in sides if side.name == "midflight"), options.pauses)
        )
    if options.sessions:
        subprocess.run(
            [sys.executable, HERE / "gateway_memory.py", str(options.sessions)], check=True
        )


def started(stack: contextlib.ExitStack, peers: Path | None, *, step_us: int) -> Iterable[Side]:
    engine_port = free_port()
    upstream_port = free_port()
    for name, port, more in (
        ("engine", engine_port, [str(step_us)]),
        ("upstream", upstream_port, []),
    ):
        process = stack.enter_context(
            running([sys.executable, HERE / "gateway_sides.py", name, str(port), *more])
        )
        wait_for(port, process)
        if name == "upstream":
            yield Side(name, port, process)
    yield midflight(stack, engine_port)
    port = free_port()
    proxy = stack.enter_context(
        running(
            [sys.executable, HERE / "gateway_sides.py", "aiohttp", str(port), str(upstream_port)]
        )
    )
    wait_for(port, proxy)
    yield Side("aiohttp", port, proxy)
    if peers is not None:
        yield from peer_sides(stack, peers, upstream_port)


def midflight(stack: contextlib.ExitStack, engine_port: int) -> Side:
    port = free_port()
    command = [sys.executable, HERE / "gateway_sides.py", "midflight", str(port), str(engine_port)]
    process = stack.enter_context(running(command, stdout=subprocess.PIPE))
    assert process.stdout is not None
    keys = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "keys.json"
    keys.write_bytes(process.stdout.readline())
    return Side("midflight", port, process, keys)


def peer_sides(stack: contextlib.ExitStack, peers: Path, upstream_port: int) -> Iterable[Side]:
    port = free_port()
    command = [
        peers / "bin/python",
        "-m",
        "sglang_router.launch_router",
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
    ]
    router = [
        *command,
        "--worker-urls",
        f"http://127.0.0.1:{upstream_port}",
        "--prometheus-port",
        str(free_port()),
    ]
    process = stack.enter_context(running(router))
    wait_for(port, process)
    yield Side("sglang-router", port, process)
    config = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "litellm.yaml"
    config.write_text(LITELLM_CONFIG.format(port=upstream_port))
    port = free_port()
    process = stack.enter_context(
        running(
            [peers / "bin/litellm", "--config", config, "--port", str(port), "--host", "127.0.0.1"]
        )
    )
    wait_for(port, process)
    yield Side("litellm", port, process)


def measured(side: Side, connections: int, seconds: float, *, stream: bool) -> dict[str, float]:
    command = [
        sys.executable,
        HERE / "gateway_sides.py",
        "load",
        str(side.port),
        str(connections),
        str(seconds),
    ]
    command += ["--stream"] * stream + (["--keys", str(side.keys)] if side.keys else [])
    before = side.cpu_seconds()
    result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    spent = side.cpu_seconds() - before
    per = "tokens_per_second" if stream else "rps"
    result["cpu_us"] = 1e6 * spent / max(1.0, result[per] * seconds)
    if result["failures"]:
        print(f"{side.name}: {result['failures']} requests failed", file=sys.stderr)
    return result


def report(sides: list[Side], results: dict[tuple[str, str], list[dict[str, float]]]) -> None:
    def median(side: Side, kind: str, what: str) -> float:
        return (
            statistics.median(r[what] for r in results[side.name, kind])
            if results[side.name, kind]
            else float("nan")
        )

    direct = median(sides[0], "1", "p50_ms")
    print(
        f"{'side':14} {'p50 at 1':>9} {'added':>7} {'rps at 32':>10} {'p99':>8} {'CPU us/req':>11} "
        f"{'streamed tok/s':>15} {'CPU us/tok':>11} {'MB':>6}"
    )
    for side in sides:
        p50 = median(side, "1", "p50_ms")
        print(
            f"{side.name:14} {p50:7.2f}ms {p50 - direct:5.2f}ms {median(side, '32', 'rps'):10.0f} "
            f"{median(side, '32', 'p99_ms'):6.1f}ms {median(side, '32', 'cpu_us'):11.0f} "
            f"{median(side, 'stream 64', 'tokens_per_second'):15.0f} "
            f"{median(side, 'stream 64', 'cpu_us'):11.1f} {side.peak_mb():6.0f}"
        )
    ours = next(side for side in sides if side.name == "midflight")
    for other in sides:
        if other is not ours:
            print(
                f"requests per second, midflight / {other.name}: "
                f"{median(ours, '32', 'rps') / median(other, '32', 'rps'):.2f}"
            )


async def pauses(side: Side, pause_seconds: Sequence[float], *, clients: int = 64) -> None:
    """How long after `continue` a client that waits through a pause has its answer, beside an
    answer without a pause.
    """
    base = f"http://127.0.0.1:{side.port}"
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}

    async def ask(session: aiohttp.ClientSession) -> float:
        async with session.post(f"{base}/v1/chat/completions", json=body) as answer:
            await answer.read()
            assert answer.status == 200, await answer.text()
        return time.perf_counter()

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for count in (1, clients):
            started = time.perf_counter()
            plain = max(await asyncio.gather(*(ask(session) for _ in range(count)))) - started
            for seconds in pause_seconds:
                async with session.post(
                    f"{base}/pause_generation", json={"mode": "keep"}
                ) as answer:
                    assert answer.status == 200
                waiting = [asyncio.create_task(ask(session)) for _ in range(count)]
                await asyncio.sleep(seconds)
                asked = time.perf_counter()
                async with session.post(f"{base}/continue_generation") as answer:
                    await answer.read()
                ends = sorted([await task for task in waiting])
                print(
                    f"pause of {seconds:g} s, {count} waiting: first answer "
                    f"{1e3 * (ends[0] - asked):.1f} ms after continue was asked, last "
                    f"{1e3 * (ends[-1] - asked):.1f} ms (without a pause {1e3 * plain:.1f} ms)"
                )


# --- Processes ------------------------------------------------------------------------------------


@contextlib.contextmanager
def running(command: Sequence[object], **options: object) -> Generator[subprocess.Popen[bytes]]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "LITELLM_LOG": "ERROR",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        **UNGUARDED,
    }
    settings = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **options}
    process = subprocess.Popen(  # pyright: ignore[reportCallIssue]
        [str(part) for part in command],
        env=environment,
        start_new_session=True,
        **settings,  # pyright: ignore[reportArgumentType]
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_for(port: int, process: subprocess.Popen[bytes], *, seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if process.poll() is not None:
            raise SystemExit(f"{process.args} ended with {process.returncode}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise SystemExit(f"{process.args} does not listen on {port}")


def family(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(p for child in children for p in family(int(child)))]


def cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _status_mb(pid: int, name: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


if __name__ == "__main__":
    main()

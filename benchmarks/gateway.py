"""What the gateway costs, beside other proxies in the same run.

    python benchmarks/gateway.py [--seconds 5] [--rounds 3] [--peers VENV] [--sessions 10000]
    python benchmarks/gateway.py --parts streams shards
    python benchmarks/gateway.py --parts fleet [--engines 1 8 64 256 1000] [--requests 20000]
    python benchmarks/gateway.py --parts turns [--lengths 1000 8000 16000 64000]

The engine behind it is trivial (a letter a token, at once), so that the gateway is what is
measured; every session and token is recorded as in training.

| part | what it measures |
|---|---|
| servers | latency, requests and streamed tokens a second; the other proxies stand before a static upstream that is faster than any of them |
| pauses | how long after `continue_generation` a client that waits has its answer |
| sessions | the memory of live sessions of 2 000 tokens over four turns |
| streams | streams of one token a message: the shorter the engine's steps, the more tokens come, until the gateway is the limit; then several share a message |
| shards | sessions, requests and streamed tokens a second with one and with two gateways, each with an engine and clients of its own; a session is opened, asked once and ended |
| fleet | what a request and a handover cost where there are many engines: the fleet and the real handover, over scripted engines on virtual time |
| turns | CPU of a turn of an agent that sends its whole conversation again, by the tokens of that; and the bytes that a session keeps of each token |

In part `shards` each gateway has a core for itself, and engines and clients have the others. Where
there are no others they share those of the gateways: the rates are then those of a busy machine,
and what a gateway can do on a core of its own follows from its CPU time alone.

Part `turns` has neither engine nor socket (`sides/long_agents.py`): a body goes into the
application and the answer comes out. What a request costs on the wire to an engine process is told
apart.

The columns of part `fleet`:

| column | means |
|---|---|
| us a request | CPU microseconds to place a request and to end it, beside 64 others on each engine, half of them of sessions that stay where they were |
| of one engine | times of the first row |
| handover, CPU ms an engine | CPU of bringing a version to all, with 64 requests under way on each, by engine |
| handover, virtual s | of commits of 80 ms each, one of each 64 engines at a time |
| versions | served at the same time, at most |
| idle | share of the engines' slots, 64 each, that hold no request that goes on: 64 agents for each engine ask again and again (answers of 8 s at the median, log-normal, sigma 0.75), and a version comes every 10 s or after the one before |

`--peers` is a virtual environment with `litellm[proxy]` and `sglang-router`; without it they are
left out.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import aiohttp
from harness.arguments import Arguments
from harness.processes import (
    apart,
    environment,
    family,
    family_cpu_seconds,
    free_port,
    output_of,
    peak_mib,
    resident_mib,
    running,
    side,
    wait_for,
)
from harness.report import Report, make_parts
from harness.rounds import alternate, median_of
from sides import long_agents

from midflight.allowance import Allowance
from midflight.engines import wire
from midflight.gateway.answers.answer import Answer
from midflight.gateway.answers.gateway import Gateway
from midflight.gateway.answers.generation import Generator
from midflight.gateway.answers.plan import EngineLimits
from midflight.gateway.fleet.fleet import Fleet
from midflight.gateway.sessions.request import Asked, CompletionCall, Messages
from midflight.observe.prometheus import Metrics
from midflight.testing.scripted import ScriptedEngine
from midflight.testing.virtual_time import run_virtual
from midflight.text.byte_tokenizer import write_byte_tokenizer
from midflight.text.tokenizer import Tokenizer
from midflight.types import (
    Chunk,
    Finish,
    FinishReason,
    GenerateRequest,
    GroupKey,
    Json,
    PauseMode,
    RolloutKey,
    SamplingParams,
    WeightManifest,
)
from midflight.types.facts import record_nothing
from midflight.weights.handover import Handover

PEERS = environment(
    LITELLM_LOG="ERROR",
    LITELLM_LOCAL_MODEL_COST_MAP="True",
    # it does not start without a key otherwise; everything listens on loopback only
    LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY="true",
)
LITELLM_CONFIG = """
model_list:
  - model_name: policy
    litellm_params: {{model: openai/policy, api_base: "http://127.0.0.1:{port}/v1", api_key: sk-any}}
"""
STREAMS = 64
ALONE = 1.05
"""Tokens a message, at most, for a row of one token a message."""
Figures = dict[str, float]


RATES = {"session": "sessions_per_second", "whole": "rps", "stream": "tokens_per_second"}
"""The figure of each kind of load that says how much was done a second."""


@dataclass
class Server:
    """A server under load. `keys` is a file of API keys, where requests need them."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    keys: Path | None = None

    @property
    def streams(self) -> bool:
        """Returns whether its streams are measured."""
        return self.name not in ("litellm", "aiohttp")

    def load(self, connections: int, seconds: float, *, stream: bool) -> Figures:
        """What clients with so many connections got, and the server's CPU time for each."""
        return self.loaded(connections, seconds, "stream" if stream else "whole")

    def loaded(self, connections: int, seconds: float, kind: str) -> Figures:
        """The same for one of `RATES`."""
        before = family_cpu_seconds(self.process.pid)
        command = side(
            "gateway_servers", "load", self.port, connections, seconds, kind, self.keys or "-"
        )
        found: Figures = json.loads(output_of(command))
        spent = family_cpu_seconds(self.process.pid) - before
        found["cpu_us"] = 1e6 * spent / max(1.0, found[RATES[kind]] * seconds)
        if found["failures"]:
            print(f"{self.name}: {found['failures']:.0f} requests failed", file=sys.stderr)
        return found


def started(stack: ExitStack, name: str, *arguments: object) -> Server:
    """A server of `sides.gateway_servers`, once it listens."""
    port = free_port()
    process = stack.enter_context(running(side("gateway_servers", name, port, *arguments)))
    wait_for(port, process)
    return Server(name, port, process)


def midflight(stack: ExitStack, engine: Server) -> Server:
    """The gateway over that engine. It prints its keys once it listens."""
    port = free_port()
    command = side("gateway_servers", "midflight", port, engine.port)
    process = stack.enter_context(running(command, stdout=subprocess.PIPE))
    assert process.stdout is not None
    keys = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "keys.json"
    keys.write_bytes(process.stdout.readline())
    return Server("midflight", port, process, keys)


def peers(stack: ExitStack, venv: Path, upstream: Server) -> Iterator[Server]:
    """The proxies of other people."""
    port = free_port()
    router = [venv / "bin/python", "-m", "sglang_router.launch_router"]
    router += ["--host", "127.0.0.1", "--port", port, "--prometheus-port", free_port()]
    router += ["--worker-urls", f"http://127.0.0.1:{upstream.port}"]
    process = stack.enter_context(running(router))
    wait_for(port, process)
    yield Server("sglang-router", port, process)
    port = free_port()
    config = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "litellm.yaml"
    config.write_text(LITELLM_CONFIG.format(port=upstream.port))
    litellm = [venv / "bin/litellm", "--config", config, "--host", "127.0.0.1", "--port", port]
    process = stack.enter_context(running(litellm, environ=PEERS))
    wait_for(port, process)
    yield Server("litellm", port, process)


# --- Servers --------------------------------------------------------------------------------------


def servers(options: argparse.Namespace, report: Report) -> None:
    with ExitStack() as stack:
        upstream = started(stack, "upstream")
        ours = midflight(stack, started(stack, "engine", options.step_us))
        sides = [upstream, ours, started(stack, "aiohttp", upstream.port)]
        if options.peers is not None:
            sides += peers(stack, options.peers, upstream)
        deeds: dict[tuple[str, str], Callable[[], Figures]] = {}
        for server in sides:
            deeds[server.name, "1"] = lambda s=server: s.load(1, options.seconds, stream=False)
            deeds[server.name, "32"] = lambda s=server: s.load(32, options.seconds, stream=False)
            if server.streams:
                deeds[server.name, "stream"] = lambda s=server: s.load(
                    STREAMS, options.seconds, stream=True
                )
        found = alternate(deeds, rounds=options.rounds)
        print_servers(sides, found, report)


def print_servers(
    sides: list[Server], found: dict[tuple[str, str], list[Figures]], report: Report
) -> None:
    def median(server: Server, kind: str, what: str) -> float:
        return median_of(found[server.name, kind], lambda figures: figures[what])

    direct = median(sides[0], "1", "p50_ms")
    table = report.table(
        "side",
        "p50 at 1, ms",
        "added, ms",
        "rps at 32",
        "p99, ms",
        "CPU us/req",
        "streamed tok/s",
        "CPU us/tok",
        "MB",
    )
    for server in sides:
        p50 = median(server, "1", "p50_ms")
        streamed = ("", "")
        if server.streams:
            streamed = (
                f"{median(server, 'stream', 'tokens_per_second'):.0f}",
                f"{median(server, 'stream', 'cpu_us'):.1f}",
            )
        table.row(
            server.name,
            f"{p50:.2f}",
            f"{p50 - direct:.2f}",
            f"{median(server, '32', 'rps'):.0f}",
            f"{median(server, '32', 'p99_ms'):.1f}",
            f"{median(server, '32', 'cpu_us'):.0f}",
            *streamed,
            f"{sum(resident_mib(pid) for pid in family(server.process.pid)):.0f}",
        )
    ours = median(sides[1], "32", "rps")
    for server in sides:
        if server.name != "midflight":
            ratio = ours / median(server, "32", "rps")
            report.say(f"requests per second, midflight / {server.name}: {ratio:.2f}")
            report.figure(f"gateway, requests a second: midflight / {server.name}", ratio)


# --- Pauses ---------------------------------------------------------------------------------------


def pauses(options: argparse.Namespace, report: Report) -> None:
    with ExitStack() as stack:
        server = midflight(stack, started(stack, "engine", options.step_us))
        table = report.table(
            "clients that wait", "pause, s", "first answer, ms", "last, ms", "no pause, ms"
        )
        for clients in (1, STREAMS):
            for seconds in options.pauses:
                first, last, plain = asyncio.run(paused(server, clients, seconds))
                cells = [f"{1e3 * each:.1f}" for each in (first, last, plain)]
                table.row(clients, f"{seconds:g}", *cells)


async def paused(server: Server, clients: int, pause_seconds: float) -> tuple[float, float, float]:
    """Seconds from the request to continue until the first and the last of the clients have their
    answers; and until all have one without a pause.
    """
    base = f"http://127.0.0.1:{server.port}"
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}

    async def ask(session: aiohttp.ClientSession) -> float:
        async with session.post(f"{base}/v1/chat/completions", json=body) as answer:
            await answer.read()
            assert answer.status == 200, await answer.text()
        return time.perf_counter()

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        began = time.perf_counter()
        plain = max(await asyncio.gather(*(ask(session) for _ in range(clients)))) - began
        async with session.post(f"{base}/pause_generation", json={"mode": "keep"}) as answer:
            assert answer.status == 200
        waiting = [asyncio.create_task(ask(session)) for _ in range(clients)]
        await asyncio.sleep(pause_seconds)
        continued = time.perf_counter()
        async with session.post(f"{base}/continue_generation") as answer:
            await answer.read()
        ends = await asyncio.gather(*waiting)
        return min(ends) - continued, max(ends) - continued, plain


# --- Sessions -------------------------------------------------------------------------------------

TURNS = 4
PROMPT = 247
ANSWER = 250
"""A turn has 247 letters of the user, 250 tokens of answer, and the template's three marks."""


class InstantGenerator:
    """Implements `Generator`: letters for every request, at once."""

    async def generate(
        self, answer: Answer, *, affinity: str, may_abort: bool, told: Callable[[], None]
    ) -> None:
        letters = b"abcdefghijklmnopqrstuvwxyz"
        sampling = answer.request.sampling
        numbers = range(sampling.max_tokens)
        ids = tuple(letters[(sampling.seed + k) % 26] for k in numbers)
        logprobs = tuple(-0.001 * k for k in numbers)
        answer.accept(Chunk(ids, logprobs, 0, 0, Finish(FinishReason.LENGTH)), vocab_size=262)

    def forget(self, affinity: str) -> None:
        return None


def sessions(options: argparse.Namespace, report: Report) -> None:
    """Measures in a process of its own, whose memory is that of the sessions."""
    if options.sessions:
        apart(print_sessions, options.sessions)


def print_sessions(number: int) -> None:
    asyncio.run(hold_sessions(number))


async def hold_sessions(number: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_byte_tokenizer(Path(folder))
        tokenizer = Tokenizer.load(Path(folder))
    gateway = Gateway(
        cast(Generator, InstantGenerator()),
        tokenizer,
        Metrics().apply,
        model="policy",
        limits=EngineLimits(max_context=8192, vocab_size=262),
        max_sessions=number,
    )
    empty = resident_mib()
    began = time.process_time()
    for at in range(number):
        await play_session(gateway, at)
    spent = time.process_time() - began
    full = resident_mib()
    length = TURNS * (PROMPT + ANSWER + 3)
    each = (full - empty) * 2**20 / (number * length)
    print(
        f"{number} sessions of {length} tokens in {TURNS} turns: {full:.0f} MB resident "
        f"({empty:.0f} MB before, peak {peak_mib():.0f} MB), {each:.1f} bytes a token; "
        f"{1e6 * spent / (number * TURNS):.0f} us CPU a turn"
    )


async def play_session(gateway: Gateway, number: int) -> None:
    """Opens a session and asks its turns; it stays open."""
    key = RolloutKey(GroupKey(0, number), 0)
    handle = gateway.open(key, sampling=SamplingParams(max_tokens=ANSWER), tracked=True)
    session = gateway.session_for(path_token=handle.api_key, api_key=None)
    messages: list[dict[str, Json]] = []
    for turn in range(TURNS):
        question = f"{number:06d}.{turn:02d}".ljust(PROMPT, "q")
        messages.append({"role": "user", "content": question})
        asked = (Messages(tuple(messages)),)
        call = CompletionCall(sources=asked, asked=Asked(max_tokens=ANSWER))
        [answer] = await gateway.answers(gateway.prepare(session, call))
        messages.append({"role": "assistant", "content": answer.text})


# --- Streams --------------------------------------------------------------------------------------


def streams(options: argparse.Namespace, report: Report) -> None:
    deeds: dict[int, Callable[[], Figures]] = {}
    for rest in options.rests:
        deeds[rest] = lambda rest=rest: streamed(rest, options.seconds)
    found = alternate(deeds, rounds=options.rounds)
    table = report.table(
        "step every, us",
        "engine at most, tokens/s",
        "tokens/s",
        "tokens a message",
        "CPU us a token",
    )
    fastest = 0.0
    for rest, results in found.items():
        rate = median_of(results, lambda figures: figures["tokens_per_second"])
        merged = median_of(results, lambda figures: figures["tokens_a_message"])
        cpu = median_of(results, lambda figures: figures["cpu_us"])
        table.row(rest, f"{STREAMS * 1e6 / rest:.0f}", f"{rate:.0f}", f"{merged:.2f}", f"{cpu:.1f}")
        if merged <= ALONE:
            fastest = max(fastest, rate)
    report.say(f"one token a message: {fastest:.0f} tokens a second")


def streamed(rest_us: int, seconds: float) -> Figures:
    """Measures streams of an engine that begins a step every so many microseconds, with a token for
    each stream.
    """
    with ExitStack() as stack:
        server = midflight(stack, started(stack, "engine", rest_us))
        return server.load(STREAMS, seconds, stream=True)


# --- Several gateways -----------------------------------------------------------------------------


NAMES = {"session": "sessions", "whole": "requests", "stream": "tokens"}


def shards(options: argparse.Namespace, report: Report) -> None:
    cores = sorted(os.sched_getaffinity(0))
    others = cores[2:] or cores
    with ExitStack() as stack:
        # what is started here has these cores, and the gateways get others once they run
        os.sched_setaffinity(0, others)
        stack.callback(os.sched_setaffinity, 0, cores)
        gateways = [midflight(stack, started(stack, "engine", 0)) for _ in range(2)]
        for gateway, core in zip(gateways, cores, strict=False):
            for pid in family(gateway.process.pid):
                os.sched_setaffinity(pid, {core})
        deeds: dict[tuple[int, str], Callable[[], Figures]] = {}
        for number in (1, 2):
            for kind in RATES:
                deeds[number, kind] = lambda number=number, kind=kind: together(
                    gateways[:number], options.connections // number, options.seconds, kind
                )
        found = alternate(deeds, rounds=options.rounds)
    shared = "engines and clients have the others"
    if len(cores) < 3:
        shared = "engines and clients share them: the rates are of a busy machine"
    report.say(f"{options.connections} connections; a core for each gateway, {shared}")
    table = report.table(
        "gateways", "of what", "a second", "CPU of one, in its gateway", "so at most a second"
    )
    for (number, kind), results in found.items():
        rate = median_of(results, lambda figures: figures["rate"])
        cpu = median_of(results, lambda figures: figures["cpu_us"])
        most = number * 1e6 / cpu
        table.row(number, NAMES[kind], f"{rate:,.0f}", f"{cpu:.1f} µs", f"{most:,.0f}")


def together(gateways: list[Server], connections: int, seconds: float, kind: str) -> Figures:
    """How much all did a second, and the CPU time of one in its gateway."""
    with ThreadPoolExecutor(len(gateways)) as loads:
        asked = [loads.submit(each.loaded, connections, seconds, kind) for each in gateways]
        answers = [one.result() for one in asked]
    name = RATES[kind]
    rate = sum(figures[name] for figures in answers)
    cpu = sum(figures["cpu_us"] * figures[name] for figures in answers) / max(1e-9, rate)
    return {"rate": rate, "cpu_us": cpu}


# --- Many engines ---------------------------------------------------------------------------------

TOKENS = 1000
PIECES = 5
"""The requests are measured in so many pieces; the median counts."""
LOOK_SECONDS = 0.053
VERSIONS = (1, 2, 3)


def fleet_of(engines: int) -> Fleet:
    made = Fleet()
    for number in range(engines):
        made.attach(ScriptedEngine(f"e{number}", commit_seconds=0.08))
    return made


async def busy_fleet(engines: int, *, beside: int) -> Fleet:
    """Makes a fleet with so many requests under way on each engine."""
    fleet = fleet_of(engines)
    for _ in range(beside * engines):
        await fleet.place(fleet.ticket(), tokens=TOKENS, affinity="", allowance=Allowance(600))
    return fleet


def handover_of(fleet: Fleet) -> Handover:
    return Handover(
        fleet,
        pause_mode=PauseMode.RECOMPUTE,
        stage_seconds=600,
        commit_seconds=600,
        record=record_nothing,
    )


def manifest_of(version: int) -> WeightManifest:
    """Names weights that nobody fetches: scripted engines have none."""
    return WeightManifest(version, f"print-{version}", "shared_memory", "nowhere", ())


async def microseconds(engines: int, *, requests: int, beside: int) -> float:
    """CPU to place one request and to end it."""
    fleet = await busy_fleet(engines, beside=beside)
    each = requests // PIECES
    found: list[float] = []
    for _ in range(PIECES):
        began = time.process_time()
        for number in range(each):
            affinity = f"s{number % 2000}" if number % 2 else ""
            placed = await fleet.place(
                fleet.ticket(),
                tokens=TOKENS + number % 700,
                affinity=affinity,
                allowance=Allowance(600),
            )
            fleet.leave(placed)
        found.append((time.process_time() - began) / each * 1e6)
    return statistics.median(found)


async def handed_over(engines: int, *, beside: int) -> tuple[float, float]:
    """CPU seconds and virtual seconds of a version, the mean of three in a row."""
    fleet = await busy_fleet(engines, beside=beside)
    handover = handover_of(fleet)
    loop = asyncio.get_running_loop()
    began = loop.time()
    cpu = time.process_time()
    for version in VERSIONS:
        await handover.publish(manifest_of(version))
    spent = time.process_time() - cpu
    return spent / len(VERSIONS), (loop.time() - began) / len(VERSIONS)


async def versions_served(engines: int) -> int:
    """How many versions are served at the same time at most, while three come in a row."""
    fleet = await busy_fleet(engines, beside=1)
    handover = handover_of(fleet)
    seen = [0]

    async def watch() -> None:
        while True:
            seen.append(len({state.version for state in fleet.states()}))
            await asyncio.sleep(0.03)

    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch())
        for version in VERSIONS:
            await handover.publish(manifest_of(version))
        watching.cancel()
    return max(seen)


async def idle_share(engines: int, *, beside: int, seconds: float) -> float:
    """The mean over virtual time of the share of slots without a request that goes on."""
    fleet = fleet_of(engines)
    handover = handover_of(fleet)
    lengths = random.Random(engines)

    async def ask() -> None:
        while True:
            length = lengths.lognormvariate(math.log(8), 0.75)
            placed = await fleet.place(
                fleet.ticket(), tokens=int(50 * length), affinity="", allowance=Allowance(600)
            )
            await asyncio.sleep(length)
            fleet.leave(placed)

    async def bring() -> None:
        for version in itertools.count(1):
            await asyncio.gather(asyncio.sleep(10), handover.publish(manifest_of(version)))

    busy: list[float] = []
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask()) for _ in range(beside * engines)]
        tasks.append(group.create_task(bring()))
        await asyncio.sleep(seconds)  # until those who began together no longer end together
        for _ in range(int(seconds / LOOK_SECONDS)):
            await asyncio.sleep(LOOK_SECONDS)
            going_on = 0
            for state in fleet.states():
                if not state.paused_by:
                    going_on += min(state.num_requests, beside)
            busy.append(going_on / (beside * engines))
        for task in tasks:
            task.cancel()
    return 1 - statistics.mean(busy)


def fleet(options: argparse.Namespace, report: Report) -> None:
    table = report.table(
        "engines",
        "us a request",
        f"of {options.engines[0]} engine",
        "handover, CPU ms an engine",
        "handover, virtual s",
        "versions",
        "idle",
    )
    first = 0.0
    beside: int = options.beside
    for engines in options.engines:
        each = run_virtual(microseconds(engines, requests=options.requests, beside=beside))
        first = first or each
        cpu, seconds = run_virtual(handed_over(engines, beside=beside))
        served = run_virtual(versions_served(engines))
        idle = run_virtual(idle_share(engines, beside=beside, seconds=options.virtual_seconds))
        table.row(
            engines,
            f"{each:.1f}",
            f"{each / first:.2f}",
            f"{cpu / engines * 1e3:.2f}",
            f"{seconds:.2f}",
            served,
            f"{idle:.1%}",
        )


# --- Turns of long agents -------------------------------------------------------------------------

NEW_TOKENS = 100
"""What a turn that is measured brings, its answer included."""
MEASURED_TURNS = 8
KEPT_SESSIONS = 24
OTHER_SESSIONS = 64
OTHER_TOKENS = 4000
"""Sessions before those whose memory is measured: they fill what all sessions share."""


def turns(options: argparse.Namespace, report: Report) -> None:
    """Measures turns of each length in turn, so that a busy moment hits all lengths alike."""
    asyncio.run(measure_turns(options, report))
    apart(print_kept, min(options.lengths[-1], 64_000), 2 if options.smoke else KEPT_SESSIONS)


async def measure_turns(options: argparse.Namespace, report: Report) -> None:
    site = long_agents.Site()
    kinds = {
        "chat, whole": (long_agents.CHAT, False),
        "chat, streamed": (long_agents.CHAT, True),
        "messages, whole": (long_agents.MESSAGES, False),
        "messages, streamed": (long_agents.MESSAGES, True),
    }
    numbers = itertools.count()
    found: dict[tuple[int, str], list[float]] = defaultdict(list)
    on_wire: dict[int, list[float]] = defaultdict(list)
    for _ in range(options.rounds):
        for kind, (dialect, stream) in kinds.items():
            agents = [
                long_agents.Agent(site, dialect, stream, next(numbers)) for _ in options.lengths
            ]
            for agent, length in zip(agents, options.lengths, strict=True):
                await agent.grow(length)
            for _ in range(MEASURED_TURNS):
                for agent, length in zip(agents, options.lengths, strict=True):
                    spent = await agent.turn(NEW_TOKENS - long_agents.ANSWER_TOKENS)
                    found[length, kind].append(spent)
                    on_wire[length].append(wire_seconds(site.generator.last))
    first = options.lengths[0]
    table = report.table("tokens", *[f"{kind}, ms (times)" for kind in kinds], "on the wire, ms")
    for length in options.lengths:
        cells: list[str] = []
        for kind in kinds:
            spent = statistics.median(found[length, kind])
            times = spent / statistics.median(found[first, kind])
            cells.append(f"{1e3 * spent:.2f} ({times:.2f})")
        table.row(length, *cells, f"{1e3 * statistics.median(on_wire[length]):.2f}")


def wire_seconds(request: GenerateRequest | None) -> float:
    """CPU to pack a request for an engine process."""
    assert request is not None
    began = time.process_time()
    wire.pack_client_frame(wire.Submit(1, request))
    return time.process_time() - began


def print_kept(length: int, number: int) -> None:
    asyncio.run(keep_agents(length, number))


async def keep_agents(length: int, number: int) -> None:
    site = long_agents.Site()
    for at in range(number, number + OTHER_SESSIONS):
        await long_agents.Agent(site, long_agents.CHAT, False, at).grow(OTHER_TOKENS)
    gc.collect()
    empty = resident_mib()
    agents = [long_agents.Agent(site, long_agents.CHAT, False, at) for at in range(number)]
    for agent in agents:
        await agent.grow(length)
        agent.messages.clear()
    gc.collect()
    full = resident_mib()
    tokens = sum(agent.num_tokens for agent in agents)
    print(
        f"{number} sessions of {length} tokens in turns of {long_agents.TURN_TOKENS}: "
        f"{(full - empty) * 2**20 / tokens:.1f} bytes a token"
    )


PARTS = {
    "servers": servers,
    "pauses": pauses,
    "sessions": sessions,
    "streams": streams,
    "shards": shards,
    "fleet": fleet,
    "turns": turns,
}


def main() -> None:
    arguments = Arguments(__doc__, rounds=3)
    arguments.option("--parts", ["servers", "pauses", "sessions"], smoke=[*PARTS], choices=[*PARTS])
    arguments.option("--seconds", 5.0, smoke=0.2, help="of each measurement")
    arguments.option(
        "--peers", None, type=Path, help="environment with litellm[proxy] and sglang-router"
    )
    arguments.option("--sessions", 10_000, smoke=20, help="of part `sessions`; 0 leaves it out")
    arguments.option(
        "--step-us",
        0,
        help="from one step of the engine to the next: above 0 no token waits for another",
    )
    arguments.option("--pauses", [0.1, 1.0, 5.0], smoke=[0.05], help="seconds of each pause")
    arguments.option(
        "--rests",
        [4000, 2000, 1500, 1000, 800],
        smoke=[4000],
        help="microseconds from one step of the engine to the next, of part `streams`",
    )
    arguments.option("--connections", 32, smoke=4, help="of all clients of part `shards`")
    arguments.option(
        "--lengths",
        [1000, 8000, 16_000, 64_000],
        smoke=[1000, 2000],
        help="of conversations, in tokens, of part `turns`",
    )
    arguments.option("--engines", [1, 8, 64, 256, 1000], smoke=[1, 8], help="of part `fleet`")
    arguments.option("--requests", 20_000, smoke=500, help="of part `fleet`")
    arguments.option(
        "--beside", 64, smoke=4, help="requests under way on each engine of part `fleet`"
    )
    arguments.option(
        "--virtual-seconds",
        40.0,
        smoke=12.0,
        help="for which part `fleet` watches idleness, after as many",
    )
    options = arguments.parse()
    make_parts(options, PARTS)


if __name__ == "__main__":
    main()

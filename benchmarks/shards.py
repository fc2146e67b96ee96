"""What several gateways cost and bring: requests per second, and processor time of a request in its
gateway, with one and with two of them.

Behind each is a trivial engine (a letter a token, at once) that serves one gateway, as in
`gateway.py`, and each has clients of its own. A gateway is one event loop, so one core's time for a
request bounds what it answers; on few cores engines and clients take their part of what is left for
a second one.

    python benchmarks/shards.py [--seconds 5] [--rounds 3] [--connections 32]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor

from smoke import options_of

from gateway import HERE, free_port, measured, midflight, running, wait_for


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--connections", type=int, default=32, help="of all clients together")
    options = options_of(parser, seconds=0.3, rounds=1, connections=4)
    found: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
    with contextlib.ExitStack() as stack:
        gateways = [midflight(stack, trivial_engine(stack)) for _ in range(2)]
        for _ in range(options.rounds):
            for number, results in found.items():
                connections = options.connections // number
                with ThreadPoolExecutor(number) as loads:
                    asked = [
                        loads.submit(measured, side, connections, options.seconds, stream=False)
                        for side in gateways[:number]
                    ]
                    answers = [one.result() for one in asked]
                rps = sum(one["rps"] for one in answers)
                results.append((rps, sum(one["cpu_us"] * one["rps"] for one in answers) / rps))
    print(
        f"{options.connections} connections, {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.0f}; medians of {options.rounds}\n"
    )
    print(
        "| gateways | requests/s | CPU of a request, in its gateway | so at most, each on a core "
        "of its own |\n|---|---|---|---|"
    )
    for number, results in found.items():
        rps, cpu = (statistics.median(column) for column in zip(*results, strict=True))
        print(f"| {number} | {rps:,.0f} | {cpu:.0f} µs | {number * 1e6 / cpu:,.0f}/s |")


def trivial_engine(stack: contextlib.ExitStack) -> int:
    """Its port."""
    port = free_port()
    wait_for(
        port,
        stack.enter_context(
            running([sys.executable, HERE / "gateway_sides.py", "engine", str(port), "0"])
        ),
    )
    return port


if __name__ == "__main__":
    main()

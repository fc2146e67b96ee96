"""Streams of one token a message: how many tokens a second the gateway brings to 64 clients at
once, each token in a message of its own.

    python benchmarks/streams.py [--seconds 4] [--rounds 3] [--rests 4000 2000 1500 1000 800]

The engine is that of `gateway_sides.py`, which begins a step every so many microseconds; a step has
one token for each stream. The shorter they are, the more tokens come, until the gateway is the
limit: then tokens wait for each other, and several share a message. So each of them is a row, with
what the engine makes at most and the tokens that a message had; what counts is the fastest row of
which at most one message in twenty had two.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys

from smoke import options_of

from gateway import HERE, free_port, measured, midflight, running, wait_for

ALONE = 1.05
"""Tokens a message, at most, for a row of one token a message."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--rests",
        type=int,
        nargs="+",
        default=[4000, 2000, 1500, 1000, 800],
        help="microseconds from one step of the engine to the next",
    )
    parser.add_argument("--streams", type=int, default=64)
    options = options_of(parser, seconds=0.2, rounds=1, rests=[4000])
    found: dict[int, list[dict[str, float]]] = {rest: [] for rest in options.rests}
    for _ in range(options.rounds):
        for rest in options.rests:
            found[rest].append(of_rest(rest, options))
    print(
        "| step every, us | engine at most, tokens/s | tokens/s | tokens a message | CPU us a "
        "token |\n|---|---|---|---|---|"
    )
    alone = [0.0]
    for rest, results in found.items():
        rate, merged, cpu = (
            statistics.median(r[name] for r in results)
            for name in ("tokens_per_second", "tokens_a_message", "cpu_us")
        )
        print(
            f"| {rest} | {options.streams * 1e6 / rest:.0f} | {rate:.0f} | {merged:.2f} | "
            f"{cpu:.1f} |"
        )
        alone += [rate] if merged <= ALONE else []
    print(f"one token a message: {max(alone):.0f} tokens a second")


def of_rest(rest: int, options: argparse.Namespace) -> dict[str, float]:
    with contextlib.ExitStack() as stack:
        port = free_port()
        wait_for(
            port,
            stack.enter_context(
                running([sys.executable, HERE / "gateway_sides.py", "engine", str(port), str(rest)])
            ),
        )
        return measured(midflight(stack, port), options.streams, options.seconds, stream=True)


if __name__ == "__main__":
    main()

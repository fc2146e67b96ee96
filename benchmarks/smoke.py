"""`--smoke`, which every benchmark has: seconds instead of minutes, to see that all of it runs.
What it measures so means nothing.

And an end in order where one is told to end, so that the processes that it started end too.
"""

from __future__ import annotations

import argparse
import signal
import sys

SETTINGS = (
    "model.hidden_size=32",
    "model.num_layers=1",
    "warm_start.max_steps=2",
    "environment.sources.0.heldout=4",
    "environment.sources.1.heldout=4",
    "rollout.groups_per_step=2",
    "rollout.group_size=2",
)
"""What makes a run of `configs/demo.toml` one of seconds."""


def options_of(parser: argparse.ArgumentParser, **smaller: object) -> argparse.Namespace:
    """The options given; with `--smoke`, `smaller` are the defaults of the others."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="seconds instead of minutes, to see that all of it runs",
    )
    if parser.parse_args().smoke:
        parser.set_defaults(**smaller)
    return parser.parse_args()

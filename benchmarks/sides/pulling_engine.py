"""An engine's end of the pull transport, for `versions.py`.

    python -m sides.pulling_engine FOLDER

For each manifest on standard input it fetches the version, and prints seconds, CPU seconds and
bytes. `FOLDER` is the memory that it shares with the other engines of its machine.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
from harness.rounds import timed

from midflight.types import WeightManifest
from midflight.weights.transports.delta_receiver import DeltaReceiver
from midflight.weights.transports.pull import PullReceiver


def main() -> None:
    pulling = PullReceiver(places=[Path(sys.argv[1])])
    receiver = DeltaReceiver(pulling)
    print("ready", flush=True)
    for line in sys.stdin:
        manifest = msgspec.json.decode(line, type=WeightManifest)
        before = pulling.num_bytes
        _, cost = timed(lambda manifest=manifest: receiver.fetch(manifest))
        print(json.dumps([cost.wall, cost.cpu, pulling.num_bytes - before]), flush=True)


if __name__ == "__main__":
    main()

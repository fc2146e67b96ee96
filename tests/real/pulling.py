"""Both ends of the pull transport as processes of their own, told what to do by lines on standard input.

    python -m tests.real.pulling give HOST MANIFEST MEGABYTES     publishes a version, writes its manifest, says "ready"
    python -m tests.real.pulling take MANIFEST FOLDER             fetches, says what came as JSON, gives away what it has until its end

`hangs`: from now on it does not answer who asks for a bucket; `lies`: it sends wrong bytes; it says so each time, until it is `honest` again.
`nothing`: it says what the version is made of and who has it, and has none of it itself, until it has `everything` again.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from midflight.models import sizes
from midflight.types import WeightManifest
from midflight.weights.transports import bucket_server, swarm
from midflight.weights.transports.pull import PullReceiver

PIECE = 2**18
"""Bytes of a bucket, so that a few megabytes have many."""


class Puller:
    """A process of the above, as the test has it. `before`: words of a command that starts it elsewhere."""

    def __init__(self, *words: str, before: Sequence[str] = ()) -> None:
        command = [*before, sys.executable, "-m", "tests.real.pulling", *words]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")

    def said(self) -> Any:
        """Its next line. Waits for it, or for its end."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline() or "null")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


def say(what: object) -> None:
    os.write(1, (json.dumps(what) + "\n").encode())  # in one piece: threads say things too


class Behaviour:
    """What it does when it is asked for a bucket, and says then."""

    def __init__(self) -> None:
        self._kind, self._honest = "honest", threading.Event()
        self._give = bucket_server._BucketHandler._give  # pyright: ignore[reportPrivateUsage]
        bucket_server._BucketHandler._give = lambda giver, server, found: self._given(giver, server, found)  # pyright: ignore[reportPrivateUsage]

    def become(self, kind: str) -> None:
        self._kind = kind
        self._honest.clear()
        if kind == "honest":
            self._honest.set()

    def _given(self, giver: Any, server: bucket_server.BucketServer, found: swarm.Views) -> None:
        if self._kind != "honest":
            say(self._kind)
        if self._kind == "hangs":
            self._honest.wait()
        elif self._kind == "lies":
            found = (memoryview(bytes(len(found[0]))), *found[1:])
        self._give(giver, server, found)


def obey(server: bucket_server.BucketServer | None) -> None:
    """Until nobody tells anything any more."""
    behaviour, (share,) = Behaviour(), server.shares.values() if server is not None else (None,)
    every = set(share.held) if share is not None else set[int]()
    for word in map(str.strip, sys.stdin):
        if share is not None and word in ("nothing", "everything"):
            share.held.clear()
            share.held.update(every if word == "everything" else ())
        else:
            behaviour.become(word)
        say(f"told {word}")


def give(host: str, manifest: str, megabytes: str) -> None:
    import torch

    from midflight.weights.transports.pull_publisher import PullPublisher

    draw = torch.Generator().manual_seed(7)
    tensors = {f"w{n}": torch.randint(256, (2**20,), dtype=torch.uint8, generator=draw) for n in range(int(megabytes))}
    with PullPublisher(host) as publisher:
        draft = Path(manifest).with_suffix(".writing")
        draft.write_bytes(msgspec.json.encode(publisher.publish(1, tensors)))
        draft.rename(manifest)
        say("ready")
        obey(publisher.server)


def take(manifest: str, folder: str) -> None:
    what = msgspec.json.decode(Path(manifest).read_bytes(), type=WeightManifest)
    Path(folder).mkdir(exist_ok=True)
    receiver = PullReceiver(places=[Path(folder)])
    began = time.monotonic()
    try:
        got = receiver.fetch(what)
    except Exception as error:  # the test reads it
        say({"error": str(error), "blamed": receiver.blamed})
        return
    whole = hashlib.sha256(b"".join(got[s.name] for s in what.tensors)).hexdigest()
    seconds = time.monotonic() - began
    say({"sha256": whole, "num_bytes": receiver.num_bytes, "blamed": receiver.blamed, "seconds": seconds})
    obey(receiver._server)  # pyright: ignore[reportPrivateUsage]


if __name__ == "__main__":
    sizes.PIECE = swarm.PIECE = PIECE
    {"give": give, "take": take}[sys.argv[1]](*sys.argv[2:])

"""A server's worker in a process of its own, which reads versions out of the trainer's bucket: `python -m tests.weights.handle_worker`.

Orders come as JSON, one a line, and it answers each with its state; an empty line asks for the state alone. `die` and `stop` with the
number of a part make the process end, or stop, when it has been told of that part and before it reads it.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest
import torch
from tests.weights.buckets import Driver, FileBucket, stand_in
from tests.weights.test_direct import Workers, midflight_direct
from torch import Tensor

SIGNALS = {"die": signal.SIGKILL, "stop": signal.SIGSTOP}


def main() -> None:
    torch.set_num_threads(1)
    stand_in(pytest.MonkeyPatch(), midflight_direct, Driver())
    worker = Workers(1)
    read = FileBucket.read
    ends: dict[str, int] = {}
    parts = 0

    def counted(self: FileBucket, part: Tensor) -> None:
        nonlocal parts
        parts += 1
        for word, number in ends.items():
            if number == parts:
                os.kill(os.getpid(), SIGNALS[word])
        read(self, part)

    FileBucket.read = counted
    for line in sys.stdin:
        told = json.loads(line)
        said: dict[str, object] = {}
        if "order" in told:
            worker.buffers[0].begin(told["order"], index=told["index"], workers=told["workers"])
        elif "take" in told:
            worker.take(told["take"])
            said["serves"] = worker.serves(told["take"])
        else:
            ends |= told
        sys.stdout.write(json.dumps({**worker.buffers[0].state(), **said}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

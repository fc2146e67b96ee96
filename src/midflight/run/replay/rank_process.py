"""One of the ranks that train on recorded rollouts.

    python -m midflight.run.replay.rank_process RANK MEETING RUN [SOCKET]

The configuration comes as JSON on standard input. The first rank gets the number of the socket that
listens at MEETING, and says what each step came to.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

from midflight.config.sections import Config
from midflight.errors import MidflightError
from midflight.run.replay.ranks import HOST
from midflight.run.replay.training import train_rank
from midflight.run.trainer.team import together
from midflight.trainer.model.ranks import join


def main() -> None:
    rank, meeting, source, *sockets = sys.argv[1:]
    config = Config.model_validate_json(sys.stdin.buffer.read())
    join(
        meeting,
        host=HOST,
        rank=int(rank),
        size=config.trainer.ranks,
        device=config.trainer.device,
        listening_fd=int(sockets[0]) if sockets else None,
    )
    try:
        with together():
            train_rank(config, Path(source), say=_say)
    except MidflightError as error:
        sys.exit(f"trainer rank {rank}: {error}")
    dist.destroy_process_group()


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

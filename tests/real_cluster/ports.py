"""Says Ray's ports for it, on a machine so busy that its agents take more than a quarter of a minute to be imported: its raylet gives up then.

A raylet waits that long for a file with the port of each of its agents. Each machine of these tests has a network of its own, so the ports
are fixed, and known before the agents are. Run there: `python ports.py`. Ends when it has written the files.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

PORTS = {"metrics_agent_port": 6381, "dashboard_agent_listen_port": 6382, "metrics_export_port": 6383, "runtime_env_agent_port": 6384}
OPTIONS = (
    *("--dashboard-agent-grpc-port=6381", "--dashboard-agent-listen-port=6382", "--metrics-export-port=6383"),
    *("--runtime-env-agent-port=6384", "--node-manager-port=6385", "--object-manager-port=6386"),
)
"""Of `ray start`."""
SECONDS = 300.0


def write() -> bool:
    """Whether there was a raylet to write them for."""
    for log in Path("/tmp/ray").glob("session_2*/logs/raylet.out"):
        if (node := re.search(r"Setting node ID node_id=([0-9a-f]+)", log.read_text())) is not None:
            for name, port in PORTS.items():
                path = log.parents[1] / f"{name}_{node[1]}"
                if not path.exists():
                    draft = path.with_suffix(".draft")
                    draft.write_text(str(port))
                    draft.rename(path)
            return True
    return False


if __name__ == "__main__":
    end = time.monotonic() + SECONDS
    while not write() and time.monotonic() < end:
        time.sleep(0.2)

"""docs/cluster.md, copied line by line into two machines."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.pages.blocks import ROOT, blocks_of

from .machines import Machine, Network, missing, network
from .ports import OPTIONS
from .rays import BIN, PROMPT, START_SECONDS, environ_of, ports_of, until

pytestmark = [pytest.mark.skipif(missing() is not None, reason=missing() or ""), pytest.mark.timeout(1200)]
pytest.importorskip("ray", reason="Ray is not here (pip install 'midflight[ray]')")
SHORTER = (
    "--set run.steps=6 --set environment.sources.0.heldout=8 --set warm_start.max_steps=4 --set engine.threads=1 --set trainer.threads=1"
)
"""Of the demo's run: the page shows how it is started, not what it learns."""


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Network]:
    with network(tmp_path) as made:
        yield made


def test_two_machines_are_brought_up_as_the_page_says_and_run_the_demo(
    net: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in ("ops", "configs", "src"):
        (checkout / name).symlink_to(ROOT / name)
    (checkout / ".venv").symlink_to(BIN.parent)
    monkeypatch.chdir(checkout)
    first, second = net.boot(), net.boot()
    of_head, of_other, of_run, *_ = [block.text for block in blocks_of(ROOT / "docs" / "cluster.md") if block.language == "bash"]
    assert "10.0.0.1:6379" in of_other and "/shared/" in of_run

    copied(first, of_head.replace("machine.sh head", f"machine.sh head {' '.join(OPTIONS)}"))
    until(lambda: "Ray runtime started" in (checkout / "head.log").read_text(), "the head", START_SECONDS)
    token = first.run("cat", "/tmp/home/.ray/auth_token").stdout
    second.run("bash", "-c", f"mkdir -p /tmp/home/.ray && printf %s '{token}' > /tmp/home/.ray/auth_token")
    copied(second, of_other.replace("10.0.0.1:6379", f"{first.address}:6379 {' '.join(OPTIONS)}"))
    until(lambda: "Ray runtime started" in (checkout / "machine.log").read_text(), "the other machine", START_SECONDS)
    ended = copied(first, f"{of_run.replace('/shared/', f'{tmp_path}/').rstrip()} {SHORTER}\n", timeout=900)
    assert ended.returncode == 0, ended.stdout[-6000:]
    summary = json.loads((tmp_path / "runs" / "demo" / "summary.json").read_text())
    assert summary["steps"] == 6 and summary["failed_requests"] == 0


def copied(machine: Machine, text: str, *, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """A block in a shell there. Ray's ports are said for it, as in all tests here: on a busy machine it would give up."""
    if "machine.sh" in text:
        ports_of(machine)
        return machine.run(*PROMPT, "bash", "-e", "-c", text, env=environ_of(machine), timeout=timeout)
    return machine.run("bash", "-e", "-c", f"{text.rstrip()} 2>&1", env=environ_of(machine), timeout=timeout, check=False)

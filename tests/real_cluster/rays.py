"""A Ray cluster over several machines of `machines.py`, started as docs and recipes say, and runs of Midflight on it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.request import Request, urlopen

from .machines import Machine, Network, network
from .ports import OPTIONS

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
PORT = 6379
PROMPT = ("chrt", "--other", "0", "nice", "-n", "-10")
"""Ray's daemons give up, or give each other up, where they are not run for some seconds: on a busy machine they go first."""
CHECK = """
import sys
from midflight.config.load import load_config
from midflight.errors import MidflightError
from midflight.run.launcher.checks.check import Plan
from midflight.run.launcher.checks.cluster import cluster
try:
    cluster(Plan(load_config(None, sys.argv[1:])))
except MidflightError as error:
    print(error)
    sys.exit(2)
"""
"""What a run says of its cluster before anything starts, with exit status 2; options follow."""
START_SECONDS = 800.0
"""For a machine's Ray to be up: 10 s where nothing else runs."""


SURROUNDINGS = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTEST_", "GLOO_"))},
    "PATH": f"{BIN}:{os.environ['PATH']}",
    "PYTHONPATH": str(ROOT / "src"),
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HOME": "/tmp/home",
}
"""Of what runs on a machine. Its home is its own."""


def environ_of(machine: Machine) -> dict[str, str]:
    """With what a user of that machine would say of it."""
    machine.run("mkdir", "-p", SURROUNDINGS["HOME"])
    return {**SURROUNDINGS, "MIDFLIGHT_ADDRESS": machine.address}


def ports_of(machine: Machine) -> None:
    """See `ports.py`."""
    machine.start(*PROMPT, sys.executable, "-S", str(Path(__file__).with_name("ports.py")))


class Cluster:
    """Machines, of which the first is the head. `folder` is what they share."""

    def __init__(self, net: Network) -> None:
        self.net, self.folder = net, net.shared
        self.token = net.shared / "token"
        self.token.write_text("a-token-of-these-tests-0123456789abcdef")
        self.token.chmod(0o600)
        self.members: dict[str, Machine] = {}
        self._nodes: dict[str, subprocess.Popen[Any]] = {}

    @property
    def environ(self) -> dict[str, str]:
        return {**SURROUNDINGS, "RAY_AUTH_TOKEN_PATH": str(self.token)}

    @property
    def address(self) -> str:
        return f"{self.members['head'].address}:{PORT}"

    def add(self, *names: str, **resources: dict[str, float]) -> None:
        """Machines with these names, one after the other: Ray's head is slow to answer many that join at once. Waits until each is up."""
        for name in names:
            self.join(name, self.net.boot(), resources.get(name, {}))

    def join(self, name: str, machine: Machine, resources: dict[str, float], **environ: str) -> None:
        """One machine, whose Ray has these variables too. Waits until it is up."""
        self.members[name] = machine
        log = self.folder / f"ray-{name}.log"
        ports_of(machine)
        given = [*OPTIONS, "--num-cpus=4", f"--resources={json.dumps(resources)}"]
        place = "head" if name == "head" else self.address
        command = [*PROMPT, "bash", str(ROOT / "ops" / "cluster" / "machine.sh"), place, *given]
        with log.open("wb") as out:
            everything = {**self.environ, **environ_of(machine), "RAY_AUTH_TOKEN_PATH": str(self.token), **environ}
            self._nodes[name] = machine.start(*command, stdout=out, stderr=subprocess.STDOUT, env=everything)
        until(lambda: "Ray runtime started" in log.read_text() or self._nodes[name].poll() is not None, f"Ray on {name}", START_SECONDS)
        assert self._nodes[name].poll() is None, log.read_text()

    def end(self, name: str) -> None:
        """SIGTERM for its Ray, as for a machine that is taken away."""
        ray = [pid for pid, line in self.members[name].processes().items() if " start --block " in line and "nsenter" not in line]
        assert len(ray) == 1, self.members[name].processes()
        os.kill(ray[0], signal.SIGTERM)

    def ended(self, name: str) -> bool:
        """Its Ray."""
        return self._nodes[name].poll() is not None

    def train(self, on: str, config: Path, run: str, *arguments: str) -> Launched:
        """A run into `run`, in the shared folder; the launcher is on machine `on`."""
        return Launched(self, self.members[on], config, self.folder / run, arguments)


class Launched:
    """A launcher on a machine of the cluster, and its run."""

    def __init__(self, cluster: Cluster, machine: Machine, config: Path, folder: Path, arguments: Iterable[str]) -> None:
        self.folder, self._log = folder, folder.with_suffix(".log")
        sets = {"cluster.kind": "ray", "cluster.address": cluster.address, "cluster.token_file": str(cluster.token)}
        words = [x for name, value in sets.items() for x in ("--set", f"{name}={value}")]
        words += [x for argument in arguments for x in (["--set", argument] if "=" in argument else [argument])]
        command = [sys.executable, "-m", "midflight", "train", str(config), "--folder", str(folder), *words]
        with self._log.open("ab") as out:
            self.process = machine.start(*command, stdout=out, stderr=subprocess.STDOUT, env=cluster.environ)

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def journal(self) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = []
        with suppress(FileNotFoundError):
            for line in (self.folder / "metrics.jsonl").read_text().splitlines():
                with suppress(ValueError):  # the last line may be being written
                    lines.append(json.loads(line))
        return lines

    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.journal() if line.get("kind") == "step"]

    def until(self, condition: Callable[[], T], what: str, seconds: float = 300.0) -> T:
        """Waits for it. Fails with what the run said, where the launcher ends before, or the seconds are over."""

        def met() -> T | None:
            found = condition()
            if not found and self.process.poll() is not None and not condition():
                raise AssertionError(f"{what}: the launcher ended with {self.process.returncode}\n{self.said[-6000:]}")
            return found or None

        try:
            return until(met, what, seconds)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.said[-6000:]}") from None

    def until_steps(self, more: int, *, seconds: float = 300.0) -> int:
        """Waits for so many more than there are. Returns how many there are then."""
        goal = (self.steps() or [{"step": 0}])[-1]["step"] + more
        return self.until(lambda: (n := (self.steps() or [{"step": 0}])[-1]["step"]) >= goal and n, f"step {goal}", seconds)


def member(run: Path, engine: str = "", *, host: str = "") -> dict[str, Any]:
    """An engine, by its name or its machine, as the gateway sees it now; empty where it is none, or the gateway cannot be asked."""
    try:
        endpoint = json.loads((run / "endpoint.json").read_text())
        headers = {"Authorization": f"Bearer {endpoint['control_token']}"}
        with urlopen(Request(f"{endpoint['url']}/midflight/v1/engines", headers=headers), timeout=10) as answer:
            members = json.load(answer)["engines"]
    except (OSError, ValueError):
        return {}
    return next((one for one in members if one["name"] == engine or f"//{host}:" in one["url"]), {})


def until(condition: Callable[[], T], what: str, seconds: float) -> T:
    """Polls: what is waited for is in other processes."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.2)
    return found


@contextmanager
def cluster(folder: Path) -> Generator[Cluster]:
    with network(folder) as net:
        yield Cluster(net)

"""What we ask of Ray: which machines live, and actors on them. The one module that imports it; its
object store, its restarts and its names are not used."""

import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from midflight.config.seats import run_resources, seat_resources
from midflight.config.sections import Config
from midflight.errors import ConfigError
from midflight.run.parts import ProcessKind
from midflight.run.places.seat import MONITOR_VARIABLE, SeatActor
from midflight.run.places.seated import Machine, RayPlaces

START = "start"
"""The address that starts a cluster on this machine alone."""
SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", MONITOR_VARIABLE: "0"}
"""Of a Ray that is started here: it tells nobody of itself, and kills nobody for what others keep
in memory.
"""
WRONG_TOKEN = ("AuthenticationError", "InvalidAuthToken", "Unauthenticated")
PRINTER = "ray._private.worker"
STARTS = 3
"""Attempts: on a busy machine Ray gives up its own daemons, which are slow to come up."""
STORE_BYTES = 80 * 2**20
"""The least that its object store can be: we keep nothing there."""


def ray_places(config: Config, *, say: Callable[[str], None]) -> RayPlaces:
    """The places of one attempt at a run, on the cluster that its configuration names."""
    cluster = config.cluster
    asked = seat_resources(config)
    resources = {kind: asked[kind if kind in asked else "rollout"] for kind in ProcessKind}
    environ = {
        name: os.environ[name] for name in ("PYTHONPATH", *cluster.variables) if name in os.environ
    }
    made = connect(config)
    seconds = {"lost_seconds": cluster.lost_seconds, "wait_seconds": cluster.wait_seconds}
    return RayPlaces(made, resources, **seconds, environ=environ, say=say)


def connect(config: Config) -> "RayCluster":
    """The cluster that the configuration names. Waits until it has answered. `ConfigError` says why
    there is none.
    """
    address = config.cluster.address
    token = config.cluster.token_file
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if token is not None:
        path = token.expanduser()
        if not path.is_file():
            raise ConfigError(
                f"cluster.token_file is {token}, and there is no such file; copy there the token "
                "that the cluster was started with."
            )
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(path.absolute()))
    try:
        ray = import_module("ray")  # after the settings, which it reads as it is imported
    except ModuleNotFoundError as error:
        raise ConfigError(
            "cluster.kind = \"ray\" needs Ray, which is not installed; pip install 'midflight[ray]'"
        ) from error
    if not ray.is_initialized():
        _check_listens(address, seconds=config.cluster.lost_seconds)
        if (worker := sys.modules.get(PRINTER)) is not None:
            worker.__dict__["print_to_stdstream"] = _unsaid
        _initialise(ray, address, cpus=math.ceil(run_resources(config).get("CPU", 0.0)))
    return RayCluster(ray)


def _unsaid(*given: object, **named: object) -> None:
    """In the place of what prints Ray's messages of dead machines and failed actors on our standard
    output, whatever that is for.
    """


def _initialise(ray: Any, address: str, *, cpus: int) -> None:
    """`cpus`: what the run asks for, which a cluster that is there for it alone gives it, however
    many cores it has.
    """
    given: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": "ERROR",
        "configure_logging": False,
    }
    if address == START:
        given |= {"include_dashboard": False, "object_store_memory": STORE_BYTES, "num_cpus": cpus}
    else:
        given["address"] = address
    logging.getLogger("ray").setLevel(logging.ERROR)
    for left in reversed(range(STARTS if address == START else 1)):
        try:
            with _silent():
                ray.init(**given)
            return
        except Exception as error:
            if left == 0:
                raise ConfigError(
                    f"cluster.address is {address!r}, and {_why_none(error)}"
                ) from error


@contextmanager
def _silent() -> Generator[None]:
    """Ray's native half writes each of its attempts to standard error; the sentence that comes of
    them says enough.
    """
    with Path(os.devnull).open("wb") as nowhere:
        before = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)


def _check_listens(address: str, *, seconds: float) -> None:
    """Ray itself tries an address where nobody listens for two minutes. Waits `seconds` at most."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():  # `auto`, and what Ray alone understands
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cluster.address is {address!r}, and no cluster was reached there: {error}; start one "
            "there, or mend cluster.address."
        ) from error


def _why_none(error: BaseException) -> str:
    """Ray says the reason in what caused its error."""
    said = ""
    cause = error
    while cause is not None:
        said = f"{said}{type(cause).__name__}: {cause}\n"
        cause = cause.__cause__ or cause.__context__
    if any(sign in said for sign in WRONG_TOKEN):
        return (
            f"the token in {os.environ.get('RAY_AUTH_TOKEN_PATH', '~/.ray/auth_token')} is not "
            "its own; set cluster.token_file to that."
        )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [
        type(error).__name__
    ]
    return f"no cluster was reached there: {lines[0]}"


class RaySeat(SeatActor):
    """The actor, in a worker of Ray's, whose SIGTERM it hears first: an engine that is to end
    leaves, a second one ends it at once.
    """

    def __new__(cls, address: str = "") -> "RaySeat":
        """This alone runs in the worker's main thread, where signals are heard."""
        seat = super().__new__(cls)
        before = signal.getsignal(signal.SIGTERM)

        def recalled(number: int, frame: FrameType | None) -> None:
            if not seat.recall() and callable(before):
                before(number, frame)

        signal.signal(signal.SIGTERM, recalled)
        return seat


class RayCluster:
    """A `Cluster`. Actors die with this process: they have no names, and are not detached."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._actor = ray.remote(RaySeat)

    def machines(self) -> Sequence[Machine]:
        return [
            Machine(
                node["NodeID"],
                node["NodeManagerAddress"],
                {name: float(n) for name, n in node["Resources"].items()},
            )
            for node in self._ray.nodes()
            if node["Alive"]
        ]

    def leaving(self) -> Collection[str]:
        found = import_module("ray._private.state").state.get_draining_nodes()
        return (
            {node["NodeManagerAddress"] for node in self._ray.nodes() if node["NodeID"] in found}
            if found
            else ()
        )

    def seat(self, resources: Mapping[str, float], *, machine: str = "") -> Any:
        if not machine:
            return self._seat(resources)
        strategies = import_module("ray.util.scheduling_strategies")
        return self._seat(
            resources,
            scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(machine, soft=False),
        )

    async def group(
        self, resources: Mapping[str, float], count: int
    ) -> tuple[Sequence[Any], Callable[[], None]]:
        groups = import_module("ray.util.placement_group")
        strategies = import_module("ray.util.scheduling_strategies")
        group = groups.placement_group([dict(resources) or {"CPU": 0.001}] * count, strategy="PACK")
        try:
            await group.ready()
        except BaseException:
            groups.remove_placement_group(group)
            raise
        bundles = [
            strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            for index in range(count)
        ]
        return [
            self._seat(resources, scheduling_strategy=bundle) for bundle in bundles
        ], lambda: groups.remove_placement_group(group)

    def _seat(self, resources: Mapping[str, float], **options: Any) -> Any:
        asked = dict(resources)
        cpus = asked.pop("CPU", 0.0)
        gpus = asked.pop("GPU", 0.0)
        memory = asked.pop("memory", None)
        options |= {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "memory": memory,
            "resources": asked or None,
        }
        return self._actor.options(max_restarts=0, max_task_retries=0, **options).remote()

    def call(self, seat: Any, method: str, *given: object) -> Awaitable[Any]:
        return getattr(seat, method).remote(*given)

    def kill(self, seat: Any) -> None:
        self._ray.kill(seat)

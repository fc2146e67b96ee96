"""The cluster of Ray: its machines, and actors on them.

No other module imports Ray. Its object store, its restarts and its names are not used.
"""

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
from midflight.run.places.actor import MONITOR_VARIABLE, PlaceActor
from midflight.run.places.cluster import Machine, RayPlaces

START = "start"
"""The address that starts a cluster on this machine alone."""
SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", MONITOR_VARIABLE: "0"}
"""The settings of a Ray that is started here: it reports no usage, and kills no process for the
memory that others use.
"""
WRONG_TOKEN = ("AuthenticationError", "InvalidAuthToken", "Unauthenticated")
PRINTER = "ray._private.worker"
STARTS = 3
"""The number of attempts. On a busy machine Ray gives up its own daemons, because they come up
slowly.
"""
STORE_BYTES = 80 * 2**20
"""The least size that Ray's object store can have: we keep nothing there."""


def ray_places(config: Config, *, say: Callable[[str], None]) -> RayPlaces:
    """The places of one attempt at a run, on the cluster that its configuration names."""
    cluster = config.cluster
    asked = seat_resources(config)
    resources = {kind: asked.get(kind, asked["rollout"]) for kind in ProcessKind}
    environ = {
        name: os.environ[name] for name in ("PYTHONPATH", *cluster.variables) if name in os.environ
    }
    return RayPlaces(
        connect(config),
        resources,
        lost_seconds=cluster.lost_seconds,
        wait_seconds=cluster.wait_seconds,
        environ=environ,
        say=say,
    )


def connect(config: Config) -> "RayCluster":
    """The cluster that the configuration names. Waits until it has answered. Raises `ConfigError`
    with the reason if there is none.
    """
    address = config.cluster.address
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if config.cluster.token_file is not None:
        _use_token(config.cluster.token_file)
    try:
        ray = import_module("ray")  # after the settings, which it reads as it is imported
    except ModuleNotFoundError as error:
        raise ConfigError(
            "cluster.kind = \"ray\" needs Ray, which is not installed; pip install 'midflight[ray]'"
        ) from error
    if not ray.is_initialized():
        _check_listens(address, seconds=config.cluster.lost_seconds)
        worker = sys.modules.get(PRINTER)
        if worker is not None:
            worker.__dict__["print_to_stdstream"] = _unsaid
        _initialise(ray, address, cpus=math.ceil(run_resources(config).get("CPU", 0.0)))
    return RayCluster(ray)


def _use_token(file: Path) -> None:
    path = file.expanduser()
    if not path.is_file():
        raise ConfigError(
            f"cluster.token_file is {file}, and there is no such file; copy there the token "
            "that the cluster was started with."
        )
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(path.absolute()))


def _unsaid(*given: object, **named: object) -> None:
    """Replaces the function that prints Ray's messages of dead machines and failed actors on our
    standard output, which may be in use for something else.
    """


def _initialise(ray: Any, address: str, *, cpus: int) -> None:
    """A cluster that is started for this run alone gives it the `cpus` that it asks for, however
    many cores the machine has.
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
    """Silences standard error: Ray's native half writes each of its attempts there, and our own
    error says enough.
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
    """Checks that something listens at the address, because Ray itself tries for two minutes. Waits
    `seconds` at most.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():  # `auto`, or another form that Ray alone understands
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cluster.address is {address!r}, and no cluster was reached there: {error}; start one "
            "there, or mend cluster.address."
        ) from error


def _why_none(error: BaseException) -> str:
    """The reason that Ray has no cluster; it is in the causes of Ray's error."""
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
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    return f"no cluster was reached there: {first}"


class RayActor(PlaceActor):
    """The actor, in a worker of Ray. It gets the worker's SIGTERM first: then an engine leaves in
    order. A second SIGTERM ends the worker at once.
    """

    def __new__(cls, address: str = "") -> "RayActor":
        """Sets the handler here, because no other method runs in the worker's main thread, where
        signals arrive.
        """
        seat = super().__new__(cls)
        before = signal.getsignal(signal.SIGTERM)

        def recalled(number: int, frame: FrameType | None) -> None:
            if not seat.recall() and callable(before):
                before(number, frame)

        signal.signal(signal.SIGTERM, recalled)
        return seat


def _machine(node: Mapping[str, Any]) -> Machine:
    resources = {name: float(amount) for name, amount in node["Resources"].items()}
    return Machine(node["NodeID"], node["NodeManagerAddress"], resources)


class RayCluster:
    """A `Cluster` of Ray. Actors die with this process: they have no names, and are not detached."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._actor = ray.remote(RayActor)

    def machines(self) -> Sequence[Machine]:
        return [_machine(node) for node in self._ray.nodes() if node["Alive"]]

    def leaving(self) -> Collection[str]:
        found = import_module("ray._private.state").state.get_draining_nodes()
        if not found:
            return ()
        return {node["NodeManagerAddress"] for node in self._ray.nodes() if node["NodeID"] in found}

    def seat(self, resources: Mapping[str, float], *, machine: str = "") -> Any:
        if not machine:
            return self._seat(resources)
        strategies = import_module("ray.util.scheduling_strategies")
        strategy = strategies.NodeAffinitySchedulingStrategy(machine, soft=False)
        return self._seat(resources, scheduling_strategy=strategy)

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
        seats: list[Any] = []
        for index in range(count):
            strategy = strategies.PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=index
            )
            seats.append(self._seat(resources, scheduling_strategy=strategy))

        def give_back() -> None:
            groups.remove_placement_group(group)

        return seats, give_back

    def _seat(self, resources: Mapping[str, float], **options: Any) -> Any:
        asked = dict(resources)
        actor = self._actor.options(
            max_restarts=0,
            max_task_retries=0,
            num_cpus=asked.pop("CPU", 0.0),
            num_gpus=asked.pop("GPU", 0.0),
            memory=asked.pop("memory", None),
            resources=asked or None,  # their remains
            **options,
        )
        return actor.remote()

    def call(self, seat: Any, method: str, *given: object) -> Awaitable[Any]:
        return getattr(seat, method).remote(*given)

    def kill(self, seat: Any) -> None:
        self._ray.kill(seat)

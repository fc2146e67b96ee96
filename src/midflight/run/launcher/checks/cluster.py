"""Checks, before anything is started, that a cluster has all that a run asks for. There is one
sentence for each thing that is missing.

Every machine is asked by a seat of its own, which takes none of its resources.
"""

import asyncio
import os
import platform
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from importlib import metadata
from pathlib import Path

import msgspec

from midflight.config.seats import engine_seats, engines_min, seat_resources
from midflight.config.sections import Config
from midflight.config.shards import unsharded
from midflight.errors import ConfigError
from midflight.run.launcher.checks.check import Plan
from midflight.run.launcher.checks.fit import hardware_of, misfits
from midflight.run.launcher.shutdown import main_task
from midflight.run.launcher.trial import to_terminal
from midflight.run.places.actor import MONITOR_VARIABLE, MachineGreeting
from midflight.run.places.cluster import Cluster, Machine, said_of, why_lost
from midflight.run.reminder import Reminder
from midflight.version import __version__
from midflight.wire.hosts import is_loopback

ROUNDING = 1e-6
"""The tolerance in sums of resources, which Ray counts in ten-thousandths."""
WHERE = "{where}"
"""Stands in a sentence for the machines of which it is true."""
NOT_THERE = ("No module named 'midflight", "cannot import name")
"""Ray's messages for a machine whose Python does not have our package, or has an older one."""


def cluster(plan: Plan) -> None:
    """Raises `ConfigError` unless the run's places can be had. Every machine of a cluster is asked.
    Nothing is started, and the cluster stays connected.
    """
    if plan.config.cluster.kind == "local":
        return
    from midflight.run.places.ray import connect

    config = plan.config if plan.trains else unsharded(plan.config)
    asked = check_cluster(connect(config), config, say=to_terminal)
    if main_task(asked) != 0:
        raise KeyboardInterrupt


async def check_cluster(
    cluster: Cluster, config: Config, *, say: Callable[[str], None] = lambda _: None
) -> None:
    """Raises `ConfigError` with all that is wrong. Waits for an answer of each machine, at most
    `cluster.wait_seconds`: Python and our package are imported there first, which takes long on a
    busy machine. `say` is told which machines are waited for.
    """
    machines = cluster.machines()
    problems = [*_open(config, machines), *_transport(config, machines), *_hosts(config, machines)]
    if not config.cluster.autoscaler:
        lacking = list(_resources(config, machines))
        problems += lacking or _room(config, machines)
        problems += misfits(config, hardware_of(machines))
    problems += await _problems_there(cluster, machines, config, say=say)
    if problems:
        raise ConfigError("\n".join(problems))


async def _problems_there(
    cluster: Cluster, machines: Sequence[Machine], config: Config, *, say: Callable[[str], None]
) -> list[str]:
    """A sentence for each problem that machines tell of themselves. Waits for all answers."""
    nearest = _existing(Path(config.run.folder))
    seconds = config.cluster.wait_seconds
    waiting = {machine.address: None for machine in machines}

    async def asked(machine: Machine) -> MachineGreeting | str:
        said = await _greeting(cluster, machine, nearest, seconds=seconds)
        waiting.pop(machine.address, None)
        return said

    def say_waiting(passed: float) -> None:
        say(
            f"{_listed(list(waiting))} did not answer in {passed:.0f} s, of {seconds:g} s that "
            "cluster.wait_seconds gives"
        )

    with closing(Reminder(say_waiting)):
        greetings = await asyncio.gather(*map(asked, machines))
    found: defaultdict[str, list[str]] = defaultdict(list)
    for machine, greeting in zip(machines, greetings, strict=True):
        if isinstance(greeting, str):
            found[greeting].append(machine.address)
            continue
        for problem in _differences(greeting, config):
            found[problem].append(machine.address)
    return [problem.replace(WHERE, _listed(addresses)) for problem, addresses in found.items()]


def _existing(folder: Path) -> Path:
    """The folder, or the nearest parent that exists: nothing is made before all is checked."""
    whole = folder.absolute()
    return next(place for place in (whole, *whole.parents) if place.is_dir())


def _listed(addresses: Sequence[str]) -> str:
    return addresses[0] if len(addresses) == 1 else f"{addresses[0]} and {len(addresses) - 1} more"


# --- What the list of machines says ---------------------------------------------------------------


def _open(config: Config, machines: Sequence[Machine]) -> Iterator[str]:
    if config.cluster.token_file is not None or os.environ.get("RAY_AUTH_MODE") == "token":
        return
    others = [machine.address for machine in machines if not is_loopback(machine.address)]
    if others:
        yield (
            f"the cluster at {_listed(others)} asks nobody for a token, so that whoever reaches it "
            "can run anything there; start Ray with RAY_AUTH_MODE=token, and name its token in "
            "cluster.token_file."
        )


def _resources(config: Config, machines: Sequence[Machine]) -> Iterator[str]:
    for part, wanted in seat_resources(config).items():
        if any(_has_all(machine, wanted) for machine in machines):
            continue
        is_any_missing = False
        for name, amount in wanted.items():
            largest = max((machine.resources.get(name, 0.0) for machine in machines), default=0.0)
            if machines and largest >= amount:
                continue
            is_any_missing = True
            there = f"the largest has {largest:g}" if largest else "none has any"
            yield (
                f"cluster.{part}: no machine has {name}: {amount:g}; {there}. Lower it, or "
                "add a machine."
            )
        if not is_any_missing:
            yield (
                f"cluster.{part}: no machine has all of {_said(wanted)} together. Lower it, or "
                "add a machine."
            )


def _has_all(machine: Machine, wanted: Mapping[str, float]) -> bool:
    return all(machine.resources.get(name, 0.0) >= amount for name, amount in wanted.items())


def _room(config: Config, machines: Sequence[Machine]) -> Iterator[str]:
    """Checks that all seats with which a run begins find room at once, in use or not. The answer is
    exact: all ways to place the seats are tried.
    """
    asked = seat_resources(config)
    ranks = config.trainer.ranks
    shards = config.gateway.shards
    # where engines differ, only the sum is compared
    if len({tuple(sorted(seat.items())) for seat in engine_seats(config)}) > 1:
        yield from _sum(config, machines)
        return
    engines = engines_min(config) + (config.distillation.teacher is not None)
    best = {(0, 0): 0}  # the most engines that there is room for beside so many gateways and ranks
    for machine in machines:
        best = _best_with(machine, best, asked, gateways=shards, ranks=ranks, engines=engines)
    if best.get((shards, ranks), -1) >= engines:
        return
    gateways = max(gateway for gateway, _ in best)
    seated = max(trainer for gateway, trainer in best if gateway == gateways)
    all_gateways = "the gateways" if shards > 1 else "the gateway"
    if gateways < shards:
        part = "rollout"
        wanted = shards
        beside = ""
        room = gateways
    elif seated == ranks:
        part = "engine"
        wanted = engines
        beside = f"beside {all_gateways} and the trainer "
        room = best[shards, ranks]
    else:
        part = "trainer"
        wanted = ranks
        beside = f"beside {all_gateways} "
        room = seated
    yield (
        f"cluster.{part}: the run begins with {wanted} seats of {_said(asked[part])} each, and "
        f"{beside}the cluster has room for {room} ({said_of(machines)}). Ask for less, add "
        "a machine, or set cluster.autoscaler where machines come by themselves."
    )


def _best_with(
    machine: Machine,
    before: Mapping[tuple[int, int], int],
    asked: Mapping[str, Mapping[str, float]],
    *,
    gateways: int,
    ranks: int,
    engines: int,
) -> dict[tuple[int, int], int]:
    """`before` maps the numbers of gateways and ranks that have a seat to the most engines that
    there is room for beside them. The result does so with one machine more. Each of the three
    counts up to the number that the run has.
    """
    best: dict[tuple[int, int], int] = {}
    for (placed, seated), found in before.items():
        for more_gateways in range(gateways - placed + 1):
            for more_ranks in range(ranks - seated + 1):
                fits = _engines_beside(machine, asked, more_gateways, more_ranks, most=engines)
                if fits is None:
                    continue
                key = (placed + more_gateways, seated + more_ranks)
                best[key] = max(best.get(key, 0), min(engines, found + fits))
    return best


def _sum(config: Config, machines: Sequence[Machine]) -> Iterator[str]:
    asked = seat_resources(config)
    seats = list(engine_seats(config)[: engines_min(config)])
    seats += [asked["trainer"]] * config.trainer.ranks
    seats += [asked["rollout"]] * config.gateway.shards
    names = {name for seat in seats for name in seat}
    for name in sorted(names):
        amount = sum(seat.get(name, 0.0) for seat in seats)
        there = sum(machine.resources.get(name, 0.0) for machine in machines)
        if amount > there + ROUNDING:
            yield (
                f"the run begins with seats of {name}: {amount:g} in all, and the cluster has "
                f"{said_of(machines)}. Ask for less, or add a machine."
            )


def _engines_beside(
    machine: Machine,
    asked: Mapping[str, Mapping[str, float]],
    gateways: int,
    ranks: int,
    *,
    most: int,
) -> int | None:
    """Returns the number of engines, `most` at most, that have room there beside so many gateways
    and ranks. Returns None if the gateways and ranks themselves have no room.
    """
    fits = most
    for name in {name for wanted in asked.values() for name in wanted}:
        left = (
            machine.resources.get(name, 0.0)
            - gateways * asked["rollout"].get(name, 0.0)
            - ranks * asked["trainer"].get(name, 0.0)
        )
        if left < -ROUNDING:
            return None
        each = asked["engine"].get(name, 0.0)
        if each:
            fits = min(fits, int((left + ROUNDING) / each))
    return fits


def _hosts(config: Config, machines: Sequence[Machine]) -> Iterator[str]:
    for index, server in enumerate(config.engine.servers):
        if server.host and all(server.host != machine.address for machine in machines):
            yield (
                f"engine.servers.{index}.host is {server.host}, which is no machine of the "
                f"cluster; name one of {_listed([m.address for m in machines])}."
            )


def _said(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name}: {amount:g}" for name, amount in resources.items())


def _transport(config: Config, machines: Sequence[Machine]) -> Iterator[str]:
    if config.weights.transport == "shared_memory" and len(machines) > 1:
        yield (
            'weights.transport = "shared_memory" reaches no other machine, and the cluster has '
            f'{len(machines)}; set it to "pull".'
        )


# --- What each machine says of itself -------------------------------------------------------------


async def _greeting(
    cluster: Cluster, machine: Machine, folder: Path, *, seconds: float
) -> MachineGreeting | str:
    """The machine's greeting, or a sentence that says why there is none."""
    nonce = f".midflight-{secrets.token_hex(8)}"
    seat = cluster.seat({}, machine=machine.id)
    try:
        async with asyncio.timeout(seconds):
            said = await cluster.call(seat, "hello", str(folder), nonce, str(Path.cwd()))
        if not _was_written(folder / nonce, nonce):
            return (
                f"run.folder is below {folder}, and what {WHERE} writes there is not seen here; "
                "put it on a file system that all machines share."
            )
        return msgspec.json.decode(said, type=MachineGreeting)
    except TimeoutError:
        return (
            f"{WHERE} did not answer within {seconds:g} s; look at Ray's logs there, take it out "
            "of the cluster, or raise cluster.wait_seconds."
        )
    except Exception as error:
        why = why_lost(error)
        if why is None:
            raise
        if any(sign in str(error) for sign in NOT_THERE):
            return (
                f"{WHERE} has no midflight {__version__} in the Python that runs Ray there; "
                "install it."
            )
        return (
            f"{WHERE} gives no seat ({why}); look at Ray's logs there, or take it out of the "
            "cluster."
        )
    finally:
        (folder / nonce).unlink(missing_ok=True)
        cluster.kill(seat)


def _was_written(file: Path, nonce: str) -> bool:
    try:
        return file.read_text() == nonce
    except OSError:
        return False


def _differences(greeting: MachineGreeting, config: Config) -> Iterator[str]:
    here = (__version__, platform.python_version(), metadata.version("torch"))
    there = (greeting.midflight, greeting.python, greeting.torch)
    for name, ours, theirs in zip(("midflight", "Python", "torch"), here, there, strict=True):
        if _public(ours) != _public(theirs):
            yield (
                f"{WHERE} has {name} {theirs}, and this machine has {ours}; install the same on "
                "all."
            )
    if not greeting.has_folder:
        yield (
            f"{WHERE} has no folder {Path.cwd()}, from which the run was started and finds its "
            "modules and files; start it from a shared one."
        )
    if greeting.kills_for_memory:
        yield (
            f"{WHERE} has Ray's memory monitor on, which ends parts of the run when anybody fills "
            f"the machine; start Ray there with {MONITOR_VARIABLE}=0."
        )


def _public(version: str) -> str:
    """The version without the device that it was built for: a head may have no GPU."""
    return version.partition("+")[0]

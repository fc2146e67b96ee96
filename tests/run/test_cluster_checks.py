"""What a cluster lacks is said before anything is started: one sentence for each thing, and all at once."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from midflight.config.load import load_config
from midflight.config.sections import Config
from midflight.errors import ConfigError
from midflight.run.launcher.checks import cluster as checks
from midflight.run.launcher.checks.cluster import check_cluster
from midflight.run.places.actor import MONITOR_VARIABLE, MachineGreeting, PlaceActor
from midflight.run.places.cluster import Machine
from midflight.run.places.ray import connect
from midflight.testing.virtual_time import run_virtual

from .fake_cluster import ActorDiedError, FakeCluster

HEAD = Machine("h", "127.0.0.1", {"CPU": 8.0})
FAR = Machine("f", "10.0.0.2", {"CPU": 8.0, "GPU": 4.0})


@pytest.fixture(autouse=True)
def sound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(MONITOR_VARIABLE, "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "before")  # so that it is put back
    monkeypatch.chdir(tmp_path)


def config(*options: str) -> Config:
    return load_config(None, ["cluster.kind=ray", "run.folder=runs/x", *options])


def problems(cluster: FakeCluster, given: Config) -> list[str]:
    async def main() -> list[str]:
        try:
            await check_cluster(cluster, given)
        except ConfigError as error:
            return str(error).splitlines()
        return []

    return asyncio.run(main())


class Other(FakeCluster):
    """A cluster whose second machine says other things of itself."""

    def __init__(self, **said: Any) -> None:
        super().__init__(HEAD, FAR)
        self._said = said

    def seat(self, resources: Mapping[str, float], *, machine: str = "") -> PlaceActor:
        seat = super().seat(resources, machine=machine)
        if machine == FAR.id:
            hello, said = seat.hello, self._said

            async def other(folder: str, nonce: str, cwd: str) -> bytes:
                greeting = msgspec.json.decode(await hello(folder, nonce, cwd), type=MachineGreeting)
                return msgspec.json.encode(msgspec.structs.replace(greeting, **said))

            seat.hello = other  # pyright: ignore[reportAttributeAccessIssue]
        return seat


def test_a_sound_cluster_is_left_as_it_was(tmp_path: Path) -> None:
    cluster = FakeCluster(HEAD, FAR)
    assert problems(cluster, config()) == []
    assert len(cluster.killed) == 2 and cluster.asked == [{}, {}] and list(tmp_path.iterdir()) == []


def test_a_resource_that_no_machine_has_is_named_with_the_most_that_there_is() -> None:
    cluster = FakeCluster(HEAD, FAR)
    assert problems(cluster, config("cluster.engine={ GPU = 8 }")) == [
        "cluster.engine: no machine has GPU: 8; the largest has 4. Lower it, or add a machine."
    ]
    assert problems(FakeCluster(HEAD), config("trainer.device=cuda")) == [
        "cluster.trainer: no machine has GPU: 1; none has any. Lower it, or add a machine."
    ]
    big, gpus = Machine("b", "10.0.0.3", {"CPU": 64.0}), Machine("g", "10.0.0.4", {"CPU": 1.0, "GPU": 8.0})
    assert problems(FakeCluster(big, gpus), config("cluster.engine={ GPU = 8, CPU = 32 }")) == [
        "cluster.engine: no machine has all of GPU: 8, CPU: 32 together. Lower it, or add a machine."
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("engine.count=3", "cluster.engine={ GPU = 2 }"),  # each of three fits, and all need 6
            "cluster.engine: the run begins with 3 seats of GPU: 2 each, and beside the gateway and the trainer the cluster has room for 2 "
            "(2 machines with CPU: 16, GPU: 4).",
        ),
        (
            ("trainer.ranks=3", "cluster.trainer={ CPU = 5 }", "cluster.rollout={ CPU = 2 }"),  # one on each machine
            "cluster.trainer: the run begins with 3 seats of CPU: 5 each, and beside the gateway the cluster has room for 2 (",
        ),
        (
            ("trainer.ranks=2", "cluster.trainer={ CPU = 8 }", "cluster.rollout={ CPU = 1 }", "cluster.engine={}"),
            "cluster.trainer: the run begins with 2 seats of CPU: 8 each, and beside the gateway the cluster has room for 1 (",
        ),
        (
            ("gateway.shards=3", "rollout.groups_per_step=6", "cluster.rollout={ CPU = 5 }"),  # one on each machine
            "cluster.rollout: the run begins with 3 seats of CPU: 5 each, and the cluster has room for 2 (",
        ),
        (
            ("gateway.shards=2", "cluster.rollout={ CPU = 7 }", "cluster.trainer={ CPU = 2 }"),
            "cluster.trainer: the run begins with 1 seats of CPU: 2 each, and beside the gateways the cluster has room for 0 (",
        ),
    ],
)
def test_a_cluster_that_has_no_room_for_all_seats_at_once_is_told_how_many_it_has_room_for(options: tuple[str, ...], said: str) -> None:
    (found,) = problems(FakeCluster(HEAD, FAR), config(*options))
    assert found.startswith(said)
    assert found.endswith(" Ask for less, add a machine, or set cluster.autoscaler where machines come by themselves.")
    assert problems(FakeCluster(HEAD, FAR), config(*options, "cluster.autoscaler=true")) == []


def test_servers_that_differ_must_fit_and_their_machines_be_there() -> None:
    servers = "engine.servers=[{host='10.0.0.9', tensor_parallel=4}, {tensor_parallel=2}]"
    found = problems(FakeCluster(HEAD, FAR), config("engine.kind=vllm", "engine.device=cuda", servers))
    assert found == [
        f"engine.servers.0.host is 10.0.0.9, which is no machine of the cluster; name one of {HEAD.address} and 1 more.",
        "the run begins with seats of GPU: 6 in all, and the cluster has 2 machines with CPU: 16, GPU: 4. Ask for less, or add a machine.",
    ]
    fits = servers.replace("10.0.0.9", FAR.address).replace("{tensor_parallel=2}", "{}").replace("=4", "=3")
    assert problems(FakeCluster(HEAD, FAR), config("engine.kind=vllm", "engine.device=cuda", fits)) == []


def test_seats_have_room_if_there_is_any_way_to_place_them() -> None:
    """The gateway takes the machine whose memory is least, though the first has room for it too: else two ranks of 8 would have none."""
    options = (
        "trainer.ranks=2",
        "cluster.trainer={ CPU = 8 }",
        "cluster.rollout={ CPU = 1 }",
        "cluster.engine={ CPU = 1 }",
        "engine.count=2",
    )
    small = Machine("s", "10.0.0.3", {"CPU": 3.0})
    assert problems(FakeCluster(HEAD, FAR, small), config(*options)) == []
    (said,) = problems(FakeCluster(HEAD, FAR, small), config(*options, "engine.count=3"))
    assert "begins with 3 seats of CPU: 1 each" in said and "has room for 2 (3 machines with CPU: 19, GPU: 4)" in said
    assert problems(FakeCluster(HEAD, FAR, small), config(*options, "engine.count=3", "cluster.engines_min=2")) == []


def test_where_machines_come_by_themselves_none_need_have_what_a_part_asks_for() -> None:
    assert problems(FakeCluster(HEAD), config("cluster.engine={ GPU = 8 }", "cluster.autoscaler=true")) == []


def test_shared_memory_is_refused_over_machines_and_allowed_on_one() -> None:
    (said,) = problems(FakeCluster(HEAD, FAR), config("weights.transport=shared_memory"))
    assert said.startswith('weights.transport = "shared_memory" reaches no other machine, and the cluster has 2; set it to "pull".')
    assert problems(FakeCluster(HEAD), config("weights.transport=shared_memory")) == []


def test_a_cluster_that_asks_nobody_for_a_token_is_refused_unless_it_is_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE")
    assert problems(FakeCluster(HEAD), config()) == []
    (said,) = problems(FakeCluster(HEAD, FAR), config())
    assert said.startswith("the cluster at 10.0.0.2 asks nobody for a token, so that whoever reaches it can run anything there")
    assert problems(FakeCluster(HEAD, FAR), config("cluster.token_file=token")) == []


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"midflight": "0.0.1"}, "10.0.0.2 has midflight 0.0.1, and this machine has "),
        ({"python": "3.9.1"}, "10.0.0.2 has Python 3.9.1, and this machine has "),
        ({"torch": "2.0.0"}, "10.0.0.2 has torch 2.0.0, and this machine has "),
        ({"has_folder": False}, "10.0.0.2 has no folder "),
        ({"kills_for_memory": True}, "10.0.0.2 has Ray's memory monitor on"),
    ],
)
def test_a_machine_that_is_unlike_this_one_is_named_with_what_differs(said: dict[str, Any], words: str) -> None:
    (problem,) = problems(Other(**said), config())
    assert problem.startswith(words)


def test_another_build_of_one_torch_is_the_same_torch() -> None:
    assert checks._public("2.13.0+cpu") == checks._public("2.13.0+cu130")
    assert checks._public("2.13.0") != checks._public("2.13.1")


def test_a_folder_that_a_machine_does_not_share_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the other machine writes stays there."""

    class Apart(FakeCluster):
        def seat(self, resources: Mapping[str, float], *, machine: str = "") -> PlaceActor:
            seat = super().seat(resources, machine=machine)
            hello = seat.hello
            elsewhere = tmp_path.parent / "elsewhere"

            async def there(folder: str, nonce: str, cwd: str) -> bytes:
                return await hello(str(elsewhere) if machine == FAR.id else folder, nonce, cwd)

            seat.hello = there  # pyright: ignore[reportAttributeAccessIssue]
            return seat

    (said,) = problems(Apart(HEAD, FAR), config())
    assert (
        said
        == f"run.folder is below {tmp_path}, and what 10.0.0.2 writes there is not seen here; put it on a file system that all machines share."
    )


def test_a_machine_without_the_package_is_named_and_so_is_one_that_gives_no_seat(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster(HEAD, FAR)

    async def fail(method: str) -> None:
        raise ActorDiedError("The actor failed to be imported.\nModuleNotFoundError: No module named 'midflight'")

    monkeypatch.setattr(cluster, "fail", fail)
    (said,) = problems(cluster, config())
    assert re.fullmatch(r"127\.0\.0\.1 and 1 more has no midflight \S+ in the Python that runs Ray there; install it\.", said)

    async def crash(method: str) -> None:
        raise ActorDiedError("worker died")

    monkeypatch.setattr(cluster, "fail", crash)
    (said,) = problems(cluster, config())
    assert "gives no seat (ActorDiedError: worker died)" in said


def test_a_machine_that_is_slow_to_start_a_seat_is_waited_for_as_long_as_for_any_seat_and_that_is_said() -> None:
    said = list[str]()

    async def main() -> None:
        cluster = FakeCluster(HEAD)
        cluster.room.clear()
        asyncio.get_running_loop().call_later(1700, cluster.room.set)
        await check_cluster(cluster, config(), say=said.append)

    run_virtual(main())
    assert said[:2] == [f"127.0.0.1 did not answer in {passed} s, of 1800 s that cluster.wait_seconds gives" for passed in (30, 60)]
    assert len(said) == 6


def test_a_machine_that_never_answers_is_refused_after_the_time_that_an_option_gives() -> None:
    async def main() -> None:
        cluster = FakeCluster(HEAD)
        cluster.room.clear()
        await check_cluster(cluster, config("cluster.wait_seconds=40"))

    with pytest.raises(ConfigError, match=r"^127\.0\.0\.1 did not answer within 40 s; .* or raise cluster\.wait_seconds\.$"):
        run_virtual(main())


def test_a_token_that_is_not_there_and_ray_that_is_not_installed_are_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.token_file is nowhere, and there is no such file"):
        connect(config("cluster.token_file=nowhere"))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="pip install 'midflight\\[ray\\]'"):
        connect(config())


class FakeRay(SimpleNamespace):
    """Of which `init` fails as a test says."""

    def __init__(self, *failures: Exception) -> None:
        super().__init__(failures=[*failures], asked=[])

    def is_initialized(self) -> bool:
        return False

    def init(self, **given: object) -> None:
        self.asked.append(given)
        if self.failures:
            raise self.failures.pop(0)

    def remote(self, actor: type) -> type:
        return actor


def test_a_cluster_that_a_run_starts_is_tried_again_and_has_what_the_run_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(Exception("The current node timed out during startup."), Exception("The current node timed out during startup."))
    monkeypatch.setitem(sys.modules, "ray", ray)  # type: ignore[arg-type]
    connect(config("cluster.address=start", "engine.count=3", "trainer.ranks=2"))
    assert [given["num_cpus"] for given in ray.asked] == [6, 6, 6]


def test_ray_prints_nothing_on_the_standard_output_of_a_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It would, of each machine that dies, in the midst of what the run says, or of JSON."""
    worker = ModuleType("ray._private.worker")
    worker.print_to_stdstream = lambda data, ignore_prefix: print(data)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray._private.worker", worker)
    monkeypatch.setitem(sys.modules, "ray", FakeRay())  # type: ignore[arg-type]
    connect(config("cluster.address=start"))
    worker.print_to_stdstream({"lines": ["The node has been marked dead"]}, ignore_prefix=False)
    assert capsys.readouterr().out == ""


def test_no_cluster_and_a_wrong_token_are_each_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("x" * 40)
    with socket.create_server(("127.0.0.1", 0)) as found:
        address = f"127.0.0.1:{found.getsockname()[1]}"
        monkeypatch.setitem(sys.modules, "ray", FakeRay(ConnectionError("\nFailed to connect\nmore")))  # type: ignore[arg-type]
        with pytest.raises(ConfigError) as none:
            connect(config(f"cluster.address={address}"))
        failure = ConnectionError("Failed to connect")
        failure.__cause__ = RuntimeError("Traceback\nUnauthenticated: RPC error: InvalidAuthToken")
        monkeypatch.setitem(sys.modules, "ray", FakeRay(failure))  # type: ignore[arg-type]
        with pytest.raises(ConfigError) as wrong:
            connect(config(f"cluster.address={address}", f"cluster.token_file={tmp_path / 'token'}"))
    assert str(none.value) == f"cluster.address is '{address}', and no cluster was reached there: Failed to connect"
    said = f"cluster.address is '{address}', and the token in {tmp_path / 'token'} is not its own; set cluster.token_file to that."
    assert str(wrong.value) == said
    with pytest.raises(ConfigError, match=r"and no cluster was reached there: .*refused; start one there, or mend cluster\.address"):
        connect(config(f"cluster.address={address}"))

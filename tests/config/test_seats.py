"""What a run asks of a cluster, and what a cluster changes of its configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from midflight.config.load import load_config
from midflight.config.seats import by_handles, by_server_engine, engines_min, run_resources, seat_resources, stays_on_gpus
from midflight.config.transport import LARGE_BYTES, MANY_ENGINES, way_of_weights
from midflight.errors import ConfigError

RAY = "cluster.kind=ray"


def test_one_configuration_is_of_a_laptop_and_of_a_cluster(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        """
[engine]
count = 6
[cluster]
address = "10.0.0.5:6379"
token_file = "token"
engine = { GPU = 4, CPU = 8 }
engines_min = 3
lost_seconds = 30
variables = ["HF_HOME"]
"""
    )
    here, there = load_config(tmp_path / "run.toml"), load_config(tmp_path / "run.toml", [RAY])
    assert (here.engine.count, here.weights.transport) == (6, "shared_memory")
    assert (there.engine.count, there.weights.transport, engines_min(there)) == (6, "pull", 3)
    assert seat_resources(there)["engine"] == {"GPU": 4.0, "CPU": 8.0}
    assert there.cluster.lost_seconds == 30.0 and there.cluster.token_file == Path("token")


def test_each_of_several_gateways_has_a_seat_with_its_part_of_the_agents() -> None:
    """Six processes of agents beside two gateways are three beside each."""
    options = [RAY, "gateway.shards=2", "environment.workers=6", "environment.entry=agents:play", "engine.count=1"]
    found = load_config(None, options)
    assert seat_resources(found)["rollout"] == {"CPU": 4.0}
    of_one = load_config(None, [*options, "gateway.shards=1"])
    assert seat_resources(of_one)["rollout"] == {"CPU": 7.0}
    assert run_resources(found)["CPU"] - run_resources(of_one)["CPU"] == 2 * 4.0 - 7.0


def test_a_transport_that_is_asked_for_stays() -> None:
    assert load_config(None, [RAY, "weights.transport=shared_memory"]).weights.transport == "shared_memory"


@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize("num_bytes", [0, LARGE_BYTES - 1, LARGE_BYTES])
@pytest.mark.parametrize("num_engines", [1, MANY_ENGINES - 1, MANY_ENGINES])
def test_weights_go_by_size_and_place(num_engines: int, num_bytes: int, swaps: bool) -> None:
    def way(*, over_machines: bool) -> str:
        return way_of_weights(num_bytes=num_bytes, num_engines=num_engines, swaps=swaps, over_machines=over_machines)[0]

    straight = swaps and num_bytes == LARGE_BYTES
    assert way(over_machines=False) == ("direct" if straight else "shared_memory")
    assert way(over_machines=True) == ("direct" if straight and num_engines < MANY_ENGINES else "pull")


def test_a_run_finds_the_way_of_its_weights_by_itself() -> None:
    # 16 layers of 2 x 1024 x 64 x (16 + 16) + 3 x 1024 x 4096 + 2 x 1024 + 2 x 64 numbers, 4 bytes each, are 1.07e9; half of it in bfloat16.
    large = [f"model.{key}={value}" for key, value in {"hidden_size": 1024, "intermediate_size": 4096, "num_layers": 16}.items()]
    large += ["model.num_heads=16", "model.num_kv_heads=16"]

    def way(*options: str) -> str:
        return load_config(None, [*large, *options]).weights.transport

    assert (way(), way("engine.kind=sglang"), way("engine.kind=vllm")) == ("shared_memory", "direct", "direct")
    assert way("engine.kind=vllm", "engine.dtype=bfloat16") == "shared_memory"
    assert way("engine.kind=vllm", "lora.rank=8") == "shared_memory"
    assert {way(RAY), way(RAY, "trainer.ranks=2"), way(RAY, "engine.count=8"), way(RAY, "engine.kind=vllm", "lora.rank=8")} == {"pull"}
    assert way("engine.kind=vllm", "weights.transport=auto") == "direct"


GPUS = ["engine.kind=vllm", "engine.device=cuda", "trainer.device=cuda", "weights.transport=direct"]


def test_servers_own_engines_receive_where_both_ends_are_on_gpus_and_one_key_turns_them_off() -> None:
    def found(*options: str) -> tuple[bool, bool]:
        config = load_config(None, [*GPUS, *options])
        return by_server_engine(config), stays_on_gpus(config)

    assert found() == found("engine.kind=sglang") == (True, True)
    assert found("trainer.ranks=2", "engine.servers=[{tensor_parallel=4}]") == (True, True)
    for elsewhere in (
        "trainer.device=cpu",
        "engine.device=cpu",
        "weights.delta=true",
        "weights.transport=pull",
    ):
        assert found(elsewhere) == (False, False)
    off = "weights.server_engine=false"
    assert found(off) == found(off, RAY) == found("engine.share_devices=true") == (False, True)
    assert found(off, "trainer.ranks=2") == found(off, RAY, "engine.servers=[{tensor_parallel=2}]") == (False, False)
    assert found("engine.servers=[{pipeline_parallel=2}]") == found("engine.servers=[{data_parallel=2}]") == (False, False)


def test_workers_read_versions_on_the_trainers_gpu_where_both_have_one_machine_and_no_nccl() -> None:
    def found(*options: str, transport: str = "auto") -> tuple[str, bool]:
        config = load_config(None, [*GPUS[:3], f"weights.transport={transport}", *options])
        return config.weights.transport, by_handles(config)

    shared = "engine.share_devices=true"
    off = "weights.server_engine=false"
    small = ("shared_memory", False)
    assert found(shared) == found(off) == found(shared, "engine.kind=sglang") == ("direct", True), "of any size"
    assert found(off, "engine.servers=[{tensor_parallel=2}]") == ("direct", True), "copies wait for nobody"
    assert found(shared, transport="shared_memory") == small
    for other in ("lora.rank=8", "weights.delta=true", "trainer.device=cpu", "engine.device=cpu", "engine.kind=embedded"):
        assert found(shared, other) == small, other
    assert found(off, "trainer.ranks=2") == found(off, "engine.urls=['http://127.0.0.1:1']", "engine.count=1") == found() == small
    turns = "engine.share=time"
    assert found(turns) == found(turns, transport="direct") == ("direct", True), "engines take it while they have no keys"
    assert found(turns, "weights.every=2") == small, "only a step that makes a version leaves the weights as engines have them"
    assert found(off, RAY) == ("pull", False)
    assert found(RAY, off, transport="direct") == ("direct", False)


def test_seats_ask_for_what_the_parts_compute_with() -> None:
    config = load_config(None, [RAY, "engine.threads=2", "trainer.device=cuda", "environment.workers=3"])
    assert seat_resources(config) == {"engine": {"CPU": 2.0}, "trainer": {"CPU": 1.0, "GPU": 1.0}, "rollout": {"CPU": 4.0}}
    assert engines_min(config) == 1
    assert run_resources(load_config(None, [RAY, "engine.count=3", "trainer.ranks=2", "trainer.device=cuda"])) == {"CPU": 6.0, "GPU": 2.0}


@pytest.mark.parametrize("words", ['"--tensor-parallel-size=4"', '"--tensor-parallel-size", "4"', '"--tp-size=4"', '"-tp", "4"'])
def test_a_server_over_several_gpus_asks_for_all_of_them_in_one_seat(words: str) -> None:
    config = load_config(None, [RAY, "engine.kind=vllm", "engine.device=cuda", f"engine.arguments=[{words}]"])
    assert seat_resources(config)["engine"] == {"CPU": 1.0, "GPU": 4.0}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["cluster.engines_min=3"], "cluster.engines_min (3) is more than the engines that the run asks for (1)"),
        (
            ["engine.count=3", "cluster.engines_min=1", "environment.untracked.engines=1"],
            "cluster.engines_min (1) leaves none for the policy beside environment.untracked.engines (1); raise it",
        ),
        (["engine.device=cuda:1"], "engine.device is 'cuda:1', and on a cluster a seat has GPUs of its own"),
        (["cluster.trainer={GPU = -1}"], "cluster.trainer"),
        (["cluster.kind=slurm"], "cluster.kind must be one of 'local', 'ray'"),
        (["cluster.lost_seconds=0"], "cluster.lost_seconds must be >= 0.001"),
    ],
)
def test_options_that_cannot_be_on_a_cluster_are_refused(options: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(None, [RAY, *options])
    assert words in str(refused.value)

"""Which GPU is whose. The devices are made up: nothing here asks a machine for one."""

from __future__ import annotations

from pathlib import Path

import pytest

from midflight.config.devices import DevicePool, DeviceRequest, num_present, visible
from midflight.config.load import load_config
from midflight.config.seats import DeviceAssignment, config_in_place, device_map, engine_resources, engine_seats, run_resources
from midflight.config.sections import Config
from midflight.errors import ConfigError

CUDA = ("engine.device=cuda", "trainer.device=cuda")
SERVERS = """
[engine]
kind = "vllm"
device = "cuda"
arguments = ["--gpu-memory-utilization=0.8"]
[[engine.servers]]
tensor_parallel = 2
[[engine.servers]]
devices = [6, 7]
data_parallel = 2
[trainer]
device = "cuda"
ranks = 2
"""


def laid(config: Config, number: int | None = None) -> dict[str, tuple[int, ...]]:
    return {part.who: part.devices for part in device_map(config, number=number)}


def of_servers(tmp_path: Path, *overrides: str) -> Config:
    (tmp_path / "run.toml").write_text(SERVERS)
    return load_config(tmp_path / "run.toml", overrides)


def test_four_engines_and_four_ranks_have_eight_devices() -> None:
    config = load_config(None, [*CUDA, "engine.count=4", "trainer.ranks=4"])
    ranks = {"trainer": (0,), "trainer1": (1,), "trainer2": (2,), "trainer3": (3,)}
    assert laid(config, 8) == laid(config) == ranks | {f"engine{i}": (4 + i,) for i in range(4)}


def test_where_nothing_computes_on_a_gpu_nothing_is_laid_out() -> None:
    assert device_map(Config(), number=0) == []
    assert config_in_place(Config(), "engine0") == Config()


def test_servers_have_the_devices_that_they_name_and_the_others_what_is_free_side_by_side(tmp_path: Path) -> None:
    config = of_servers(tmp_path)
    assert laid(config, 8) == {"trainer": (0,), "trainer1": (1,), "engine0": (2, 3), "engine1": (6, 7)}


def test_each_engine_reads_a_configuration_with_its_own_server_alone(tmp_path: Path) -> None:
    config = of_servers(tmp_path)
    (first,), (second,) = (config_in_place(config, name).engine.servers for name in ("engine0", "engine1"))
    assert (first.world_size, second.world_size) == (2, 2)
    assert second.devices == (), "it sees them alone, as 0 and 1"
    numbered = load_config(None, ["engine.device=cuda:3", "trainer.device=cuda:1"])
    assert laid(numbered) == {"trainer": (1,), "engine0": (3,)}
    part = config_in_place(numbered, "engine0")
    assert (part.engine.device, part.trainer.device) == ("cuda", "cuda")


def test_who_is_not_there_gets_nothing(tmp_path: Path) -> None:
    config = load_config(None, [*CUDA, f"distillation.teacher={tmp_path}"])
    assert laid(config) == {"trainer": (0,), "engine0": (1,), "teacher": (2,)}
    assert [part.who for part in device_map(config, ranks=False, teacher=False)] == ["engine0"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["engine.device=cuda:0", "trainer.device=cuda:0"], "GPU 0 would be given to both trainer (trainer.device = 'cuda:0') and engine0"),
        (["engine.device=cuda:1", "engine.count=2"], "GPU 1 would be given to both engine0 (engine.device = 'cuda:1') and engine1"),
        (
            ["engine.device=cuda", "trainer.device=cuda:1", "engine.servers=[{devices=[1]}]"],
            "both trainer (trainer.device = 'cuda:1') and engine0 (engine.servers.0.devices)",
        ),
        ([*CUDA, "engine.servers=[{devices=[1]}, {devices=[1]}]"], "both engine0 (engine.servers.0.devices) and engine1"),
        ([*CUDA, "engine.kind=vllm", "engine.servers=[{devices=[1, 1], tensor_parallel=2}]"], "gives GPU 1 to engine0 twice"),
        ([*CUDA, "engine.kind=vllm", "engine.servers=[{devices=[1, 2, 3], tensor_parallel=2}]"], "are 3, and the server is laid over 2"),
        (["engine.servers=[{devices=[0]}]"], "are of engine.device = \"cuda\", which is 'cpu'"),
        (["engine.servers=[{tensor_parallel=2}]"], 'engine.kind is "embedded", which is on one device'),
        (["engine.servers=[{}, {}]", "engine.count=3"], "engine.count says that there are 3 engines, and engine.servers that there are 2"),
        (["engine.servers=[{host='10.0.0.7'}]"], 'is a machine of a cluster, and cluster.kind is "local"'),
        (
            ["engine.kind=vllm", "engine.urls=['http://a:1']", "engine.servers=[{devices=[1]}]"],
            "engine.urls are of a server that runs already",
        ),
        (
            ["engine.kind=vllm", "engine.arguments=['-tp=4']", "engine.servers=[{tensor_parallel=2}]"],
            "both say over how many GPUs it is laid (2 and 4)",
        ),
        ([*CUDA, "cluster.kind=ray", "engine.servers=[{devices=[1]}]"], "engine.servers.0.devices ([1]) are chosen by Ray"),
        (["lora.merged=true", "lora.rank=4"], "lora.merged is for adapters that vLLM or SGLang serve, and there are none"),
        (["engine.kind=vllm", "lora.rank=513"], "lora.rank (513) is more than vLLM's own LoRA takes (512)"),
        (
            ["engine.kind=sglang", "lora.rank=4", "weights.commit=barrier"],
            'weights.commit = "barrier" is for weights that replace each other',
        ),
    ],
)
def test_what_cannot_be_laid_out_is_refused_before_anything_is_touched(options: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(None, options)
    assert words in str(refused.value)


def test_a_machine_that_has_too_few_says_who_is_left_without() -> None:
    config = load_config(None, [*CUDA, "trainer.ranks=2"])
    with pytest.raises(ConfigError, match=r"engine0 asks for 1 GPU \(engine.device = 'cuda'\), and of this machine's 2 GPUs 0 are left"):
        device_map(config, number=2)
    with pytest.raises(ConfigError, match="gives GPU 3 to trainer, and this machine has GPUs 0 to 1"):
        device_map(load_config(None, ["trainer.device=cuda:3"]), number=2)


def test_on_a_machine_with_one_gpu_all_share_it_if_that_is_said() -> None:
    config = load_config(None, [*CUDA, "engine.share_devices=true", "engine.count=2"])
    assert laid(config) == laid(config, 1) == {"trainer": (0,), "engine0": (0,), "engine1": (0,)}
    assert laid(config, 2) == {"trainer": (0,), "engine0": (1,), "engine1": (0,)}, "each with the fewest others"
    same = load_config(None, ["engine.device=cuda:0", "trainer.device=cuda:0", "engine.share_devices=true"])
    assert laid(same) == {"trainer": (0,), "engine0": (0,)}


TURNS = "engine.share=time"


def test_engines_and_trainer_that_take_turns_have_the_same_gpus() -> None:
    one = load_config(None, [*CUDA, TURNS])
    assert laid(one) == laid(one, 1) == laid(one, 4) == {"trainer": (0,), "engine0": (0,)}
    many = load_config(None, [*CUDA, TURNS, "trainer.ranks=2", "engine.count=2"])
    assert laid(many) == laid(many, 2) == {"trainer": (0,), "trainer1": (1,), "engine0": (0,), "engine1": (1,)}
    server = load_config(None, [*CUDA, TURNS, "trainer.ranks=2", "engine.kind=vllm", "engine.servers=[{tensor_parallel=2}]"])
    assert laid(server, 2)["engine0"] == (0, 1)
    assert server.weights.transport == "shared_memory"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([*CUDA, "engine.count=2"], "engines and trainer on the same GPUs, and one side alone has GPU 1; give both the same"),
        (["engine.device=cuda:1", "trainer.device=cuda:0"], "one side alone has GPU 0, 1; give both the same"),
        (["engine.device=cuda"], "engine.device (cuda) is another than trainer.device (cpu); give both the same"),
        (["engine.kind=vllm", "engine.urls=['http://a:1']"], "engine.urls are of servers that run already; remove one"),
        (["cluster.kind=ray"], 'cluster.kind is "ray", where they may be on several machines; remove one'),
        (["engine.lend=true"], "engine.lend has one that generates beside others while it waits; remove one"),
        (["gateway.shards=2"], "of which one gateway decides, and gateway.shards is 2; remove one"),
        (["engine.count=2", "environment.untracked.engines=1"], "environment.untracked.engines (1) are to answer at any time"),
        (
            ["engine.kind=vllm", "weights.transport=direct"],
            'brings versions to workers that have no memory then; set it to "shared_memory"',
        ),
    ],
)
def test_turns_that_cannot_be_are_refused_before_anything_is_touched(options: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(None, [TURNS, *options])
    assert words in str(refused.value)


def test_a_pool_gives_a_server_the_first_devices_that_are_side_by_side() -> None:
    def ask(who: str, number: int, *named: int) -> DeviceRequest:
        return DeviceRequest(who, number, "an option", named)

    given = DevicePool(8).give_all([ask("four", 4), ask("one", 1), ask("named", 2, 1, 4)])
    assert given == {"named": (1, 4), "four": (0, 2, 3, 5), "one": (6,)}, "of 0, 2, 3, 5, 6, 7 no four are side by side"


def test_a_process_sees_its_own_of_those_that_we_may_use(tmp_path: Path) -> None:
    assert visible((1, 2), {}) == "1,2"
    assert visible((1, 2), {"CUDA_VISIBLE_DEVICES": "4,5,GPU-8c1"}) == "5,GPU-8c1"
    assert num_present({"CUDA_VISIBLE_DEVICES": "4,5"}) == 2 and num_present({"CUDA_VISIBLE_DEVICES": ""}) == 0
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert num_present({}, folder=tmp_path) == 2


def test_on_a_cluster_each_server_asks_for_its_own_seat(tmp_path: Path) -> None:
    config = load_config(
        None,
        [*CUDA, "cluster.kind=ray", "engine.kind=vllm", "engine.servers=[{host='10.0.0.7', tensor_parallel=4, pipeline_parallel=2}, {}]"],
    )
    assert engine_seats(config) == [{"CPU": 1.0, "GPU": 8.0}, {"CPU": 1.0, "GPU": 1.0}]
    assert engine_resources(config, None) == {"CPU": 1.0, "GPU": 8.0}, "that of any"
    assert run_resources(config)["GPU"] == 10.0, "nine of the engines, one of the trainer"
    any_machine = "any with room"
    assert device_map(config) == [
        DeviceAssignment("trainer", any_machine, 1),
        DeviceAssignment("engine0", "10.0.0.7", 8),
        DeviceAssignment("engine1", any_machine, 1),
    ]

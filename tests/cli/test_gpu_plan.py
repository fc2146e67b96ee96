"""A dry run for GPUs that options describe: its golden files, and what it refuses.

The golden files are in tests/cli/gpu_plans. This writes them again; look at what changed:

    MIDFLIGHT_WRITE_PLANS=1 .venv/bin/python -m pytest -n0 tests/cli/test_gpu_plan.py -k golden
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from midflight.cli import main
from midflight.config import Config, load_config
from midflight.config.derived import model_sizes
from midflight.config.gpu_memory import CUDA_BYTES, GpuMemory, Moment, gpu_memory
from midflight.config.gpus import GPU_KINDS, DescribedGpus, described_map
from midflight.config.version_ways import version_needs, version_ways
from midflight.errors import ConfigError
from midflight.run.launcher.checks import table
from midflight.run.launcher.checks.check import Caller, Plan
from midflight.text.byte_tokenizer import write_byte_tokenizer

PLANS = Path(__file__).parent / "gpu_plans"
WRITES = "MIDFLIGHT_WRITE_PLANS" in os.environ
WIDTH = "140"
SIZES = {
    # hidden, feed-forward, layers, heads, key/value heads, vocabulary
    "7b": (3584, 18944, 28, 28, 4, 152064),
    "32b": (5120, 27648, 64, 40, 8, 152064),
    "70b": (8192, 28672, 80, 64, 8, 128256),
}
"""Those of Qwen2.5 and Llama 3."""
PARAMETERS = 2 * 152064 * 3584 + 28 * (2 * 3584 * 128 * 32 + 3 * 3584 * 18944 + 2 * 3584 + 2 * 128) + 3584
"""Of the model of 7 billion, as models without weights are counted."""
REAL_TRIAL = table.trial
KINDS = {"7b": "h100", "32b": "h100", "70b": "b200"}
TABLE = """\
[run]
name = "plan"
folder = "runs/plan"
steps = 10
[model]
dtype = "bfloat16"
max_context = 4096
[environment]
workers = 2
max_tokens = 1024
[[environment.sources]]
dataset = "spell_backward"
heldout = 16
prompt = "reverse {word}"
content = "word"
[engine]
kind = "vllm"
device = "cuda"
[trainer]
device = "cuda"
activation_checkpointing = true
"""
ONE = ["engine.share_devices=true", "engine.arguments=['--gpu-memory-utilization=0.4']", "lora.rank=16"]
TWO: list[str] = []
EIGHT = ["trainer.ranks=6", "engine.servers=[{tensor_parallel=2}]"]
SIXTY_FOUR = ["cluster.kind=ray", "trainer.ranks=32", f"engine.servers=[{', '.join(['{tensor_parallel=4}'] * 8)}]"]
LAYOUTS = {1: ONE, 2: TWO, 8: EIGHT, 64: SIXTY_FOUR}
TURNS_OF = {
    # all weights are trained on the GPUs that also serve them
    1: ['engine.share="time"', "engine.arguments=['--gpu-memory-utilization=0.7']"],
    8: [
        'engine.share="time"',
        "trainer.ranks=8",
        "engine.servers=[{tensor_parallel=4}, {tensor_parallel=4}]",
        "engine.arguments=['--gpu-memory-utilization=0.7']",
    ],
}


@pytest.fixture(autouse=True)
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that are no more than a configuration and a tokenizer, on a machine whose memory does not matter."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", WIDTH)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for module in ("derived", "context", "model_defaults"):
        monkeypatch.setattr(f"midflight.config.{module}.machine_bytes", lambda: 64 * 2**30)
    monkeypatch.setattr(table, "trial", lambda plan, **_: list[object]())
    for name, (hidden, inner, layers, heads, kv_heads, vocabulary) in SIZES.items():
        write_byte_tokenizer(Path(name))
        config = {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": vocabulary,
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": False,
        }
        Path(name, "config.json").write_text(json.dumps(config))
    Path("run.toml").write_text(TABLE)


def planning(model: str, number: int, kind: str, *overrides: str) -> int:
    options = [word for override in (f"model.path={model}", *overrides) for word in ("--set", override)]
    return main(["train", "run.toml", "--dry-run", "--gpus", str(number), "--gpu", kind, *options])


@pytest.mark.parametrize("model", SIZES)
@pytest.mark.parametrize("number", LAYOUTS)
def test_a_plan_equals_its_golden_file(model: str, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    status = planning(model, number, KINDS[model], *LAYOUTS[number])
    check_golden(f"{model}-{number}", status, capsys)


def check_golden(name: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    printed = capsys.readouterr()
    lines = f"status {status}\n{printed.out}{printed.err}".splitlines()
    plan = "".join(f"{line.rstrip()}\n" for line in lines)
    path = PLANS / f"{name}.txt"
    if WRITES:
        path.write_text(plan)
    assert plan == path.read_text()


@pytest.mark.parametrize("model", SIZES)
@pytest.mark.parametrize("number", TURNS_OF)
def test_a_plan_in_turns_has_each_moment_of_each_gpu(model: str, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    status = planning(model, number, KINDS[model], *TURNS_OF[number])
    check_golden(f"{model}-{number}-turns", status, capsys)


def test_a_plan_of_one_gpu_that_both_share_has_the_bucket_in_which_versions_go(capsys: pytest.CaptureFixture[str]) -> None:
    shared = ["engine.share_devices=true", "engine.arguments=['--gpu-memory-utilization=0.4']"]
    assert planning("7b", 1, "h200", *shared) == 0
    plan = " ".join(capsys.readouterr().out.split())
    assert "14.2 GB a version by direct: the servers' workers read it on the trainer's GPU" in plan
    assert "versions, direct CUDA IPC; gloo where a worker cannot 2 trainer, 1 workers" in plan
    assert "through host memory (CUDA IPC) " in plan
    assert plan.count("a bucket of a version on its way 64.0 MB") == 2, "one in the trainer, and one in the worker"
    assert f"direct (chosen) {2 * PARAMETERS:,} two copies in the GPU's memory, by CUDA IPC 1200 GB/s" in plan


def test_a_plan_says_where_versions_on_a_gpu_have_not_been_tried(capsys: pytest.CaptureFixture[str]) -> None:
    assert planning("7b", 2, "h200", "weights.server_engine=false") == 0
    plan = " ".join(capsys.readouterr().out.split())
    assert "through host memory (CUDA IPC, untested between two GPUs) " in plan
    assert "versions, direct CUDA IPC, untested between two GPUs; gloo where a worker cannot" in plan


def test_versions_on_sglangs_own_gpu_have_been_tried(capsys: pytest.CaptureFixture[str]) -> None:
    shared = ["engine.kind=sglang", "engine.share_devices=true", "engine.arguments=['--mem-fraction-static=0.4']"]
    assert planning("7b", 1, "h200", *shared) == 0
    plan = " ".join(capsys.readouterr().out.split())
    assert "through host memory (CUDA IPC) " in plan
    assert "versions, direct CUDA IPC; gloo where a worker cannot" in plan


def test_the_golden_files_are_plans_that_fit_and_plans_that_are_refused() -> None:
    firsts = {path.stem: path.read_text().splitlines()[0] for path in PLANS.glob("*.txt")}
    assert len(firsts) == len(SIZES) * (len(LAYOUTS) + len(TURNS_OF))
    assert set(firsts.values()) == {"status 0", "status 2"}


# --- Options --------------------------------------------------------------------------------------


def test_a_kind_that_is_not_known_is_refused_by_name_with_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert planning("7b", 8, "h1000") == 2
    assert "--gpu h1000 is no kind that is known here; give one of h100, h200, b200, a100-80, l40s, 4090." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--gpus", "8", "--gpu", "h100"],
            "--gpus 8 describes GPUs that this machine need not have, which is for a dry run: add --dry-run",
        ),
        (["--gpu", "h100"], "--gpu h100 describes GPUs"),
        (["--dry-run", "--gpus", "8"], "--gpus 8 says how many GPUs; add --gpu with one of h100"),
        (["--dry-run", "--gpu", "h100"], "--gpu h100 says which GPUs, and not how many; add --gpus"),
    ],
)
def test_gpus_are_described_whole_and_for_a_dry_run(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "run.toml", *options]) == 2
    assert said in capsys.readouterr().err


def test_a_plan_asks_nothing_of_this_machine() -> None:
    asked = {check.name for part in (table.AT_ONCE, table.BESIDE_TRIAL, table.AT_LAST) for check in part if Caller.PLAN in check.callers}
    assert asked == {"model", "teacher", "sizes", "described gpus"}
    config = load_config("run.toml", ["model.path=70b", "engine.threads=9999", *SIXTY_FOUR])
    gpus = DescribedGpus(64, GPU_KINDS["b200"])
    assert table.look(Plan(config, Caller.PLAN, gpus=gpus)).problems == ()


def test_a_plan_reads_tasks_and_tokenizer_and_no_weights(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(table, "trial", REAL_TRIAL)
    assert planning("7b", 2, "h100") == 0
    printed = capsys.readouterr().out
    assert "<|user|>reverse " in printed and "NVIDIA H100 80GB SXM" in printed
    assert not list(Path("7b").glob("*.safetensors"))


def test_the_servers_of_both_kinds_the_embedded_engine_and_a_teacher_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    for words, overrides in (
        ("--tp-size=2", ["engine.kind=sglang", "engine.servers=[{tensor_parallel=2}]"]),
        ("its share of 0.88", ["engine.kind=sglang"]),
        ("weights, live and staged", ["engine.kind=embedded", "engine.max_running=4"]),
        ("logits that are scored at once", ["distillation.teacher=7b"]),
    ):
        assert planning("7b", 8, "h200", *overrides) == 0
        assert words in capsys.readouterr().out


def test_servers_that_run_already_have_no_launch_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert planning("7b", 2, "h100", "engine.urls=['http://127.0.0.1:1']") == 0
    printed = capsys.readouterr().out
    assert "launch lines" not in printed and "engine0" not in printed


def test_a_run_on_cpus_is_planned_with_a_note_that_no_gpu_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert planning("7b", 8, "h100", "engine.kind=embedded", "engine.device=cpu", "trainer.device=cpu") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "no process computes on the 8 GPUs: engine.device is 'cpu' and trainer.device is 'cpu'" in said


def test_gpus_without_a_process_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert planning("7b", 8, "h200") == 0
    assert "6 of 8 GPUs have no process" in capsys.readouterr().out


# --- What does not fit ----------------------------------------------------------------------------


def refused(model: str, number: int, kind: str, *overrides: str) -> list[str]:
    config = load_config("run.toml", [f"model.path={model}", *overrides])
    plan = Plan(config, Caller.PLAN, gpus=DescribedGpus(number, GPU_KINDS[kind]))
    return list(table.look(plan).problems)


def test_a_model_that_one_trainer_rank_cannot_hold_is_refused_with_the_largest_items_and_the_option() -> None:
    # 32 764 M parameters in bfloat16: weights, gradients and two moments are 8 bytes of each, 244.1 GB of 2**30
    (sentence,) = refused("32b", 2, "h100", "engine.arguments=['--gpu-memory-utilization=0.95']")
    assert sentence.startswith("GPU 0 of this machine would take ")
    assert "a GPU of the kind h100 has 79.6 GB: 244.1 GB for weights, gradients and AdamW's two moments (trainer) and " in sentence
    assert sentence.endswith("; raise trainer.ranks (1).")


def test_a_server_without_room_for_the_keys_of_one_row_is_refused() -> None:
    # weights of 61.0 GB of 2**30 leave nothing of 0.5 of 79.6 GB; a row has 4096 x 64 x 8 x 128 x 2 keys and values of 2 bytes, 1 GB
    sentences = refused("32b", 2, "h200", "trainer.device=cpu", "engine.arguments=['--gpu-memory-utilization=0.4']")
    assert sentences == [
        "GPU 0 of this machine leaves its server 0 KB for keys and values, of which a row of 4,096 tokens takes 1.0 GB: the server's share of "
        "the 140.4 GB is 0.4, and its weights take 61.0 GB on each GPU; raise tensor_parallel (1) in engine.servers, or raise "
        "--gpu-memory-utilization in engine.arguments."
    ]


def test_what_shares_a_gpu_is_added_up() -> None:
    (sentence,) = refused("7b", 1, "h100", "engine.share_devices=true")
    assert "would take " in sentence and "(trainer)" in sentence and "(engine)" in sentence
    assert refused("7b", 1, "b200", "engine.share_devices=true", "engine.arguments=['--gpu-memory-utilization=0.4']") == []


def test_no_rank_needs_room_for_the_whole_model_but_for_a_warm_start() -> None:
    # 70 554 M parameters in bfloat16 are 131.4 GB of 2**30, and a sixth of 8 bytes of each 87.6 GB
    layout = ["trainer.ranks=6", "engine.servers=[{tensor_parallel=2}]"]
    for transport in ("direct", "pull", "shared_memory"):
        assert refused("70b", 8, "h200", *layout, f"weights.transport={transport}") == []
    (sentence,) = refused("70b", 8, "h200", *layout, "warm_start.max_steps=5", "warm_start.target_accuracy=0.5")
    assert sentence == (
        "GPU 0 of this machine would take 526.7 GB at its start, and a GPU of the kind h200 has 140.4 GB: 525.7 GB for the whole model with "
        "gradients and moments of the warm start, which one rank makes (trainer) and 1.0 GB for CUDA, assumed (trainer); remove [warm_start], "
        "and start from a model that has learnt it."
    )


def test_too_few_gpus_are_refused_by_the_process_that_finds_none() -> None:
    (sentence,) = refused("7b", 2, "h100", "trainer.ranks=2")
    assert "engine0 asks for 1 GPU (engine.device = 'cuda'), and of this machine's 2 GPUs 0 are left" in sentence
    (sentence,) = refused("7b", 8, "h100", "cluster.kind=ray", "trainer.ranks=7", "engine.servers=[{tensor_parallel=2}]")
    assert "engine0 asks for 2 GPUs, and no machine that it may be on has so many left of --gpus 8" in sentence
    (sentence,) = refused("7b", 64, "h100", "cluster.kind=ray", "engine.servers=[{tensor_parallel=16}]")
    assert "engine0 asks for 16 GPUs, and its seat is on one machine, which has 8" in sentence


# --- Numbers --------------------------------------------------------------------------------------


def memory_of(config: Config, gpus: DescribedGpus) -> list[GpuMemory]:
    return list(gpu_memory(config, gpus, described_map(config, gpus)))


def test_ranks_share_the_trainers_memory_and_no_other_precision_in_the_engines_adds_to_it() -> None:
    for more in ([], ["model.dtype=float32", "engine.dtype=bfloat16"]):
        config = load_config("run.toml", ["model.path=7b", "trainer.ranks=4", "weights.transport=pull", *more])
        width = 4 if more else 2
        ranks = memory_of(config, DescribedGpus(8, GPU_KINDS["h200"]))[:4]
        assert {rank.taken(Moment.START) for rank in ranks} == {CUDA_BYTES}, "rows come bucket by bucket"
        (step,) = {rank.taken(Moment.STEP) for rank in ranks}
        weights = CUDA_BYTES + 4 * width * PARAMETERS // 4
        assert weights < step < 2 * weights and {rank.fullest for rank in ranks} == {Moment.STEP}


def test_the_first_rank_alone_has_the_whole_model_in_host_memory() -> None:
    for ranks in (1, 6):
        config = load_config("run.toml", ["model.path=7b", f"trainer.ranks={ranks}", "objective.kl_coefficient=0.1"])
        needs = {need.what: need.num_bytes for need in version_needs(config, model_sizes(config.model))}
        # with the reference
        assert needs["the whole model in the first trainer rank, at its start and its end"] == 2 * 2 * PARAMETERS


def test_a_server_takes_its_share_of_each_gpu_and_has_keys_in_what_weights_leave() -> None:
    config = load_config("run.toml", ["model.path=7b", "engine.servers=[{tensor_parallel=2}]"])
    *_, last = memory_of(config, DescribedGpus(4, GPU_KINDS["h100"]))
    assert last.device == 2
    assert last.taken(last.fullest) == int(0.9 * 81_559 * 2**20)


def test_processes_of_a_cluster_fill_machine_after_machine_and_named_machines_first() -> None:
    servers = "engine.servers=[{tensor_parallel=4}, {host='a', tensor_parallel=4}]"
    config = load_config("run.toml", ["model.path=7b", "cluster.kind=ray", "trainer.ranks=5", servers])
    laid = described_map(config, DescribedGpus(16, GPU_KINDS["h100"]))
    assert [(part.who, part.host, part.devices) for part in laid[:5]] == [
        ("trainer", "a", (4,)),
        ("trainer1", "a", (5,)),
        ("trainer2", "a", (6,)),
        ("trainer3", "a", (7,)),
        ("trainer4", "machine 2", (0,)),
    ]
    assert [(part.host, part.devices) for part in laid[5:]] == [("machine 2", (1, 2, 3, 4)), ("a", (0, 1, 2, 3))]
    with pytest.raises(ConfigError, match="raise --gpus"):
        described_map(config, DescribedGpus(8, GPU_KINDS["h100"]))


def test_the_seconds_of_a_version_are_its_bytes_over_the_slowest_part() -> None:
    config = load_config("run.toml", ["model.path=7b"])
    ways = {way.transport: way for way in version_ways(config, DescribedGpus(2, GPU_KINDS["h100"]))}
    num_bytes = ways["direct"].slowest.num_bytes
    assert ways["direct"].slowest.seconds == pytest.approx(num_bytes / 450e9), "from GPU to GPU"
    shared = load_config("run.toml", ["model.path=7b", "trainer.ranks=2", "weights.server_engine=false"])
    (by_host,) = [way for way in version_ways(shared, DescribedGpus(3, GPU_KINDS["h100"])) if way.transport == "direct"]
    assert by_host.slowest.seconds == pytest.approx(num_bytes / 1e9), "through host memory, by gloo"
    assert ways["shared_memory"].slowest.seconds == pytest.approx(num_bytes / 7.7e9)
    assert ways["pull"].slowest.seconds == pytest.approx(num_bytes / 0.8e9)
    over = load_config("run.toml", ["model.path=7b", "cluster.kind=ray", "lora.rank=8"])
    refusals = {way.transport: way.why_not for way in version_ways(over, DescribedGpus(2, GPU_KINDS["h100"]))}
    assert refusals == {"shared_memory": "not between machines", "pull": "", "direct": "not for adapters"}

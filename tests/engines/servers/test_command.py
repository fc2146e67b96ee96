"""The command lines and environments that servers are started with, written out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from midflight.config.sections import EngineSection
from midflight.engines.servers.command import INSIDE, Command, ServedModel, server_command

PYTHON = Path("/venv/bin/python")
MODEL = ServedModel(Path("/models/small"), "policy", "float32", max_context=2048, kv_bytes_per_token=65536, version=3)
ALWAYS = {"PYTHONPATH": str(INSIDE), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def command(kind: str, inherited: Mapping[str, str] | None = None, **options: object) -> Command:
    section = EngineSection.model_validate({"kind": kind, "max_running": 16, **options})
    return server_command(section, MODEL, python=PYTHON, port=30001, inherited=inherited or {})


VLLM = (
    "/venv/bin/python -m vllm.entrypoints.openai.api_server --model /models/small --served-model-name policy --host 127.0.0.1 --port 30001 "
    "--dtype float32 --max-model-len 2048 --max-num-seqs 16 --max-num-batched-tokens 2048 --enable-scale-out --generation-config vllm "
    "--max-logprobs 21 --logprobs-mode processed_logprobs --worker-extension-cls midflight_vllm.Loader "
    '--weight-transfer-config {"backend": "midflight"} --structured-outputs-config {"backend": "guidance"} --disable-uvicorn-access-log'
)
SGLANG = (
    "/venv/bin/python -m sglang.launch_server --model-path /models/small --served-model-name policy --host 127.0.0.1 --port 30001 "
    "--dtype float32 --context-length 2048 --max-running-requests 16 --chunked-prefill-size 2048 --sampling-defaults openai "
    "--weight-version 3 --incremental-streaming-output --grammar-backend midflight --skip-server-warmup --log-level-http warning"
)


def test_vllm_on_a_cpu() -> None:
    made = command("vllm")
    assert " ".join(made.argv) == f"{VLLM} --enforce-eager"
    # 16 x 2048 tokens of 64 KiB are 2 GiB
    own = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    assert made.environ == {"PATH": "/venv/bin", **ALWAYS, **own, "TORCHDYNAMO_DISABLE": "1"}


def test_vllm_on_a_gpu_compiles_and_takes_its_share_of_the_memory_by_itself() -> None:
    made = command("vllm", device="cuda")
    assert " ".join(made.argv) == VLLM
    assert made.environ == {"PATH": "/venv/bin", **ALWAYS, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}


def test_vllms_own_engine_receives_versions_where_it_is_to_do_so_and_sglang_needs_no_word_for_that() -> None:
    own = replace(MODEL, own_transfer=True)
    for kind in ("vllm", "sglang"):
        section = EngineSection.model_validate({"kind": kind, "device": "cuda", "max_running": 16})
        words = [server_command(section, model, python=PYTHON, port=1, inherited={}).argv for model in (MODEL, own)]
        changed = [(a, b) for a, b in zip(*words, strict=True) if a != b]
        assert changed == ([('{"backend": "midflight"}', '{"backend": "nccl"}')] if kind == "vllm" else [])


def test_sglang_on_a_cpu() -> None:
    made = command("sglang", threads=2)
    assert " ".join(made.argv) == f"{SGLANG} --device cpu --attention-backend torch_native --sleep-on-idle --max-total-tokens 32768"
    own = {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0", "SGLANG_FORCE_STREAM_INTERVAL": "1"}
    assert made.environ == {"PATH": "/venv/bin", **ALWAYS, **own, "OMP_NUM_THREADS": "2"}


def test_sglang_on_a_gpu() -> None:
    made = command("sglang", device="cuda")
    assert " ".join(made.argv) == SGLANG
    own = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0", "SGLANG_FORCE_STREAM_INTERVAL": "1"}
    in_float32 = {"SGLANG_FORCE_FUSED_OP_BACKEND": "torch"}
    assert made.environ == {"PATH": "/venv/bin", **ALWAYS, **own, **in_float32}


def test_sglangs_own_kernels_compute_in_16_bits_and_torch_in_float32() -> None:
    """On an H200 its RMSNorm failed "to dispatch data type Float", and the server ended."""
    section = EngineSection.model_validate({"kind": "sglang", "device": "cuda"})
    short = replace(MODEL, dtype="bfloat16")
    made = server_command(section, short, python=PYTHON, port=30001, inherited={})
    assert "SGLANG_FORCE_FUSED_OP_BACKEND" not in made.environ


def test_a_server_that_is_to_sleep_is_asked_for_it_where_it_has_a_gpu() -> None:
    """On a CPU vLLM does not start with it, and SGLang has nothing to save."""
    assert command("vllm", share="time") == command("vllm")
    assert command("sglang", share="time") == command("sglang")
    assert command("vllm", device="cuda", share="time").argv == (*command("vllm", device="cuda").argv, "--enable-sleep-mode")
    plain = command("sglang", device="cuda").argv
    assert command("sglang", device="cuda", share="time").argv == (*plain, "--enable-memory-saver", "--enable-weights-cpu-backup")


def test_an_engine_that_is_to_be_deterministic_is_asked_for_it_in_its_own_words() -> None:
    vllm, plain = command("vllm", device="cuda", deterministic=True), command("vllm", device="cuda")
    assert vllm.argv == plain.argv and vllm.environ == {**plain.environ, "VLLM_BATCH_INVARIANT": "1"}
    sglang, plain = command("sglang", device="cuda", deterministic=True), command("sglang", device="cuda")
    assert sglang.argv == (*plain.argv, "--enable-deterministic-inference") and sglang.environ == plain.environ


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_further_words_come_last_so_that_they_win(kind: str) -> None:
    assert command(kind, arguments=("--dtype", "bfloat16")).argv[-2:] == ("--dtype", "bfloat16")


def test_a_small_cache_is_one_whole_gibibyte_and_a_step_has_room_for_every_request() -> None:
    made = command("vllm", max_running=1, max_batch_tokens=1)
    assert made.environ["VLLM_CPU_KVCACHE_SPACE"] == "1"
    wide = command("vllm", max_running=64, max_batch_tokens=8)
    assert wide.argv[wide.argv.index("--max-num-batched-tokens") + 1] == "64"


@pytest.mark.parametrize(
    ("device", "visible", "expected"),
    [("cuda", "4,5", "4,5"), ("cuda:1", "4,5", "5"), ("cuda:1", None, "1"), ("cuda", None, None)],
)
def test_a_numbered_device_is_the_only_one_the_server_sees(device: str, visible: str | None, expected: str | None) -> None:
    inherited = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert command("vllm", inherited, device=device).environ.get("CUDA_VISIBLE_DEVICES") == expected


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("vllm", "--tensor-parallel-size=2 --pipeline-parallel-size=3 --data-parallel-size=4 --first"),
        ("sglang", "--tp-size=2 --pp-size=3 --dp-size=4 --first"),
    ],
)
def test_a_server_over_several_devices_is_told_so_in_its_own_words_and_sees_those_alone(kind: str, words: str) -> None:
    server = {"tensor_parallel": 2, "pipeline_parallel": 3, "data_parallel": 4}
    made = command(kind, device="cuda", servers=[server], arguments=["--first"])
    assert " ".join(made.argv).endswith(words) and "CUDA_VISIBLE_DEVICES" not in made.environ
    placed = command(kind, {"CUDA_VISIBLE_DEVICES": "4,5,6"}, device="cuda", servers=[{"devices": [2, 0], "tensor_parallel": 2}])
    assert placed.environ["CUDA_VISIBLE_DEVICES"] == "6,4"


def test_on_a_cpu_the_processes_of_a_vllm_server_share_what_there_is() -> None:
    alone, two = command("vllm"), command("vllm", servers=[{"tensor_parallel": 2}])
    assert two.argv == (*alone.argv, "--tensor-parallel-size=2")
    assert two.environ == {**alone.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def test_our_environment_does_not_leak_and_the_rest_does() -> None:
    inherited = {
        "PATH": "/ours/bin:/usr/bin",
        "VIRTUAL_ENV": "/ours",
        "PYTHONPATH": "/ours/src",
        "PYTHONHOME": "/ours",
        "PYTHONDONTWRITEBYTECODE": "1",
        "MIDFLIGHT_CONTROL_TOKEN": "secret",
        "HOME": "/home/me",
        "OMP_NUM_THREADS": "64",
    }
    environ = dict(command("sglang", inherited).environ)
    assert environ["PATH"] == "/venv/bin:/usr/bin" and environ["HOME"] == "/home/me"
    assert environ["PYTHONPATH"] == str(INSIDE) and environ["OMP_NUM_THREADS"] == "1"
    assert not {"VIRTUAL_ENV", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "MIDFLIGHT_CONTROL_TOKEN"} & environ.keys()


def test_what_runs_inside_a_server_imports_nothing_of_ours() -> None:
    files = list(INSIDE.glob("*.py"))
    assert files
    for file in files:
        assert not re.search(r"(import|from) midflight\b(?!_)", file.read_text())


@pytest.mark.parametrize(("kind", "device", "asked"), [("vllm", "cuda", True), ("vllm", "cpu", False), ("sglang", "cpu", True)])
def test_a_mixture_is_started_so_that_it_says_which_experts_it_chose(kind: str, device: str, asked: bool) -> None:
    section = EngineSection.model_validate({"kind": kind, "device": device})
    for model, expected in ((MODEL, False), (replace(MODEL, records_experts=True), asked)):
        made = server_command(section, model, python=PYTHON, port=30001, inherited={})
        assert ("--enable-return-routed-experts" in made.argv) is expected


def test_of_a_model_that_also_reads_images_vllm_serves_the_text_alone() -> None:
    section = EngineSection.model_validate({"kind": "vllm"})
    for model in (MODEL, replace(MODEL, has_other_towers=True)):
        made = server_command(section, model, python=PYTHON, port=30001, inherited={})
        assert ("--language-model-only" in made.argv) is model.has_other_towers


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("vllm", "--enable-lora --max-loras 6 --max-cpu-loras 6 --max-lora-rank 16 --enforce-eager"),
        (
            "sglang",
            "--enable-lora --max-loras-per-batch 6 --max-loaded-loras 6 --max-lora-rank 12 --lora-target-modules q_proj o_proj --device cpu "
            "--attention-backend torch_native --lora-backend torch_native",
        ),
    ],
)
def test_a_server_of_adapters_has_room_for_all_versions_that_may_be_in_use(kind: str, words: str) -> None:
    """vLLM makes room for the next of its own ranks."""
    model = replace(MODEL, num_adapters=6, rank=12, targets=("q_proj", "o_proj"))
    made = server_command(EngineSection.model_validate({"kind": kind}), model, python=PYTHON, port=30001, inherited={})
    assert words in " ".join(made.argv) and (kind == "sglang" or made.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1")

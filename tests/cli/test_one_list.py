"""A start, its dry run and `midflight doctor` ask one list of checks: what one refuses, all refuse, in the same sentence."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from midflight.cli import main
from midflight.config import load_config
from midflight.errors import ConfigError
from midflight.run.launcher import launch
from midflight.run.launcher.checks import devices, engines, machine, model, software, table
from midflight.run.launcher.checks.check import EVERYBODY, About, Caller, Check, Finding, Plan, TorchFound
from midflight.run.launcher.folder_lock import hold_folder
from midflight.run.places import ray
from midflight.text.byte_tokenizer import write_byte_tokenizer

ROOT = Path(__file__).parents[2]
RUN = """\
[run]
folder = "run"
steps = 1
[[environment.sources]]
path = "rows.jsonl"
answer = "answer"
heldout = 1
"""


def torch(plan: Plan) -> None:
    """It sees no GPU."""
    plan.loaded.torch = TorchFound("2.13.0", None, ())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The trial is in this process, torch and servers are not looked for, and a run that would start has started."""

    def trial(plan: Plan, *, meanwhile: Callable[[], None] = lambda: None) -> list[Finding]:
        meanwhile()
        return table.ask(plan, table.IN_TRIAL)

    beside = [check for check in table.BESIDE_TRIAL if check.look not in (devices.torch, engines.servers)]
    monkeypatch.setattr(table, "BESIDE_TRIAL", [Check(torch, About.MACHINE), *beside])
    monkeypatch.setattr(table, "trial", trial)
    monkeypatch.setattr(launch, "train", lambda config, **_: 0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    Path("run.toml").write_text(RUN)
    Path("rows.jsonl").write_text("".join(json.dumps({"question": f"{i}", "answer": f"{i}"}) + "\n" for i in range(4)))


def letters(text: str) -> str:
    """The text without what a table adds: the lines that it is folded into, and the arrow before a remedy."""
    return "".join(letter for letter in text if not letter.isspace() and letter not in "→;:")


def said(capsys: pytest.CaptureFixture[str], *command: str) -> tuple[int, str]:
    status = main([*command])
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def refused_by_all(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The sentence of the start, which the two others say too."""
    overrides = [word for option in options for word in ("--set", option)]
    assert main(["train", "run.toml", *overrides]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(set(lines)) == len(lines)
    sentence = lines[0].removeprefix("midflight: ")
    status, dry = said(capsys, "train", "run.toml", "--dry-run", *overrides)
    assert status == 2 and sentence in dry, dry
    status, doctor = said(capsys, "doctor", "run.toml", *overrides)
    assert status == 1 and letters(doctor).count(letters(sentence)) == 1, doctor
    return sentence


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("rollout.buffer_groups=1", "no batch would ever be full"),
        ("model.path=nowhere", "nowhere"),
        ("distillation.teacher=nowhere", "distillation.teacher is 'nowhere'"),
        ("engine.threads=100000", "engine.threads is 100,000"),
        ("environment.entry=no_such_module:solve", "no module 'no_such_module'"),
        ("environment.sources.0.path=none.jsonl", "none.jsonl"),
        ("environment.sources.0.answer=reply", "there is no column 'reply'"),
        ("environment.sources.0.path=run/data.jsonl", "which a new run in run would delete"),
        ("environment.max_tokens=255", "leaves none for an answer"),
        ("objective.kind=no_such_module:loss", "no_such_module"),
        ('observe.trackers=["no_such_module:Tracker"]', "no_such_module"),
        ("warm_start.data=none.jsonl", "none.jsonl"),
        ("trainer.device=cuda", "trainer.device is 'cuda', which this machine has not got"),
        ("environment.entry=exits:solve", "ends its process with sys.exit(0)"),
        ("environment.sandbox.kind=chroot", "environment.sandbox.kind names 'chroot', which is no sandbox"),
        ("environment.untracked.url=http://127.0.0.1:9/v1", "environment.untracked.url is 'http://127.0.0.1:9/v1', which does not answer"),
        ("gateway.public_url=banana", "gateway.public_url must be the beginning of an address"),
        ("gateway.host=no.such.invalid", "'no.such.invalid' is no address of this machine"),
        ('lora={rank=1, targets=["query"]}', "lora.targets names 'query'"),
        ('engine={kind="vllm", start_seconds=0.3, urls=["http://127.0.0.1:9"]}', "no vllm server answered at http://127.0.0.1:9"),
    ],
)
def test_a_wrong_option_is_refused_by_all_three_in_the_same_sentence(option: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["model.max_context=256"]
    Path("exits.py").write_text("import sys\nsys.exit(0)\n")
    if words == "leaves none for an answer":
        Path("rows.jsonl").write_text("".join(json.dumps({"question": f"{i}" * 300, "answer": f"{i}"}) + "\n" for i in range(4)))
    assert words in refused_by_all(capsys, *more, option)


def test_a_server_without_its_interpreter_is_refused_by_all_three(capsys: pytest.CaptureFixture[str]) -> None:
    assert "/absent/python" in refused_by_all(capsys, "engine.kind=sglang", "engine.python=/absent/python")


def test_a_port_that_is_taken_is_refused_by_all_three(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "choose another port" in refused_by_all(capsys, f"gateway.port={taken.getsockname()[1]}")


def test_a_port_of_the_viewer_that_is_taken_is_refused_by_all_three(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "choose another port (observe.view_port)" in refused_by_all(capsys, f"observe.view_port={taken.getsockname()[1]}")


def test_a_key_that_the_environment_lacks_is_refused_by_all_three(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("environment.untracked.url=http://127.0.0.1:9/v1", "environment.untracked.api_key_env=NO_SUCH_KEY")
    assert "names NO_SUCH_KEY, and there is no such variable" in refused_by_all(capsys, *options)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("    return rows[::-1] if 'again' in sys.argv[0] else rows\n", 'was called twice and gave {"question":"0","answer":"0"} as row 0'),
        (
            "    for row in rows[:50]:\n        yield row\n    raise OSError('connection reset')\n",
            "failed at row 50 (counted from 0) with OSError",
        ),
        ("    raise SystemExit(0)\n", "failed with SystemExit: 0"),
    ],
)
def test_a_function_of_rows_that_no_run_can_use_is_refused_by_all_three(
    body: str, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"rows_{tmp_path.name}".replace("-", "_")
    rows = "    rows = [{'question': f'{i}', 'answer': f'{i}'} for i in range(60)]\n"
    Path(f"{module}.py").write_text(f"import sys\n\n\ndef all_rows():\n{rows}{body}")
    monkeypatch.syspath_prepend(str(tmp_path))
    source = f'environment.sources=[{{entry="{module}:all_rows", answer="answer"}}]'
    assert words in refused_by_all(capsys, source)


def test_a_disk_and_a_shared_memory_without_room_are_refused_by_all_three(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**10))
    assert "where 1 KB are free" in refused_by_all(capsys)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**10) if path == machine.SHARED else found(path))
    python = Path("python")
    python.write_text("#!/bin/sh\nexit 1\n")  # it cannot be asked for the package
    python.chmod(0o755)
    server = ("engine.kind=vllm", f"engine.python={python.absolute()}", "weights.transport=shared_memory")
    assert refused_by_all(capsys, *server).startswith("/dev/shm has 1 KB free")


def test_a_process_that_may_open_too_few_files_is_refused_by_all_three(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda kind: (64, 100_000) if kind == resource.RLIMIT_NOFILE else (-1, -1))
    assert refused_by_all(capsys) == "open files: 64; a large run may hold 4,096; ulimit -n 4096"


def test_temporary_files_that_cannot_be_written_are_refused_by_all_three(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(machine.tempfile, "TemporaryFile", full)
    assert "set TMPDIR" in refused_by_all(capsys)


BROKEN = "torch: cannot be used: ImportError: libcudart.so.12: cannot open; install it again"


@pytest.fixture
def broken_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "PROBE_TORCH", "raise ImportError('libcudart.so.12: cannot open')")
    monkeypatch.setattr(table, "BESIDE_TRIAL", [Check(devices.torch, About.MACHINE)])


def test_a_torch_that_cannot_be_imported_is_refused_by_all_three_if_a_gpu_is_asked_for(
    broken_torch: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused_by_all(capsys, "trainer.device=cuda").startswith(BROKEN)


def test_without_a_gpu_the_start_imports_torch_and_the_dry_run_does_without(broken_torch: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "run.toml"]) == 2
    assert BROKEN in capsys.readouterr().err
    status, dry = said(capsys, "train", "run.toml", "--dry-run")
    assert status == 0, dry


def test_a_package_that_is_missing_is_refused_by_all_three(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = software.package_version
    monkeypatch.setattr(software, "package_version", lambda name: None if name == "safetensors" else found(name))
    assert refused_by_all(capsys).startswith("packages: safetensors is not installed, ")


def test_a_cluster_that_is_not_there_is_refused_by_all_three(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(config: object) -> None:
        raise ConfigError("no cluster answers at 10.0.0.1; start Ray there")

    monkeypatch.setattr(ray, "connect", connect)
    assert refused_by_all(capsys, "cluster.kind=ray", "cluster.address=10.0.0.1:6379").startswith("no cluster answers")


def test_a_run_without_a_checkpoint_is_not_resumed_and_the_dry_run_says_so_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "run.toml", "--resume"]) == 2
    sentence = capsys.readouterr().err
    assert "there is no checkpoint in it" in sentence
    assert main(["train", "run.toml", "--resume", "--dry-run"]) == 2
    assert capsys.readouterr().err == sentence


def test_a_folder_that_is_in_use_or_holds_a_run_refuses_a_start_and_is_noted_where_nothing_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("run/checkpoints/version-00000007").mkdir(parents=True)
    assert main(["train", "run.toml"]) == 2
    sentence = capsys.readouterr().err.removeprefix("midflight: ")
    assert sentence.startswith("run holds a run that can go on, which is kept. Give --resume")
    status, dry = said(capsys, "train", "run.toml", "--dry-run")
    assert status == 0 and letters(f"note: {sentence}") in letters(dry)
    status, doctor = said(capsys, "doctor", "run.toml")
    assert status == 0 and letters(sentence) in letters(doctor)
    pid = os.getpid()
    with hold_folder(Path("run"), lambda _: None), monkeypatch.context() as other:
        other.setattr(os, "getpid", lambda: pid + 1)  # that of another launcher
        assert main(["train", "run.toml"]) == 2
        assert "run is in use by process" in capsys.readouterr().err
        status, dry = said(capsys, "train", "run.toml", "--dry-run")
        assert status == 0 and letters("note: run is in use by process") in letters(dry)


def test_a_sound_run_starts_and_is_called_sound(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "run.toml"]) == main(["train", "run.toml", "--dry-run"]) == main(["doctor", "run.toml"]) == 0
    assert "a run can work here" in capsys.readouterr().out


def test_a_check_that_may_refuse_is_asked_by_all_three_and_stands_in_the_list_once() -> None:
    parts = (table.AT_ONCE, table.BESIDE_TRIAL, table.IN_TRIAL, table.AT_LAST)
    checks = [check for part in parts for check in part]
    assert len({check.look for check in checks}) == len({check.name for check in checks}) == len(checks)
    some = {check.name: check.callers for check in checks if not check.callers >= EVERYBODY}
    assert [name for name, callers in some.items() if callers not in (table.DOCTOR, table.PLAN)] == ["proofs"], (
        "trainer and engine say it as they load the model"
    )


def test_the_dry_run_refuses_a_model_for_a_part_that_will_refuse_it_and_notes_what_no_part_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(False, "trainer: refused. It computes otherwise."), (False, "engine: refused."), (False, "export: refused.")]
    monkeypatch.setattr(model, "prove", lambda folder, max_context, **_: found)
    write_byte_tokenizer(Path("model"))
    sizes = {"vocab_size": 262, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 256}
    Path("model/config.json").write_text(json.dumps(sizes))
    for kind, severities in (("embedded", "problem problem note"), ("vllm", "problem note note")):
        plan = Plan(load_config("run.toml", ["model.path=model", f"engine.kind={kind}"]), Caller.DRY_RUN)
        assert [finding.severity for finding in model.proofs(plan)] == severities.split()

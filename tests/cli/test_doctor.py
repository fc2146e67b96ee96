"""The commands `doctor` and `completion`, and `--version` with its commit."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from tests.archive.stores import Recorded

import midflight.version
from midflight.cli import main
from midflight.config import load_config
from midflight.config.sections import Config
from midflight.observe.summary import Summary, write_summary
from midflight.run.launcher.checks import devices, engines, folder, machine, software, table
from midflight.run.launcher.checks.check import About, Caller, Finding, Plan, Severity
from midflight.text.byte_tokenizer import write_byte_tokenizer
from midflight.types import GroupKey, Reason, RolloutKey, Trajectory
from midflight.types.facts import TrajectoryKept

ROOT = Path(__file__).parents[2]
SIZES = {"model_type": "qwen3", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the looks that start processes."""
    slow = (devices.torch, engines.servers)
    monkeypatch.setattr(table, "BESIDE_TRIAL", tuple(check for check in table.BESIDE_TRIAL if check.look not in slow))


def model(folder: Path, **changed: object) -> Path:
    folder.mkdir()
    write_byte_tokenizer(folder)
    config = {**SIZES, "num_key_value_heads": 1, "max_position_embeddings": 64, "vocab_size": 512, "tie_word_embeddings": True, **changed}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def looked(folder: Path) -> dict[str, Finding]:
    plan = Plan(load_config(None, [f"model.path={folder}"]), Caller.DOCTOR, about=frozenset({About.MODEL}))
    return {finding.what: finding for finding in table.ask(plan, [*table.AT_ONCE, *table.IN_TRIAL])}


def test_a_machine_where_a_default_run_works_is_status_0(quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("torch", "transformers", "memory", "disk", "open files", "a run can work here"))


def test_what_a_default_run_could_not_work_without_is_status_1_and_says_what_to_do(
    quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda kind: (64, 100_000) if kind == resource.RLIMIT_NOFILE else (-1, -1))
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "problem" in printed and "ulimit -n 4096" in printed and "1 problem: a run could not work" in printed


def test_sources_that_are_not_installed_are_noted_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where nothing can be installed, with the sources on PYTHONPATH."""

    def nothing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", nothing)
    (finding,) = software.packages(Plan(Config()))
    assert finding.severity is Severity.WARNING and "not installed" in finding.found and "pip install -e ." in finding.remedy


def test_a_port_that_is_taken_is_a_problem_of_the_configuration(quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["doctor", "--set", f"gateway.port={taken.getsockname()[1]}"]) == 1
    assert "gateway.port" in capsys.readouterr().out


def test_torch_that_cannot_be_imported_is_a_problem_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "PROBE_TORCH", "raise ImportError('libcudart.so.12: cannot open')")
    (finding,) = devices.torch(Plan(Config(), caller=Caller.DOCTOR))
    assert finding.severity is Severity.ERROR and "libcudart.so.12" in finding.found and "install it again" in finding.remedy


def test_a_server_is_found_by_its_variable_with_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$2" in *vllm*) echo 0.25.1;; *) exit 1;; esac\n')
    python.chmod(0o755)
    monkeypatch.chdir(tmp_path)  # where `make engines` has brought neither
    monkeypatch.setenv("MIDFLIGHT_VLLM_PYTHON", str(python))
    monkeypatch.setenv("MIDFLIGHT_SGLANG_PYTHON", str(python))
    vllm, sglang = engines.servers(Plan(Config()))
    assert (vllm.severity, vllm.found) == (Severity.OK, f"0.25.1 at {python}")
    assert sglang.severity is Severity.WARNING and "which has no sglang" in sglang.found


def test_a_model_folder_is_looked_at_with_its_tokenizer_and_template(tmp_path: Path) -> None:
    found = looked(model(tmp_path / "model"))
    assert all(finding.severity is Severity.OK for finding in found.values()), found
    assert "qwen3" in found["model"].found and "tokens" in found["chat template"].found


def test_a_tokenizer_of_another_model_is_a_problem(tmp_path: Path) -> None:
    found = looked(model(tmp_path / "model", vocab_size=64))
    assert found["tokenizer"].severity is Severity.ERROR and "give the model its own tokenizer" in found["tokenizer"].found


def test_a_model_without_template_and_one_whose_answers_never_end_are_noted(tmp_path: Path) -> None:
    without = model(tmp_path / "without")
    config = json.loads((without / "tokenizer_config.json").read_text())
    for path in without.glob("chat_template*"):
        path.unlink()
    (without / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": None}))
    assert looked(without)["chat template"].severity is Severity.WARNING
    endless = model(tmp_path / "endless")
    (endless / "tokenizer_config.json").write_text(
        json.dumps({**config, "chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"})
    )
    for path in endless.glob("chat_template*"):
        path.unlink()
    found = looked(endless)["end of an answer"]
    assert found.severity is Severity.WARNING and "eos_token_id" in found.remedy


def test_what_is_neither_configuration_nor_model_is_refused_with_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for asked in (tmp_path, tmp_path / "missing"):
        assert main(["doctor", str(asked)]) == 2
        assert "give the TOML file of a run" in capsys.readouterr().err


def test_a_wrong_configuration_is_a_finding(quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text("[rollout]\ngroup_sise = 3\n")
    assert main(["doctor", str(tmp_path / "run.toml")]) == 1
    assert "group_size" in capsys.readouterr().out  # the nearest known key


# --- Version and completion -------------------------------------------------------------------------------------------


def test_the_version_names_the_commit_of_the_checkout_or_what_a_wheel_brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(midflight.version, "_PACKAGE", tmp_path)
    assert midflight.version.described() == midflight.version.__version__
    (tmp_path / "commit").write_text("0123456789ab\n")
    assert midflight.version.described() == f"{midflight.version.__version__} (commit 0123456789ab)"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_printed_for_each_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    printed = capsys.readouterr().out
    assert "midflight" in printed and "_MIDFLIGHT_COMPLETE" in printed


def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    """The script that is printed, in a real bash."""
    (tmp_path / "midflight").write_text(f'#!/bin/sh\nexec {sys.executable} -m midflight "$@"\n')
    (tmp_path / "midflight").chmod(0o755)
    script = subprocess.run([sys.executable, "-m", "midflight", "completion", "bash"], capture_output=True, text=True, check=True).stdout
    (tmp_path / "completion").write_text(script)
    line = (
        f"PATH={tmp_path}:$PATH; source {tmp_path}/completion; COMP_WORDS=(midflight tra); COMP_CWORD=1; "
        "_midflight_completion midflight; echo ${COMPREPLY[@]}"
    )
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == ["trace", "train"], done.stderr


def test_a_kept_run_says_which_share_of_its_tokens_is_trained_and_why_the_rest_is_not(tmp_path: Path) -> None:
    """Two rollouts of 9 tokens each wait for a step; of the 9 of a third, 6 are masked and 3 dropped."""
    with Recorded(tmp_path) as store:
        store.group(0, (0.0, 1.0))
    plan = Plan(load_config(None, [f"run.folder={tmp_path}"]), Caller.DOCTOR)
    (found,) = folder.trained_share(plan)
    assert found == Finding(Severity.OK, "tokens", "100.0% of 18 are trained or will be")
    with Recorded(tmp_path) as store:
        key = RolloutKey(GroupKey(0, 0), 2)
        lost = Trajectory(key, "task-0", "letters", 0.0, ())
        store.apply(TrajectoryKept(lost, {Reason.NOT_POLICY_SAMPLED: 6}, {Reason.OVERSHOOT: 3}))
    summary = Summary(version=1, masked_by={"temperature": 6})
    write_summary(summary, tmp_path / "summary.json")
    (found,) = folder.trained_share(plan)
    assert found.severity is Severity.WARNING
    said = "66.7% of 27 are trained or will be; 22.2% masked: not_policy_sampled; 11.1% dropped: overshoot; by temperature"
    assert found.found == said and 'gateway.sampling = "run"' in found.remedy
    assert not list(folder.trained_share(Plan(load_config(None, [f"run.folder={tmp_path / 'none'}"]), Caller.DOCTOR)))

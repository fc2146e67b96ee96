"""The command line: what it calls, what it prints, and its exit status."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from io import StringIO
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from rich.console import Console

from midflight.cli import main
from midflight.cli.dry_run import print_report
from midflight.config import Config, load_config
from midflight.config.dump import as_toml
from midflight.errors import ModelNotFound, RunFailed
from midflight.run.launcher.checks.check import Findings
from midflight.text.byte_tokenizer import write_byte_tokenizer

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "configs" / "demo.toml")


class Launch:
    """Stands for `midflight.run.launcher.launch`: remembers the calls, and fails if asked to."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[object, ...], dict[str, object]]] = []
        self.error: BaseException | None = None
        self.begun: list[str] = []
        """Names of runs whose beginning was said."""

    def _call(self, name: str, *args: object, **kwargs: object) -> int:
        self.calls.append((name, args, kwargs))
        if self.error is not None:
            raise self.error
        return 0

    @property
    def config(self) -> Config:
        config = self.calls[-1][1][0]
        assert isinstance(config, Config)
        return config


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Launch:
    made = Launch()
    module = ModuleType("midflight.run.launcher.launch")
    for name in ("train", "rollouts", "serve", "engine", "evaluate", "rollback", "new_model"):
        setattr(module, name, lambda *a, _name=name, **k: made._call(_name, *a, **k))
    module.begin = lambda config: made.begun.append(config.run.name)  # pyright: ignore[reportAttributeAccessIssue]
    import midflight.run.launcher

    monkeypatch.setitem(sys.modules, "midflight.run.launcher.launch", module)
    monkeypatch.setattr(midflight.run.launcher, "launch", module, raising=False)
    return made


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in the folders of runs here is of no concern."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))


@pytest.fixture
def sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes seconds finds nothing wrong."""
    monkeypatch.setattr("midflight.run.launcher.checks.table.trial", lambda plan, **_: list[object]())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    sizes = {"vocab_size": 262, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 128}
    write_byte_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(sizes))
    return tmp_path / "model"


def test_train_hands_over_the_configuration_with_overrides_and_folder(launch: Launch, sound: None) -> None:
    Path("elsewhere/checkpoints/version-00000000").mkdir(parents=True)
    assert main(["train", DEMO, "--set", "run.steps=3", "--set", "rollout.max_staleness=2", "--folder", "elsewhere", "--resume"]) == 0
    name, _, kwargs = launch.calls[0]
    assert (name, kwargs) == ("train", {"resume": True, "overwrite": False, "found": Findings()})
    assert (launch.config.run.steps, launch.config.rollout.max_staleness, launch.config.run.folder) == (3, 2, Path("elsewhere"))


def test_a_dry_run_starts_nothing_and_prints_what_follows(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", DEMO, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert launch.calls == []
    for words in (
        "worst-case staleness",
        "whole rollout",
        "4 versions",
        "a version by shared_memory:",
        "effective loss",
        "min(ρ, 2)",
        "placement",
        "launcher",
        "memory, estimated",
        "total",
        "binds",
        "first prompt",
        "<|user|>reverse ",
        "257 <|user|>",
    ):
        assert words in printed, words


def test_a_report_says_of_memory_what_is_taken_in_any_case_and_what_in_the_worst() -> None:
    console = Console(width=160, record=True, file=StringIO())
    print_report(load_config(None, []), Findings(), console)
    lines = console.export_text().splitlines()
    (activations,) = (line for line in lines if "activations of" in line)
    (weights,) = (line for line in lines if "AdamW's two moments" in line)
    (slots,) = (line for line in lines if "slots of" in line)
    (total,) = (line for line in lines if line.split()[:1] == ["total"])
    number = r"[\d.]+ [MG]B"
    assert re.search(rf" {number} to {number}", activations), "rows without an advantage have none"
    assert re.search(rf" at most {number}", slots)
    assert re.search(rf"{number} to {number}", total)
    assert " to " not in weights


def test_a_report_says_whose_each_gpu_is_host_by_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")  # which count from 0 here
    config = load_config(
        None, ["engine.kind=vllm", "engine.device=cuda", "trainer.device=cuda", "engine.servers=[{tensor_parallel=2}, {}]"]
    )
    console = Console(width=120, record=True, file=StringIO())
    print_report(config, Findings(), console)
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    at = lines.index("host device who")
    assert "GPUs" in lines[:at]
    assert lines[at + 2 : at + 5] == ["this machine 0 trainer", "this machine 1, 2 engine0", "this machine 3 engine1"]


OWN_LOSS = ["--set", "objective.kind=examples.own_loss:spo"]


def test_a_dry_run_tries_a_loss_of_the_users_own_and_says_what_it_takes(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", DEMO, "--dry-run", *OWN_LOSS, "--set", "objective.delta=0.3"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "loss = examples.own_loss:spo, delta = 0.3" in printed
    assert "examples.own_loss:spo(ratio, advantage, delta = 0.3)" in printed and "Tried on 6 tokens" in printed


def test_a_loss_of_the_users_own_that_cannot_be_trained_with_is_said_before_anything_starts(
    launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", DEMO, *OWN_LOSS, "--set", "objective.tau=1"]) == 2
    assert "objective.tau (1) does nothing with objective.kind = 'examples.own_loss:spo'" in capsys.readouterr().err
    assert launch.calls == []


def test_serve_takes_the_context_of_the_model_and_the_options_given(launch: Launch, model: Path) -> None:
    assert main(["serve", "--model", str(model), "--engines", "2", "--port", "9000", "--max-running", "4", "--name", "x"]) == 0
    c = launch.config
    assert (c.model.path, c.model.max_context, c.model.name) == (model, 128, "x")
    assert (c.engine.count, c.engine.max_running, c.gateway.port, c.gateway.host) == (2, 4, 9000, "127.0.0.1")


def test_engines_that_serve_share_all_cores_unless_it_is_said_how_many(
    launch: Launch, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    for words, threads in (
        (["--engines", "2"], 3),
        (["--engines", "8"], 1),
        (["--set", "engine.threads=2"], 2),
        (["--engine", "vllm", "--engine-url", "http://a:1"], 1),
    ):
        assert main(["serve", "--model", str(model), *words]) == 0
        assert launch.config.engine.threads == threads


def test_an_override_has_the_last_word_over_an_option(launch: Launch, model: Path) -> None:
    main(["serve", "--model", str(model), "--engines", "2", "--set", "engine.count=3"])
    assert launch.config.engine.count == 3


def test_engine_gets_its_address(launch: Launch, model: Path) -> None:
    assert main(["engine", "--model", str(model), "--port", "9001"]) == 0
    assert launch.calls[0][2] == {"host": "127.0.0.1", "port": 9001, "token": None}


def test_an_evaluation_without_held_out_tasks_is_refused(launch: Launch, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = [word for i in range(2) for word in ("--set", f"environment.sources.{i}.heldout=0")]
    assert main(["evaluate", str(model), "--config", DEMO, *nothing, "--set", "warm_start.target_accuracy=none"]) == 2
    assert "no source holds tasks out, so there is nothing to evaluate on" in capsys.readouterr().err and launch.calls == []


def test_servers_of_other_people_are_chosen_or_attached_by_options(launch: Launch, model: Path) -> None:
    words = ["--model", str(model), "--engine", "vllm", "--engine-url", "http://a:1"]
    assert main(["serve", *words, "--engine-url", "http://b:1"]) == 0
    assert (launch.config.engine.kind, launch.config.engine.urls) == ("vllm", ("http://a:1", "http://b:1"))
    assert main(["engine", *words]) == 0
    assert (launch.config.engine.kind, launch.config.engine.urls) == ("vllm", ("http://a:1",))


def test_a_server_without_its_interpreter_is_said_before_anything_starts(
    launch: Launch, model: Path, capsys: pytest.CaptureFixture[str], sound: None
) -> None:
    chosen = ["--set", "engine.kind=sglang", "--set", "engine.python=/absent/python"]
    for words in (
        ["serve", "--model", str(model)],
        ["engine", "--model", str(model)],
        ["train", DEMO],
        ["train", DEMO, "--dry-run"],
        ["evaluate", str(model), "--config", DEMO],
    ):
        assert main([*words, *chosen]) == 2
        assert "/absent/python; run `make engines`" in capsys.readouterr().err
    assert not launch.calls


def test_a_control_token_reaches_whoever_guards_with_it(launch: Launch, model: Path, sound: None) -> None:
    for words in (["serve", "--model", str(model)], ["engine", "--model", str(model)], ["rollouts", DEMO, "--set", f"model.path={model}"]):
        assert main([*words, "--control-token", "chosen-by-the-user"]) == 0
        assert launch.calls[-1][0] == words[0] and launch.calls[-1][2]["token"] == "chosen-by-the-user"


def test_evaluate_gets_the_configuration_and_the_model(launch: Launch, model: Path) -> None:
    assert main(["evaluate", str(model), "--config", DEMO]) == 0
    assert launch.calls[0][1][1] == model
    assert launch.config.run.folder == Path("runs/demo/evaluation"), "the run's own logs stay its own"
    assert main(["evaluate", str(model), "--config", DEMO, "--folder", "mine"]) == 0
    assert launch.config.run.folder == Path("mine")


def test_each_server_has_a_folder_of_its_own_unless_one_is_given(launch: Launch, model: Path) -> None:
    for words, folder in ((["--port", "9000"], "runs/serve-9000"), (["--set", "run.folder=mine"], "mine")):
        assert main(["serve", "--model", str(model), *words]) == 0
        assert launch.config.run.folder == Path(folder)


def test_a_run_is_kept_whatever_is_typed_unless_its_end_is_said(
    launch: Launch, sound: None, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rollouts = ["rollouts", DEMO, "--set", f"model.path={model}"]
    version = Path("runs/demo/checkpoints/version-00000007")
    version.mkdir(parents=True)
    for command in (["train", DEMO], rollouts):
        assert main(command) == 2
        assert "--overwrite" in capsys.readouterr().err
    assert main(["train", DEMO, "--resume", "--overwrite"]) == 2
    assert launch.calls == [] and version.is_dir()
    assert main(["train", DEMO, "--overwrite"]) == main([*rollouts, "--overwrite"]) == main(["train", DEMO, "--resume"]) == 0


def test_a_dry_run_with_overwrite_says_what_would_refuse_it(launch: Launch, sound: None, capsys: pytest.CaptureFixture[str]) -> None:
    Path("large/version-00000007").mkdir(parents=True)
    Path("runs/demo").mkdir(parents=True)
    Path("runs/demo/checkpoints").symlink_to(Path("large").resolve())
    assert main(["train", DEMO, "--dry-run"]) == 0
    assert main(["train", DEMO, "--dry-run", "--overwrite"]) == 2
    assert "checkpoints is a link to the folder" in capsys.readouterr().err


def test_a_typing_error_is_said_before_anything_in_the_folder_is_touched(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    version = Path("runs/demo/checkpoints/version-00000007")
    version.mkdir(parents=True)
    wrong = ["--set", "environment.sources.0.dataset=spel_backward", "--set", "environment.entry=no_such_module:solve"]
    assert main(["train", DEMO, "--overwrite", *wrong]) == 2
    said = capsys.readouterr().err
    assert "Did you mean 'spell_backward'?" in said and "no_such_module" in said
    assert launch.calls == [] and [path.name for path in Path("runs/demo").iterdir()] == ["checkpoints"] and version.is_dir()


def test_a_module_that_ends_the_process_or_hangs_is_named(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    Path("ending.py").write_text("import os, sys; print('half way', file=sys.stderr, flush=True); os._exit(3)")
    assert main(["train", DEMO, "--set", "environment.entry=ending:solve"]) == 2
    said = capsys.readouterr().err
    assert "'ending:solve'" in said and "status 3" in said and "half way" in said
    Path("hanging.py").write_text("import time; time.sleep(1e9)")
    assert main(["train", DEMO, "--set", "environment.entry=hanging:solve", "--set", "run.stall_seconds=2"]) == 2
    said = capsys.readouterr().err
    assert "'hanging:solve'" in said and "did nothing for" in said and "while it imports hanging:solve" in said
    assert "hanging.py" in said.partition("It stands at:")[2] and "run.stall_seconds" in said
    assert launch.calls == [] and launch.begun == ["demo", "demo"], "what the run would be is said while it is tried"


def test_rollback_gets_the_configuration_that_is_kept_in_the_folder(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollback", "moved", "--to", "3"]) == 2
    assert "moved has no config.toml" in capsys.readouterr().err
    Path("moved").mkdir()
    Path("moved/config.toml").write_text(as_toml(load_config(DEMO, ["run.name=mine"])))
    assert main(["rollback", "moved", "--to", "3"]) == 0
    assert (launch.config.run.name, launch.config.run.folder, launch.calls[0][2]) == ("mine", Path("moved"), {"to": 3})


def test_new_model_refuses_a_folder_that_holds_something(launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-model", str(tmp_path / "new"), "--set", "model.hidden_size=64"]) == 0
    assert launch.calls[0][1][1] == tmp_path / "new" and launch.config.model.hidden_size == 64
    assert f"midflight serve --model {tmp_path / 'new'}" in capsys.readouterr().out
    (tmp_path / "file").write_text("x")
    assert main(["new-model", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_a_wrong_configuration_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", DEMO, "--set", "rollout.grop_size=3"]) == 2
    error = capsys.readouterr().err
    assert error == "midflight: --set rollout.grop_size: unknown key 'rollout.grop_size' (value 3). Did you mean 'rollout.group_size'?\n"


def test_a_missing_model_folder_is_said_before_anything_starts(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", DEMO, "--set", "model.path=nowhere"]) == 2
    assert launch.calls == [] and "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (RunFailed("the trainer died"), 1, "midflight: the trainer died\n"),
        (ModelNotFound("no model at x"), 2, "midflight: no model at x\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_error_of_a_run_is_one_line_and_its_status(
    launch: Launch, sound: None, capsys: pytest.CaptureFixture[str], error: BaseException, status: int, words: str
) -> None:
    launch.error = error
    assert main(["train", DEMO]) == status
    assert capsys.readouterr().err == words


def test_debug_shows_the_traceback(launch: Launch, sound: None, capsys: pytest.CaptureFixture[str]) -> None:
    launch.error = RunFailed("the trainer died")
    assert main(["train", DEMO, "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_error_nobody_meant_keeps_its_traceback(launch: Launch, sound: None) -> None:
    launch.error = ZeroDivisionError("ours")
    with pytest.raises(ZeroDivisionError):
        main(["train", DEMO])


def test_the_status_of_a_command_is_the_exit_status(launch: Launch, sound: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["midflight.run.launcher.launch"], "train", lambda config, **_: 7)
    assert main(["train", DEMO]) == 7


@pytest.mark.parametrize(
    "command", [["train", DEMO], ["rollouts", DEMO], ["serve"], ["engine"], ["evaluate", "model"], ["new-model", "dir"]]
)
@pytest.mark.parametrize("given", [["run.steps", "5"], ["run.steps", "=5"], ["run.steps", "=", "5"], ["run.steps", "5", "--debug"]])
def test_an_override_with_a_space_says_key_and_value(command: list[str], given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--set", *given]) == 2
    assert "an override is KEY=VALUE" in (said := capsys.readouterr().err) and said.rstrip().endswith("write --set run.steps=5")


@pytest.mark.parametrize("arguments", [["trai"], ["serve"], ["train", DEMO, "--steps", "3"]])
def test_wrong_usage_is_status_2_with_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "Usage" in capsys.readouterr().err


def test_help_and_version_end_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert main(["--version"]) == 0
    printed = capsys.readouterr().out
    assert all(command in printed for command in ("train", "serve", "engine", "evaluate", "new-model"))


def run_and_list_modules(*arguments: str) -> SimpleNamespace:
    code = (
        "import sys; from midflight.cli import main; status = main(sys.argv[1:]); sys.stderr.write(','.join(sys.modules)); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return SimpleNamespace(modules=set(done.stderr.split(",")), out=done.stdout)


def test_help_imports_neither_the_configuration_nor_torch() -> None:
    found = run_and_list_modules("--help").modules
    assert not found & {"torch", "numpy", "pydantic", "transformers", "asyncio", "msgspec", "midflight.config"}


def test_a_dry_run_does_not_import_torch() -> None:
    found = run_and_list_modules("train", DEMO, "--dry-run").modules
    assert not found & {"torch", "transformers"} and "midflight.config" in found


def test_the_process_that_has_a_users_loss_tried_does_not_import_torch() -> None:
    found = run_and_list_modules("train", DEMO, "--dry-run", *OWN_LOSS).modules
    assert not found & {"torch", "transformers"}


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "midflight", "train", "no-such.toml"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("midflight: there is no config file no-such.toml.")


def test_joining_nothing_or_with_a_wrong_address_is_told_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    token = ["--token", "0123456789abcdef"]
    assert main(["join", "--url", f"http://127.0.0.1:{free}", *token]) == 2
    assert f"nothing answers at http://127.0.0.1:{free} (" in capsys.readouterr().err
    assert main(["join", "--url", "127.0.0.1:8000", *token]) == 2
    assert "--url is '127.0.0.1:8000': give the gateway's address" in capsys.readouterr().err

"""What the files of `ops` do where it can be tried: an image's files make a wheel, a job goes on where it stopped, configurations load."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from midflight.config import load_config

ROOT = Path(__file__).parents[2]
OPS = ROOT / "ops"
FAKE = """#!/bin/bash
echo "$@" >> "$HERE/asked"
mkdir -p "$HERE/run/checkpoints" && touch "$HERE/run/checkpoints/latest"
trap 'exit 143' TERM
[ -z "$WAITS" ] && exit "$STATUS"
touch "$HERE/began"
while :; do sleep 0.02; done
"""


def stages() -> dict[str, list[str]]:
    """The instructions of each stage of the image, a line each, by its name."""
    text = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", (OPS / "Dockerfile").read_text()))
    found: dict[str, list[str]] = {}
    stage = found.setdefault("", [])
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("FROM "):
            stage = found.setdefault(line.rpartition(" AS ")[2], [])
        stage.append(line)
    return found


# --- The image --------------------------------------------------------------------------------------------------------


def test_both_devices_have_a_base_and_what_one_stage_takes_of_another_is_there() -> None:
    found = stages()
    assert {"base-cpu", "base-cuda", "build", "run"} <= set(found)
    for name, lines in found.items():
        for line in lines:
            if (source := re.match(r"COPY --from=(\S+)", line)) is not None:
                assert source[1] in found and source[1] != name
    assert found["run"][0] == "FROM base-${DEVICE} AS run" and 'ENTRYPOINT ["midflight"]' in found["run"]
    assert "USER 10001" in found["run"]  # nobody is root


def test_the_files_that_the_image_is_given_make_a_wheel_that_knows_its_commit(tmp_path: Path) -> None:
    """The lines of the stage that builds, but for what would come from the network: dependencies."""
    source, build = tmp_path / "source", stages()["build"]
    source.mkdir()
    for line in build:
        if line.startswith("COPY "):
            *names, to = shlex.split(line)[1:]
            for name in names:
                assert (ROOT / name).exists(), f"{line}: there is no {name}"
                target = source / name if to == "./" else source / to
                if (ROOT / name).is_dir():
                    shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "commit"))
                else:
                    shutil.copy(ROOT / name, target)
    (installs,) = (line for line in build if "pip install" in line)
    writes, _, rest = installs.removeprefix("RUN ").partition(" && ")
    subprocess.run(["sh", "-c", writes], cwd=source, env={**os.environ, "COMMIT": "0123456789ab"}, check=True)
    assert '".[${EXTRAS}]"' in rest and "midflight --version" in rest
    made = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--wheel-dir", str(tmp_path), "."]
    subprocess.run(made, cwd=source, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        assert packed.read("midflight/commit") == b"0123456789ab\n"
        assert {"midflight/report/page.html", "midflight/py.typed"} <= set(packed.namelist())


# --- A job of Slurm -----------------------------------------------------------------------------------------------------


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """An environment in which `midflight` and `scontrol` write down what they are asked."""
    fakes = {"midflight": FAKE, "scontrol": '#!/bin/bash\necho "$@" >> "$HERE/queued"\n'}
    for name, text in fakes.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "HERE": str(tmp_path), "SLURM_JOB_ID": "7", "STATUS": "0", "WAITS": ""}


def job(environ: dict[str, str]) -> subprocess.Popen[str]:
    here = Path(environ["HERE"])
    command = ["bash", str(OPS / "slurm.sh"), "run.toml", str(here / "run")]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_job_whose_time_is_up_ends_its_run_in_order_and_is_queued_again(slurm: dict[str, str]) -> None:
    here = Path(slurm["HERE"])
    running = job({**slurm, "WAITS": "yes"})
    while not (here / "began").exists():
        assert running.poll() is None, running.stdout
        time.sleep(0.02)
    running.send_signal(signal.SIGUSR1)
    assert running.wait(timeout=20) == 0
    assert (here / "queued").read_text() == "requeue 7\n"
    assert job(slurm).wait(timeout=20) == 0
    first, second = (here / "asked").read_text().splitlines()
    assert first == f"train run.toml --folder {here}/run" and second == f"{first} --resume"


@pytest.mark.parametrize("status", [0, 2])
def test_a_job_has_the_status_of_its_run(slurm: dict[str, str], status: int) -> None:
    assert job({**slurm, "STATUS": str(status)}).wait(timeout=20) == status
    assert not (Path(slurm["HERE"]) / "queued").exists()


# --- A service, and Kubernetes --------------------------------------------------------------------------------------------


def test_a_service_goes_on_from_its_checkpoint_and_begins_no_run_anew(tmp_path: Path) -> None:
    """The shell lines of the unit, with its folder elsewhere."""
    unit = (OPS / "midflight@.service").read_text().replace("/var/lib/midflight", str(tmp_path)).replace("%i", "demo").replace("$$", "$")
    lines = dict(line.split("=", 1) for line in unit.splitlines() if "=" in line and not line.startswith("#"))
    (tmp_path / "midflight").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "midflight").chmod(0o755)

    def ran(name: str) -> subprocess.CompletedProcess[str]:
        environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        return subprocess.run(shlex.split(lines[name]), env=environ, capture_output=True, text=True, check=False)

    began = f"train /etc/midflight/demo.toml --folder {tmp_path}/demo"
    assert ran("ExecCondition").returncode == 0 and ran("ExecStart").stdout.split() == began.split()
    (tmp_path / "demo" / "checkpoints").mkdir(parents=True)
    (tmp_path / "demo" / "checkpoints" / "latest").touch()
    assert ran("ExecStart").stdout.split() == [*began.split(), "--resume"]
    (tmp_path / "demo" / "model").mkdir()
    assert ran("ExecCondition").returncode == 1
    assert lines["RestartPreventExitStatus"] == "2" and lines["SuccessExitStatus"] == "143"


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((OPS / "kubernetes" / name).read_text()))


def test_the_configuration_of_the_job_loads_and_lies_where_the_job_keeps_it(tmp_path: Path) -> None:
    settings, claim, job_ = documents("train.yaml")
    (tmp_path / "run.toml").write_text(settings["data"]["run.toml"])
    config = load_config(tmp_path / "run.toml")
    (container,) = job_["spec"]["template"]["spec"]["containers"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert config.run.folder.is_relative_to(mounted["runs"]) and f"{config.run.folder}/checkpoints/latest" in container["args"][0]
    volumes = {volume["name"]: volume for volume in job_["spec"]["template"]["spec"]["volumes"]}
    assert set(volumes) == set(mounted) and volumes["runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def test_the_service_asks_the_port_and_the_path_that_the_gateway_has() -> None:
    deployment, service = documents("serve.yaml")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    arguments = cast("list[str]", container["args"])
    assert str(container["ports"][0]["containerPort"]) == arguments[arguments.index("--port") + 1]
    assert service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]
    assert {container[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe")} == {"/health"}
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not here: it brings Grafana's types")
def test_the_board_is_one_by_the_types_that_grafana_publishes() -> None:
    """No unknown field and no missing one, as its own compiler of types says. What a real Grafana draws of it is not tried."""
    place = ROOT / ".venv-ops" / "grafana"
    place.mkdir(parents=True, exist_ok=True)
    wanted = ["@grafana/schema@13.2.3", "typescript@5.9.3"]
    if not (place / "node_modules" / ".bin" / "tsc").exists():
        install = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--omit=peer", "--legacy-peer-deps", *wanted]
        subprocess.run(install, cwd=place, check=True, timeout=110)
    board = (OPS / "grafana" / "midflight.json").read_text()
    (place / "board.ts").write_text(
        f"import type {{ Dashboard }} from '@grafana/schema';\nexport const board: Partial<Dashboard> = {board};\n"
    )
    options = ["--noEmit", "--strict", "--skipLibCheck", "--moduleResolution", "bundler", "--module", "esnext"]
    found = subprocess.run(
        [place / "node_modules" / ".bin" / "tsc", *options, "board.ts"], cwd=place, capture_output=True, text=True, check=False, timeout=110
    )
    assert found.returncode == 0, found.stdout

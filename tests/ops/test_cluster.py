"""What the recipes of a cluster do where it can be tried: who starts what on which machine, and that what they name is there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from midflight.config import load_config

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "ops" / "cluster"
TOLD = '#!/bin/bash\n{ echo "$0 $@"; env | grep -E "^(RAY|MIDFLIGHT|PORT)" | sort; } >> "$HERE/told"\n'


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder first on the path: commands write down there what they are asked."""
    srun = '#!/bin/bash\necho "srun $*" >> "$HERE/placed"\nwhile [[ $1 == -* ]]; do [[ $1 == -w ]] && shift; shift; done\nexec "$@"\n'
    fakes = {
        "ray": TOLD,
        "midflight": f'{TOLD}mkdir -p "$HERE/run/checkpoints" && touch "$HERE/run/checkpoints/latest"\nexit "$STATUS"\n',
        "srun": srun,
        "hostname": "#!/bin/bash\necho 127.0.1.1 10.0.0.5\n",
        "scontrol": '#!/bin/bash\n[ "$1" = show ] && printf "n1\\nn2\\nn3\\n"\n',
    }
    for name, text in fakes.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def ran(here: Path, script: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("RAY", "SLURM", "MIDFLIGHT"))}
    surroundings = {**own, "PATH": f"{here}:{os.environ['PATH']}", "HERE": str(here), "HOME": str(here), "STATUS": "0", **environ}
    command = ["bash", str(RECIPES / script), *arguments]
    return subprocess.run(command, env=surroundings, capture_output=True, text=True, check=False, timeout=60)


def test_a_machine_starts_the_cluster_or_joins_it_under_a_token_and_without_what_ends_processes_of_others(here: Path) -> None:
    (here / ".ray").mkdir()
    (here / ".ray" / "auth_token").write_text("a token")
    first = ran(here, "machine.sh", "head", "--num-gpus=8", MIDFLIGHT_ADDRESS="10.0.0.5")
    assert first.returncode == 0, first.stderr
    command, *variables = (here / "told").read_text().splitlines()
    assert command.split()[1:] == [
        *("start", "--block", "--disable-usage-stats", "--object-store-memory=80000000"),
        *("--head", "--port=6379", "--include-dashboard=false", "--node-ip-address=10.0.0.5", "--num-gpus=8"),
    ]
    assert {"RAY_AUTH_MODE=token", "RAY_memory_monitor_refresh_ms=0"} <= set(variables)
    (here / "told").unlink()
    assert ran(here, "machine.sh", "10.0.0.5:6379").returncode == 0
    assert (here / "told").read_text().split("\n")[0].split()[-1] == "--address=10.0.0.5:6379"


def test_a_machine_without_a_token_starts_nothing_and_says_where_it_should_lie(here: Path) -> None:
    ended = ran(here, "machine.sh", "head")
    assert ended.returncode == 2 and not (here / "told").exists()
    assert f"there is no token in {here}/.ray/auth_token" in ended.stderr


def test_a_job_starts_its_cluster_on_all_nodes_and_its_run_beside_the_head_and_leaves_no_token(here: Path) -> None:
    environ = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_CPUS_PER_TASK": "16",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "JOIN_SECONDS": "0.3",
    }
    for _ in range(2):
        ended = ran(here, "slurm.sh", "run.toml", str(here / "run"), **environ)
        assert ended.returncode == 0, ended.stderr
    told = (here / "told").read_text()
    first, second = (line.split(maxsplit=1)[1] for line in told.splitlines() if line.split()[0].endswith("/midflight"))
    token = here / ".ray-token-7"
    assert first == (
        f"train run.toml --folder {here}/run --set cluster.kind=ray --set cluster.address=10.0.0.5:20007 --set cluster.token_file={token}"
    )
    assert second == f"{first} --resume"
    assert f"RAY_AUTH_TOKEN_PATH={token}" in told and not token.exists()
    started = [set(line.split()) for line in told.splitlines() if line.split()[0].endswith("/ray") and " start " in line]
    assert sum({"--head", "--port=20007", "--node-ip-address=10.0.0.5"} <= words for words in started) == 2
    assert sum("--address=10.0.0.5:20007" in words for words in started) == 4 == len(started) - 2
    assert all({"--num-cpus=16", "--num-gpus=8"} <= words for words in started)
    nodes = [line.split("-w ")[1].split()[0] for line in (here / "placed").read_text().splitlines()]
    assert sorted(nodes) == ["n1"] * 4 + ["n2"] * 2 + ["n3"] * 2


def test_a_job_has_the_status_of_its_run(here: Path) -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_SUBMIT_DIR": str(ROOT), "JOIN_SECONDS": "0"}
    assert ran(here, "slurm.sh", "run.toml", str(here / "run"), STATUS="2", **environ).returncode == 2


def kuberay() -> dict[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all((RECIPES / "kuberay.yaml").read_text())}


def test_the_configuration_of_the_pods_loads_and_lies_on_the_disk_that_all_of_them_see(tmp_path: Path) -> None:
    found = kuberay()
    (tmp_path / "run.toml").write_text(found["ConfigMap"]["data"]["run.toml"])
    config = load_config(tmp_path / "run.toml")
    assert config.cluster.kind == "ray"
    spec = found["RayCluster"]["spec"]
    assert found["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert set(volumes) == set(mounted) and config.run.folder.is_relative_to(mounted["runs"])
        assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == found["PersistentVolumeClaim"]["metadata"]["name"]
        assert {"name": "RAY_memory_monitor_refresh_ms", "value": "0"} in container["env"]
    assert spec["authOptions"] == {"mode": "token"}
    assert f"{config.run.folder}/checkpoints/latest" in spec["headGroupSpec"]["template"]["spec"]["containers"][0]["args"][0]


def test_the_pods_are_what_kubernetes_takes(tmp_path: Path) -> None:
    validate = ROOT / ".venv-ops" / "bin" / "kubernetes-validate"
    if not validate.exists():
        pytest.skip("kubernetes-validate is not here: make lint-ops brings it")
    found = kuberay()
    spec = found["RayCluster"]["spec"]
    templates = [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    pods = [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"pod{i}"}, "spec": t["spec"]} for i, t in enumerate(templates)]
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all([found["ConfigMap"], found["PersistentVolumeClaim"], *pods]))
    ended = subprocess.run([validate, "--strict", tmp_path / "all.yaml"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_shell_of_the_head_waits_for_ray_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    spec = kuberay()["RayCluster"]["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    text = spec["args"][0].replace("/midflight/runs", str(tmp_path)).replace("sleep 2", "sleep 0.05")
    (tmp_path / "ray").write_text(f'#!/bin/bash\nif [ "$1" = start ]; then touch {tmp_path}/up; sleep 0.3; else [ -e {tmp_path}/up ]; fi\n')
    (tmp_path / "midflight").write_text(
        f'#!/bin/bash\necho "$@" >> {tmp_path}/asked\nmkdir -p {tmp_path}/cluster/checkpoints\ntouch {tmp_path}/cluster/checkpoints/latest\nexit 1\n'
    )
    for name in ("ray", "midflight"):
        (tmp_path / name).chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "KUBERAY_GEN_RAY_START_CMD": "ray start --head --block"}
    for _ in range(2):
        assert subprocess.run([*spec["command"], text], env=environ, check=False, timeout=20).returncode == 1
    assert (tmp_path / "asked").read_text().splitlines() == ["train /etc/midflight/run.toml", "train /etc/midflight/run.toml --resume"]


def test_the_machines_of_a_cloud_are_what_rays_autoscaler_reads_and_have_what_the_parts_ask_for() -> None:
    described = yaml.safe_load((RECIPES / "aws.yaml").read_text())
    kinds = described["available_node_types"]
    assert {name for kind in kinds.values() for name in kind["resources"]} == {"CPU", "GPU", "rollout", "trainer", "engine"}
    commands = [line for key in ("head", "worker") for line in described[f"{key}_start_ray_commands"] if "ray start" in line]
    for line in commands:
        assert "RAY_AUTH_MODE=token" in line and "RAY_memory_monitor_refresh_ms=0" in line
    util = pytest.importorskip("ray.autoscaler._private.util")
    util.validate_config(util.prepare_config(described))


def test_options_that_the_recipes_give_to_ray_are_known_to_it() -> None:
    ray = shutil.which("ray", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if ray is None:
        pytest.skip("Ray is not here (pip install 'midflight[ray]')")
    known = set(re.findall(r"--[a-z-]+", subprocess.run([ray, "start", "--help"], capture_output=True, text=True, check=True).stdout))
    text = "\n".join(path.read_text() for path in RECIPES.glob("*.*") if path.suffix != ".yaml" or path.name == "aws.yaml")
    starts = " ".join(re.findall(r"ray start((?:\s+(?:--\S+|\\?\n))+)", text)) + (RECIPES / "machine.sh").read_text()
    assert set(re.findall(r"(?<=[\s\"(])--[a-z][a-z-]+", starts)) <= known | {"--generate"}

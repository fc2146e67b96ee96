"""What `midflight doctor` looks at: can this machine do what it is asked to, and what to do where
it can't? Changes nothing, but for the folder that a GGUF file is converted into.

Every look is a function that gives findings. What a run's own checks know
(`run.launcher.preflight`) is asked there.
"""

import json
import os
import platform
import resource
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import cast

from packaging.requirements import Requirement

from midflight.config.sections import RunSection
from midflight.errors import ConfigError, MidflightError
from midflight.models.gguf_folders import model_folder
from midflight.observe.machine import PACKAGES, package_version
from midflight.observe.readable import size
from midflight.run.launcher.trial import Patience, TrialFailed, answer_of
from midflight.types import Json

STALL_SECONDS = RunSection().stall_seconds
"""A process that looks at a library and does nothing for so long hangs."""
MIN_FILES = 256
GOOD_FILES = 4096
"""Open files. A rollout holds two connections, and several hundred may run."""
MIN_PROCESSES = 512
"""Of a user, threads counted."""
PROBE_TORCH = """
import json, torch
seen = torch.cuda.is_available()
named = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())] if seen else []
(torch.ones(8, 8) @ torch.ones(8, 8)).sum().item()
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "devices": [[d.name, d.total_memory] for d in named]}))
"""
SERVERS = {"vllm": "MIDFLIGHT_VLLM_PYTHON", "sglang": "MIDFLIGHT_SGLANG_PYTHON"}
"""Servers of other people, and the variable that names the interpreter of each."""
PROBED = ("user", "assistant")


class Gravity(StrEnum):
    FINE = "ok"
    NOTE = "note"
    """Something that a run may meet, and can do without."""
    WRONG = "problem"
    """A run could not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    mark: Gravity
    what: str
    found: str
    remedy: str = ""


def examine(asked: Path | None, overrides: Sequence[str]) -> Iterator[Finding]:
    """`ConfigError` where there is nothing to look at in `asked`."""
    path = _what(asked)
    yield from software()
    yield from torch_and_devices()
    yield from machine()
    yield from limits()
    yield from servers()
    if path is not None and path.is_dir():
        yield from model(path)
    else:
        yield from run(path, overrides)


def _what(asked: Path | None) -> Path | None:
    """A file of a configuration, or a folder of a model."""
    if asked is None:
        return None
    asked = model_folder(asked)
    if asked.is_file():
        return asked
    if not asked.is_dir():
        raise ConfigError(
            f"{asked} is not there; give the TOML file of a run, or the folder of a model or a run."
        )
    if (asked / "config.toml").is_file():
        return asked / "config.toml"
    if (asked / "config.json").is_file():
        return asked
    raise ConfigError(
        f"{asked} has neither config.json (a model) nor config.toml (a run); give the TOML file of "
        "a run, or such a folder."
    )


def _tried(what: str, look: Callable[[], Iterator[Finding]], remedy: str = "") -> Iterator[Finding]:
    """An error that says what to do is a finding, several lines are several."""
    try:
        yield from look()
    except MidflightError as error:
        for line in str(error).splitlines():
            yield Finding(Gravity.WRONG, what, line, remedy)


# --- Software -------------------------------------------------------------------------------------


def software() -> Iterator[Finding]:
    from midflight.version import described

    yield Finding(Gravity.FINE, "midflight", described())
    yield Finding(
        Gravity.FINE,
        "python",
        f"{platform.python_version()} at {sys.executable}; {platform.platform(terse=True)}",
    )
    yield from packages()


def packages() -> Iterator[Finding]:
    """What Midflight needs, and which of its extras are there."""
    missing: defaultdict[str, list[str]] = defaultdict(list)
    for requirement, extra in _requirements():
        there = package_version(requirement.name)
        is_met = there is not None and requirement.specifier.contains(there, prereleases=True)
        missing[extra] += [] if is_met else [requirement.name]
        if not is_met and not extra:
            found = (
                f"{requirement.name} {'is not installed' if there is None else there}, "
                f"{requirement.specifier or 'any'} is needed"
            )
            yield Finding(
                Gravity.WRONG,
                "packages",
                found,
                f"pip install -U '{requirement.name}{requirement.specifier}'",
            )
    shown = ", ".join(
        f"{name} {version}" for name in PACKAGES if (version := package_version(name))
    )
    yield Finding(Gravity.FINE, "packages", shown)
    extras = {
        name: lacking for name, lacking in missing.items() if name and name not in ("test", "lint")
    }
    there, lacking = (
        sorted(name for name, lacks in extras.items() if bool(lacks) is wanted)
        for wanted in (False, True)
    )
    text = f"{', '.join(there) or 'none'}{'; without ' + ', '.join(lacking) if lacking else ''}"
    yield Finding(
        Gravity.FINE,
        "extras",
        text,
        f"where you want them: pip install 'midflight[{','.join(lacking)}]'" if lacking else "",
    )


def _requirements() -> Iterator[tuple[Requirement, str]]:
    """Each with the extra that it is of; empty for what is always needed. Those of other systems
    are left out.
    """
    extras = metadata.metadata("midflight").get_all("Provides-Extra") or []
    for text in metadata.requires("midflight") or []:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or marker.evaluate({"extra": ""}):
            yield requirement, ""
        else:
            yield from (
                (requirement, extra) for extra in extras if marker.evaluate({"extra": extra})
            )


def torch_and_devices() -> Iterator[Finding]:
    """In a process of its own: a broken library may take the process along."""
    try:
        answer = answer_of(
            [sys.executable, "-c", PROBE_TORCH], Patience("importing torch", STALL_SECONDS)
        )
    except TrialFailed as failed:
        last = str(failed).splitlines()[-1]
        yield Finding(
            Gravity.WRONG,
            "torch",
            f"cannot be used: {last}",
            "install it again, in the build for this machine",
        )
        return
    said = cast("dict[str, Json]", json.loads(answer))
    devices = cast("list[tuple[str, int]]", said["devices"])
    yield Finding(
        Gravity.FINE,
        "torch",
        f"{said['torch']}, {'CUDA ' + str(said['cuda']) if said['cuda'] else 'built for the CPU'}",
    )
    for number, (name, memory) in enumerate(devices):
        yield Finding(Gravity.FINE, f"cuda:{number}", f"{name}, {size(memory)}")
    if not devices and Path("/dev/nvidia0").exists():
        yield Finding(
            Gravity.NOTE,
            "devices",
            "there is a GPU (/dev/nvidia0) that torch does not see",
            (
                "install a CUDA build of torch, and look at the driver with nvidia-smi; without, "
                "everything runs on the CPU"
            ),
        )
    yield Finding(
        Gravity.FINE,
        "engine embedded",
        "there, on " + (f"cpu and cuda:0 to cuda:{len(devices) - 1}" if devices else "the CPU"),
    )


def servers() -> Iterator[Finding]:
    """vLLM and SGLang, where a variable, `make engines` or this environment has them."""
    for name, variable in SERVERS.items():
        places = [os.environ.get(variable), f".venv-{name}/bin/python", sys.executable]
        found = None
        for python in (place for place in places if place and os.access(place, os.X_OK)):
            found = found or _server(name, python)
        if found is None and os.environ.get(variable):
            yield Finding(
                Gravity.NOTE,
                f"engine {name}",
                f"{variable} names {os.environ[variable]}, which has no {name}",
                "correct or unset it",
            )
        elif found is None:
            yield Finding(
                Gravity.FINE,
                f"engine {name}",
                "not here",
                f"where you want it: make engines, or engine.python of an environment with {name}",
            )
        else:
            yield Finding(Gravity.FINE, f"engine {name}", found)


def _server(name: str, python: str) -> str | None:
    command = [python, "-c", f"from importlib import metadata; print(metadata.version({name!r}))"]
    try:
        version = answer_of(command, Patience(f"looking for {name} in {python}", STALL_SECONDS))
    except (TrialFailed, OSError):
        return None
    return f"{version.decode()} at {python}"


# --- Machine --------------------------------------------------------------------------------------


def machine() -> Iterator[Finding]:
    from midflight.config.derived import machine_bytes
    from midflight.weights.transports.files import SHARED

    cores = os.cpu_count() or 1
    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    note = "" if allowed == cores else f", of which this process may use {allowed}"
    yield Finding(Gravity.FINE, "processors", f"{cores}{note}")
    yield Finding(Gravity.FINE, "memory", size(machine_bytes()))
    yield Finding(
        Gravity.FINE, "disk", f"{size(shutil.disk_usage(Path.cwd()).free)} free in {Path.cwd()}"
    )
    if SHARED.is_dir():
        yield Finding(
            Gravity.FINE,
            "shared memory",
            f"{size(shutil.disk_usage(SHARED).free)} free in {SHARED}",
        )
    else:
        yield Finding(
            Gravity.NOTE, "shared memory", f"there is no {SHARED}", 'set weights.transport = "file"'
        )
    try:
        with tempfile.TemporaryFile():
            pass
    except OSError as error:
        yield Finding(
            Gravity.WRONG,
            "temporary files",
            f"cannot be written: {error.strerror}",
            "set TMPDIR to a folder that can be written to",
        )
    proxied = [
        name
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
        if os.environ.get(name)
    ]
    past = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if proxied and not any(word.strip() in ("127.0.0.1", "*") for word in past.split(",")):
        text = (
            f"{proxied[0]} is set, and clients of agents may ask the proxy for the gateway at "
            "127.0.0.1"
        )
        yield Finding(Gravity.NOTE, "proxy", text, "set no_proxy=127.0.0.1,localhost")


def limits() -> Iterator[Finding]:
    """What the shell allows its processes (`ulimit`)."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = "unlimited" if files == resource.RLIM_INFINITY else f"{files:,}"
    if files != resource.RLIM_INFINITY and files < GOOD_FILES:
        wanted = GOOD_FILES if most == resource.RLIM_INFINITY else min(GOOD_FILES, most)
        raised = (
            f"ulimit -n {wanted}"
            if wanted > files
            else "raise the hard limit (limits.conf, LimitNOFILE= of systemd, --ulimit of Docker)"
        )
        mark = Gravity.WRONG if files < MIN_FILES else Gravity.NOTE
        yield Finding(mark, "open files", f"{shown}; a large run may hold {GOOD_FILES:,}", raised)
    else:
        yield Finding(Gravity.FINE, "open files", shown)
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if 0 <= processes < MIN_PROCESSES:
        yield Finding(
            Gravity.NOTE, "processes", f"{processes}, threads counted", f"ulimit -u {MIN_PROCESSES}"
        )
    for kind, name, letter in (
        (resource.RLIMIT_AS, "address space", "v"),
        (resource.RLIMIT_FSIZE, "size of a file", "f"),
    ):
        allowed = resource.getrlimit(kind)[0]
        if allowed != resource.RLIM_INFINITY:
            yield Finding(
                Gravity.NOTE, name, f"limited to {allowed:,} bytes", f"ulimit -{letter} unlimited"
            )


# --- Model and configuration ----------------------------------------------------------------------


def model(folder: Path) -> Iterator[Finding]:
    """Of a Hugging Face folder: sizes, tokenizer against model, chat template."""
    yield from _tried("model", lambda: _sizes(folder))
    yield from _tried("tokenizer", lambda: _tokenizer(folder))


def _sizes(folder: Path) -> Iterator[Finding]:
    from midflight.models.sizes import read_config, sizes_of

    sizes = sizes_of(folder)
    architecture = read_config(folder).get("model_type")
    text = (
        f"{architecture}, {sizes.num_parameters:,} parameters, context of "
        f"{sizes.max_context or 'unknown'}"
    )
    yield Finding(
        Gravity.FINE, "model", text, f"whether it is computed right: midflight check-model {folder}"
    )


def _tokenizer(folder: Path) -> Iterator[Finding]:
    from midflight.config.folders import check_tokenizer
    from midflight.models.sizes import sizes_of
    from midflight.text.formats.format import reasoning_format, tool_format

    tokenizer = check_tokenizer(folder)
    yield Finding(
        Gravity.FINE,
        "tokenizer",
        (
            f"{tokenizer.vocab_size} ids, the model has {sizes_of(folder).vocab_size} rows of "
            "embeddings"
        ),
    )
    if not tokenizer.eos_token_ids:
        remedy = "name eos_token_id in generation_config.json"
        yield Finding(
            Gravity.NOTE,
            "end of an answer",
            "no token ends one, so that each goes on to its limit",
            remedy,
        )
    if tokenizer.template is None:
        yield Finding(
            Gravity.NOTE,
            "chat template",
            "there is none, so that chats are refused",
            "add chat_template.jinja to the folder",
        )
        return
    asked = tokenizer.render([{"role": "user", "content": "1 + 1"}], add_generation_prompt=True)
    whole = tokenizer.render(
        [
            {"role": role, "content": content}
            for role, content in zip(PROBED, ("1 + 1", "two"), strict=True)
        ]
    )
    calls = tool_format("auto", tokenizer)
    thinking = reasoning_format("auto", tokenizer)
    formats = (
        f"calls as {type(calls).__name__ if calls else 'Hermes (no sign of another)'}, "
        f"{'thinks' if thinking else 'no thinking'}"
    )
    yield Finding(
        Gravity.FINE,
        "chat template",
        f"writes a question in {len(tokenizer.encode(asked))} tokens; {formats}",
    )
    behind = tokenizer.encode(whole.rpartition("two")[2])
    if tokenizer.eos_token_ids and not set(behind[:1]) & tokenizer.eos_token_ids:
        text = (
            "the template does not close an answer with a token that ends one, so that chats "
            "go "
            "on to their limit"
        )
        remedy = "add the token behind an answer to eos_token_id in generation_config.json"
        yield Finding(Gravity.NOTE, "end of an answer", text, remedy)


def run(path: Path | None, overrides: Sequence[str]) -> Iterator[Finding]:
    """What a run of the configuration would meet; without one, what the defaults ask of the
    machine.
    """
    name = "the defaults" if path is None else str(path)
    yield from _tried(name, lambda: _run(path, overrides))


def _run(path: Path | None, overrides: Sequence[str]) -> Iterator[Finding]:
    from midflight.cli import checked
    from midflight.run.launcher.folder import kept
    from midflight.run.launcher.preflight import Inspection

    if path is None:
        config = checked.config_of_file(None, overrides, None)
        said = Inspection(config).machine()
        yield from (Finding(Gravity.WRONG, "the defaults", problem) for problem in said.problems)
        if not said.problems:
            yield Finding(
                Gravity.FINE, "a default run", "devices, disk, shared memory and port are there"
            )
        return
    config = checked.config_of_run(path, overrides, None)
    if config.model.path is not None:
        yield from model(config.model.path)
    checked.check_engine(config)
    checked.check_sizes(config)
    found = checked.preflight(config)
    yield from (Finding(Gravity.NOTE, "configuration", note) for note in found.notes)
    if (there := kept(Path(config.run.folder))) is not None:
        yield Finding(
            Gravity.NOTE,
            "run.folder",
            f"{config.run.folder} holds {there}",
            "a run into it needs --resume or --overwrite",
        )
    yield Finding(
        Gravity.FINE,
        "configuration",
        f"{path} can run: environment, tasks, prompt, devices, disk, shared memory and port",
        f"what it would do: midflight train {path} --dry-run",
    )

"""The checks of `midflight doctor`. They tell whether this machine can carry out a run, and give
the remedy if it can't. They change nothing, except for the folder that a GGUF file is converted
into.

Every check is a function that yields findings. Some ask the checks of a run
(`run.launcher.preflight`).
"""

import json
import os
import platform
import resource
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from midflight.run.launcher.trial import TrialFailed, TrialWait, answer_of
from midflight.types import Json

STALL_SECONDS = RunSection().stall_seconds
"""The seconds after which a process that loads a library and does nothing counts as hung."""
MIN_FILES = 256
GOOD_FILES = 4096
"""Limits of open files. A rollout holds two connections, and several hundred may run."""
MIN_PROCESSES = 512
"""The processes that a user should be allowed, threads counted."""
PROBE_TORCH = """
import json, torch
seen = torch.cuda.is_available()
named = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())] if seen else []
(torch.ones(8, 8) @ torch.ones(8, 8)).sum().item()
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "devices": [[d.name, d.total_memory] for d in named]}))
"""
SERVERS = {"vllm": "MIDFLIGHT_VLLM_PYTHON", "sglang": "MIDFLIGHT_SGLANG_PYTHON"}
"""Servers of other people, and the variable that names the interpreter of each."""


class Severity(StrEnum):
    """The severity of a finding."""

    FINE = "ok"
    NOTE = "note"
    """Something that a run may meet, and can do without."""
    WRONG = "problem"
    """A run could not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the result."""

    mark: Severity
    what: str
    found: str
    remedy: str = ""


def examine(asked: Path | None, overrides: Sequence[str]) -> Iterator[Finding]:
    """Everything that is found. Raises `ConfigError` if there is nothing to look at in `asked`."""
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
    """Yields the findings of `look`. An error with a remedy becomes a finding for each of its
    lines.
    """
    try:
        yield from look()
    except MidflightError as error:
        for line in str(error).splitlines():
            yield Finding(Severity.WRONG, what, line, remedy)


# --- Software -------------------------------------------------------------------------------------


def software() -> Iterator[Finding]:
    from midflight.version import described

    yield Finding(Severity.FINE, "midflight", described())
    yield Finding(
        Severity.FINE,
        "python",
        f"{platform.python_version()} at {sys.executable}; {platform.platform(terse=True)}",
    )
    yield from packages()


def packages() -> Iterator[Finding]:
    """Yields findings on the packages that Midflight needs, and on its extras."""
    if package_version("midflight") is None:
        # Python finds the sources by its path, and their requirements are not recorded.
        yield Finding(
            Severity.NOTE,
            "packages",
            "midflight runs from its source folder and is not installed, so what it needs was not "
            "looked at",
            "pip install -e . in the source folder",
        )
        return
    missing: defaultdict[str, list[str]] = defaultdict(list)
    for requirement, extra in _requirements():
        there = package_version(requirement.name)
        is_met = there is not None and requirement.specifier.contains(there, prereleases=True)
        lacking = missing[extra]  # an extra whose packages are all there needs an entry too
        if is_met:
            continue
        lacking.append(requirement.name)
        if not extra:
            version = "is not installed" if there is None else there
            found = f"{requirement.name} {version}, {requirement.specifier or 'any'} is needed"
            yield Finding(
                Severity.WRONG,
                "packages",
                found,
                f"pip install -U '{requirement.name}{requirement.specifier}'",
            )
    versions = {name: package_version(name) for name in PACKAGES}
    shown = [f"{name} {version}" for name, version in versions.items() if version]
    yield Finding(Severity.FINE, "packages", ", ".join(shown))
    yield _extras(missing)


def _extras(missing: Mapping[str, Sequence[str]]) -> Finding:
    """Returns a finding on the extras that are there, by the packages that each lacks."""
    complete: list[str] = []
    incomplete: list[str] = []
    for name, lacking in sorted(missing.items()):
        if not name or name in ("test", "lint"):
            continue
        if lacking:
            incomplete.append(name)
        else:
            complete.append(name)
    text = ", ".join(complete) or "none"
    if not incomplete:
        return Finding(Severity.FINE, "extras", text)
    return Finding(
        Severity.FINE,
        "extras",
        f"{text}; without {', '.join(incomplete)}",
        f"where you want them: pip install 'midflight[{','.join(incomplete)}]'",
    )


def _requirements() -> Iterator[tuple[Requirement, str]]:
    """Each requirement with its extra, which is empty if it is always needed. Requirements of other
    systems are left out.
    """
    extras = metadata.metadata("midflight").get_all("Provides-Extra") or []
    for text in metadata.requires("midflight") or []:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or marker.evaluate({"extra": ""}):
            yield requirement, ""
        else:
            for extra in extras:
                if marker.evaluate({"extra": extra}):
                    yield requirement, extra


def torch_and_devices() -> Iterator[Finding]:
    """Asks torch in a process of its own, because a broken library may crash the process."""
    try:
        answer = answer_of(
            [sys.executable, "-c", PROBE_TORCH], TrialWait("importing torch", STALL_SECONDS)
        )
    except TrialFailed as failed:
        last = str(failed).splitlines()[-1]
        yield Finding(
            Severity.WRONG,
            "torch",
            f"cannot be used: {last}",
            "install it again, in the build for this machine",
        )
        return
    said = cast("dict[str, Json]", json.loads(answer))
    devices = cast("list[tuple[str, int]]", said["devices"])
    build = f"CUDA {said['cuda']}" if said["cuda"] else "built for the CPU"
    yield Finding(Severity.FINE, "torch", f"{said['torch']}, {build}")
    for number, (name, memory) in enumerate(devices):
        yield Finding(Severity.FINE, f"cuda:{number}", f"{name}, {size(memory)}")
    if not devices and Path("/dev/nvidia0").exists():
        yield Finding(
            Severity.NOTE,
            "devices",
            "there is a GPU (/dev/nvidia0) that torch does not see",
            "install a CUDA build of torch, and look at the driver with nvidia-smi; without, "
            "everything runs on the CPU",
        )
    where = f"cpu and cuda:0 to cuda:{len(devices) - 1}" if devices else "the CPU"
    yield Finding(Severity.FINE, "engine embedded", f"there, on {where}")


def servers() -> Iterator[Finding]:
    """Yields findings on vLLM and SGLang, if a variable, `make engines` or this environment has
    them.
    """
    for name, variable in SERVERS.items():
        found = None
        for python in (os.environ.get(variable), f".venv-{name}/bin/python", sys.executable):
            if python and os.access(python, os.X_OK):
                found = found or _server(name, python)
        if found is None and os.environ.get(variable):
            yield Finding(
                Severity.NOTE,
                f"engine {name}",
                f"{variable} names {os.environ[variable]}, which has no {name}",
                "correct or unset it",
            )
        elif found is None:
            yield Finding(
                Severity.FINE,
                f"engine {name}",
                "not here",
                f"where you want it: make engines, or engine.python of an environment with {name}",
            )
        else:
            yield Finding(Severity.FINE, f"engine {name}", found)


def _server(name: str, python: str) -> str | None:
    """Returns the version of a server, and where it is, or None if this interpreter has none."""
    command = [python, "-c", f"from importlib import metadata; print(metadata.version({name!r}))"]
    try:
        version = answer_of(command, TrialWait(f"looking for {name} in {python}", STALL_SECONDS))
    except (TrialFailed, OSError):
        return None
    return f"{version.decode()} at {python}"


# --- Machine --------------------------------------------------------------------------------------


def machine() -> Iterator[Finding]:
    from midflight.config.derived import machine_bytes
    from midflight.weights.transports.memory_files import SHARED

    cores = os.cpu_count() or 1
    allowed = cores
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    note = "" if allowed == cores else f", of which this process may use {allowed}"
    yield Finding(Severity.FINE, "processors", f"{cores}{note}")
    yield Finding(Severity.FINE, "memory", size(machine_bytes()))
    yield Finding(
        Severity.FINE, "disk", f"{size(shutil.disk_usage(Path.cwd()).free)} free in {Path.cwd()}"
    )
    if SHARED.is_dir():
        yield Finding(
            Severity.FINE,
            "shared memory",
            f"{size(shutil.disk_usage(SHARED).free)} free in {SHARED}",
        )
    else:
        yield Finding(
            Severity.NOTE,
            "shared memory",
            f"there is no {SHARED}: versions of weights lie in the run's folder",
        )
    try:
        with tempfile.TemporaryFile():
            pass
    except OSError as error:
        yield Finding(
            Severity.WRONG,
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
        yield Finding(Severity.NOTE, "proxy", text, "set no_proxy=127.0.0.1,localhost")


def limits() -> Iterator[Finding]:
    """Yields findings on the limits that the shell sets for its processes (`ulimit`)."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = "unlimited" if files == resource.RLIM_INFINITY else f"{files:,}"
    if files != resource.RLIM_INFINITY and files < GOOD_FILES:
        wanted = GOOD_FILES if most == resource.RLIM_INFINITY else min(GOOD_FILES, most)
        raised = f"ulimit -n {wanted}"
        if wanted <= files:
            raised = (
                "raise the hard limit (limits.conf, LimitNOFILE= of systemd, --ulimit of Docker)"
            )
        mark = Severity.WRONG if files < MIN_FILES else Severity.NOTE
        yield Finding(mark, "open files", f"{shown}; a large run may hold {GOOD_FILES:,}", raised)
    else:
        yield Finding(Severity.FINE, "open files", shown)
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if 0 <= processes < MIN_PROCESSES:
        yield Finding(
            Severity.NOTE,
            "processes",
            f"{processes}, threads counted",
            f"ulimit -u {MIN_PROCESSES}",
        )
    for kind, name, letter in (
        (resource.RLIMIT_AS, "address space", "v"),
        (resource.RLIMIT_FSIZE, "size of a file", "f"),
    ):
        allowed = resource.getrlimit(kind)[0]
        if allowed != resource.RLIM_INFINITY:
            yield Finding(
                Severity.NOTE, name, f"limited to {allowed:,} bytes", f"ulimit -{letter} unlimited"
            )


# --- Model and configuration ----------------------------------------------------------------------


def model(folder: Path) -> Iterator[Finding]:
    """Looks at a Hugging Face folder: sizes, tokenizer against model, chat template."""
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
        Severity.FINE,
        "model",
        text,
        f"whether it is computed right: midflight check-model {folder}",
    )


def _tokenizer(folder: Path) -> Iterator[Finding]:
    from midflight.config.model_checks import check_tokenizer
    from midflight.models.sizes import sizes_of
    from midflight.text.formats.format import reasoning_format, tool_format

    tokenizer = check_tokenizer(folder)
    rows = sizes_of(folder).vocab_size
    text = f"{tokenizer.vocab_size} ids, the model has {rows} rows of embeddings"
    yield Finding(Severity.FINE, "tokenizer", text)
    if not tokenizer.eos_token_ids:
        yield Finding(
            Severity.NOTE,
            "end of an answer",
            "no token ends one, so that each goes on to its limit",
            "name eos_token_id in generation_config.json",
        )
    if tokenizer.template is None:
        yield Finding(
            Severity.NOTE,
            "chat template",
            "there is none, so that chats are refused",
            "add chat_template.jinja to the folder",
        )
        return
    asked = tokenizer.render([{"role": "user", "content": "1 + 1"}], add_generation_prompt=True)
    whole = tokenizer.render(
        [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "two"}]
    )
    calls = tool_format("auto", tokenizer)
    called = type(calls).__name__ if calls else "Hermes (no sign of another)"
    thinking = "thinks" if reasoning_format("auto", tokenizer) else "no thinking"
    yield Finding(
        Severity.FINE,
        "chat template",
        f"writes a question in {len(tokenizer.encode(asked))} tokens; calls as {called}, "
        f"{thinking}",
    )
    behind = tokenizer.encode(whole.rpartition("two")[2])
    if tokenizer.eos_token_ids and not set(behind[:1]) & tokenizer.eos_token_ids:
        text = (
            "the template does not close an answer with a token that ends one, so that chats go "
            "on to their limit"
        )
        remedy = "add the token behind an answer to eos_token_id in generation_config.json"
        yield Finding(Severity.NOTE, "end of an answer", text, remedy)


def run(path: Path | None, overrides: Sequence[str]) -> Iterator[Finding]:
    """Checks the machine for a run of the configuration, or for the defaults if there is no
    configuration.
    """
    name = "the defaults" if path is None else str(path)
    yield from _tried(name, lambda: _run(path, overrides))


def _run(path: Path | None, overrides: Sequence[str]) -> Iterator[Finding]:
    from midflight.cli import configurations
    from midflight.run.launcher.folder import kept
    from midflight.run.launcher.preflight import Inspection

    if path is None:
        config = configurations.config_of_file(None, overrides, None)
        said = Inspection(config).machine()
        for problem in said.problems:
            yield Finding(Severity.WRONG, "the defaults", problem)
        if not said.problems:
            yield Finding(
                Severity.FINE, "a default run", "devices, disk, shared memory and port are there"
            )
        return
    config = configurations.config_of_run(
        path, overrides, None, stored=configurations.is_stored(path)
    )
    if config.model.path is not None:
        yield from model(config.model.path)
    configurations.check_engine(config)
    configurations.check_sizes(config)
    found = configurations.preflight(config)
    for note in found.notes:
        yield Finding(Severity.NOTE, "configuration", note)
    there = kept(Path(config.run.folder))
    if there is not None:
        yield Finding(
            Severity.NOTE,
            "run.folder",
            f"{config.run.folder} holds {there}",
            "a run into it needs --resume or --overwrite",
        )
    yield Finding(
        Severity.FINE,
        "configuration",
        f"{path} can run: environment, tasks, prompt, devices, disk, shared memory and port",
        f"what it would do: midflight train {path} --dry-run",
    )

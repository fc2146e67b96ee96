"""Checks of this machine: cores, memory, disk, shared memory, ports, and the limits of a process."""

import os
import resource
import tempfile
from collections.abc import Iterator

from midflight.config import derived
from midflight.config.disk import staged_bytes
from midflight.errors import ConfigError
from midflight.observe.readable import size
from midflight.run.launcher.checks.check import Finding, Plan, error, ok, warning
from midflight.run.launcher.viewer import has_viewer, open_address
from midflight.weights.transports.memory_files import SHARED, shared_free
from midflight.wire.server import listen

MIN_FILES = 256
GOOD_FILES = 4096
"""Limits of open files. A rollout holds two connections, and several hundred may run."""
MIN_PROCESSES = 512
"""The processes that a user should be allowed, threads counted."""


def machine(_: Plan) -> Iterator[Finding]:
    """Says what there is of cores and memory, and looks at temporary files and proxies."""
    cores = os.cpu_count() or 1
    allowed = cores
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    note = "" if allowed == cores else f", of which this process may use {allowed}"
    yield ok("processors", f"{cores}{note}")
    yield ok("memory", size(derived.machine_bytes()))
    try:
        with tempfile.TemporaryFile():
            pass
    except OSError as failed:
        yield error(
            "temporary files",
            f"cannot be written: {failed.strerror}",
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
        yield warning("proxy", text, "set no_proxy=127.0.0.1,localhost")


def limits(_: Plan) -> Iterator[Finding]:
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
        say = error if files < MIN_FILES else warning
        yield say("open files", f"{shown}; a large run may hold {GOOD_FILES:,}", raised)
    else:
        yield ok("open files", shown)
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if 0 <= processes < MIN_PROCESSES:
        yield warning(
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
            yield warning(
                name,
                f"limited to {allowed:,} bytes",
                f"ulimit -{letter} unlimited",
            )


# --- What a run takes -----------------------------------------------------------------------------


def shared_memory(plan: Plan) -> Iterator[Finding]:
    """Says what there is of shared memory. Raises `ConfigError` unless the folders that servers
    load versions from have room there. Published versions lie in the run's folder if they have none.
    """
    if plan.config.cluster.kind != "local":
        return
    if not SHARED.is_dir():
        found = f"there is no {SHARED}: versions of weights lie in the run's folder"
        yield warning("shared memory", found)
        return
    free = shared_free()
    yield ok("shared memory", f"{size(free)} free in {SHARED}")
    needed = staged_bytes(plan.config, derived.model_sizes(plan.config.model))
    if free < needed:
        raise ConfigError(
            f"{SHARED} has {size(free)} free, and the folders that servers load versions from "
            f"take {size(needed)} there; enlarge it (in containers --shm-size)."
        )


def port(plan: Plan) -> None:
    """Raises `ConfigError` if the gateway cannot listen at its address."""
    if plan.config.cluster.kind == "local":
        listen(plan.config.gateway.host, plan.config.gateway.port).close()


def view_port(plan: Plan) -> None:
    """Raises `ConfigError` if the viewer beside the run cannot listen at its port."""
    if has_viewer():
        open_address(plan.config.observe.view_port).close()

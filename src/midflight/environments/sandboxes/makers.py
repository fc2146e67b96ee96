"""The makers of boxes on other machines. Each box is made by its maker's own client, and nothing
else of the maker is known here.

A box runs scripts of `sh`, and can be ended. Its maker ends it too, after its life, so that a
process that died leaves no box behind.
"""

import math
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias
from uuid import uuid4

from midflight.config.agents import SandboxSection
from midflight.entries import package
from midflight.environments.agents import in_thread
from midflight.environments.sandboxes.port import BoxSetup
from midflight.errors import SandboxUnavailable

IMAGE = "python:3.12-slim"
NOBODY = "65534:65534"

Shell: TypeAlias = Callable[[str, float], Awaitable[tuple[int, str]]]
"""Runs a script within the given seconds, and returns its exit status and its output. Waits for its
end, and raises the errors of the maker's client.
"""


@dataclass(frozen=True, slots=True)
class Maker:
    """A maker of boxes."""

    package: str
    keys: tuple[str, ...]
    """The environment variables that its client needs."""
    box: Callable[[SandboxSection, BoxSetup], AbstractAsyncContextManager[Shell]]
    remedy: str
    not_held: str = ""
    """The limits of the section that its boxes do not keep, in words."""

    def client(self, extra: str) -> Any:
        """The package of its client. Raises `ConfigError` with the extra that brings it, and
        `SandboxUnavailable` with a key that is missing.
        """
        found = package(self.package, extra=extra)
        missing = [key for key in self.keys if not os.environ.get(key)]
        if missing:
            raise SandboxUnavailable(
                f"environment.sandbox.kind = {extra!r} needs the variable {missing[0]}, which is "
                "not set; set it."
            )
        return found


@asynccontextmanager
async def docker_box(section: SandboxSection, furnished: BoxSetup) -> AsyncGenerator[Shell]:
    """A container of docker. If `furnished` asks for folders or a build, it runs as the user that
    its image names. Otherwise it runs as `nobody`, which may write only to `/tmp`.
    """
    docker = package("docker", extra="docker")
    name = f"midflight-{uuid4().hex}"
    client: Any = await in_thread(lambda: docker.from_env(timeout=math.ceil(furnished.seconds)))
    options: dict[str, Any] = {}
    if not furnished.folders and not furnished.build:
        options |= {"user": NOBODY, "read_only": True, "cap_drop": ["ALL"]}
    if not section.network:
        options["network_mode"] = "none"

    def made() -> Any:
        image = furnished.image or section.image or IMAGE
        if furnished.build is not None:
            built, _ = client.images.build(path=str(furnished.build), rm=True)
            image = built.id
        return client.containers.run(
            image,
            ["sleep", str(math.ceil(furnished.seconds))],
            entrypoint=[],
            name=name,
            detach=True,
            auto_remove=True,
            init=True,
            mem_limit=f"{section.memory_mb}m",
            memswap_limit=f"{section.memory_mb}m",
            nano_cpus=10**9,
            pids_limit=section.processes + 8,
            security_opt=["no-new-privileges"],
            tmpfs={"/tmp": f"size={section.disk_mb}m,mode=1777,exec"},
            **options,
        )

    def removed() -> None:
        with suppress(docker.errors.APIError):  # it was never made, or its life is over
            client.api.remove_container(name, force=True)
        client.close()

    try:
        container: Any = await in_thread(made)

        async def shell(script: str, seconds: float) -> tuple[int, str]:
            del seconds
            ran: Any = await in_thread(
                lambda: container.exec_run(["sh", "-c", script], stderr=False)
            )
            return ran.exit_code, (ran.output or b"").decode(errors="replace")

        yield shell
    finally:
        await in_thread(removed)


@asynccontextmanager
async def e2b_box(section: SandboxSection, furnished: BoxSetup) -> AsyncGenerator[Shell]:
    """A machine of its own. Its processors and its memory are those of the template."""
    e2b = package("e2b", extra="e2b")
    template = furnished.image or section.image or None
    seconds = math.ceil(furnished.seconds)
    box = await e2b.AsyncSandbox.create(
        template, timeout=seconds, allow_internet_access=section.network
    )

    async def shell(script: str, seconds: float) -> tuple[int, str]:
        try:
            ran = await box.commands.run(script, timeout=seconds, user="root")
        except e2b.CommandExitException as ended:
            return ended.exit_code, ended.stdout
        return ran.exit_code, ran.stdout

    try:
        yield shell
    finally:
        await box.kill()


@asynccontextmanager
async def daytona_box(section: SandboxSection, furnished: BoxSetup) -> AsyncGenerator[Shell]:
    """A container of an image, with whole GiB of memory and disk. A box that is stopped is
    deleted.
    """
    daytona = package("daytona", extra="daytona")
    asked = daytona.CreateSandboxFromImageParams(
        image=furnished.image or section.image or IMAGE,
        resources=daytona.Resources(
            cpu=1,
            memory=math.ceil(section.memory_mb / 1024),
            disk=max(1, math.ceil(section.disk_mb / 1024)),
        ),
        network_block_all=not section.network,
        auto_stop_interval=math.ceil(furnished.seconds / 60),
        auto_delete_interval=0,
    )
    async with daytona.AsyncDaytona() as client:
        box = await client.create(asked, timeout=furnished.seconds)

        async def shell(script: str, seconds: float) -> tuple[int, str]:
            ran = await box.process.exec(script, timeout=math.ceil(seconds))
            return ran.exit_code, ran.result

        try:
            yield shell
        finally:
            await client.delete(box)


@asynccontextmanager
async def modal_box(section: SandboxSection, furnished: BoxSetup) -> AsyncGenerator[Shell]:
    """A container of an image, in the app `midflight`."""
    modal = package("modal", extra="modal")
    app = await modal.App.lookup.aio("midflight", create_if_missing=True)
    image = modal.Image.from_registry(furnished.image or section.image or IMAGE)
    memory = (section.memory_mb, section.memory_mb)
    seconds = math.ceil(furnished.seconds)
    box = await modal.Sandbox.create.aio(
        app=app,
        image=image,
        timeout=seconds,
        cpu=(1.0, 1.0),
        memory=memory,
        block_network=not section.network,
    )

    async def shell(script: str, seconds: float) -> tuple[int, str]:
        process = await box.exec.aio("sh", "-c", script, timeout=math.ceil(seconds))
        said = await process.stdout.read.aio()
        return await process.wait.aio(), said

    try:
        yield shell
    finally:
        await box.terminate.aio()


MAKERS = {
    "docker": Maker("docker", (), docker_box, "start Docker, or say in DOCKER_HOST where it is"),
    "e2b": Maker(
        "e2b",
        ("E2B_API_KEY",),
        e2b_box,
        "see the key in E2B_API_KEY, the template, and E2B's status page",
        "memory, disk and processes are those of its template",
    ),
    "daytona": Maker(
        "daytona",
        ("DAYTONA_API_KEY",),
        daytona_box,
        "see the key in DAYTONA_API_KEY, the image, and Daytona's status page",
        "memory_mb and disk_mb hold in whole GiB, and processes bounds nothing",
    ),
    "modal": Maker(
        "modal",
        ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"),
        modal_box,
        "see the token in MODAL_TOKEN_ID, the image, and Modal's status page",
        "disk_mb bounds each file alone, and processes bounds nothing",
    ),
}

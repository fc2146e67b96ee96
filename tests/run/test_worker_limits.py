"""What an agent may take of its worker, in a process of its own: neither limit can be taken back."""

from __future__ import annotations

import json
import subprocess
import sys
from contextvars import ContextVar

import pytest

from midflight.errors import TooManyProcesses
from midflight.run.worker.limits import StartedProcesses

PROGRAM = """
import asyncio, json, os, subprocess
from contextvars import ContextVar
import uvloop
from midflight.environments.agents import in_thread
from midflight.run.worker.limits import StartedProcesses, limit_memory

session = ContextVar("session")

async def awaited():
    await (await asyncio.create_subprocess_exec("true")).wait()

async def plain():
    subprocess.run(["true"])

async def threaded():
    await in_thread(lambda: subprocess.run(["true"]))

async def forked():
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)

async def agent(name, deeds):
    session.set(name)
    for deed in deeds:
        try:
            await deed()
        except Exception as error:
            return type(error).__name__
    return "ended"

async def main():
    count = StartedProcesses(3, session=session)
    count.watch(asyncio.get_running_loop())
    ends = {name: await asyncio.create_task(agent(name, deeds)) for name, deeds in {
        "awaited": [awaited] * 4, "plain": [plain] * 4, "threaded": [threaded] * 4, "forked": [forked] * 4,
        "modest": [awaited, plain, threaded],
    }.items()}
    subprocess.run(["true"])  # nobody's
    return ends

ends = uvloop.run(main())
limit_memory(1024)
try:
    bytearray(2**30)
except MemoryError:
    ends["memory"] = len(bytearray(2**20))
print(json.dumps(ends))
"""


def test_the_agent_that_takes_too_much_fails_and_nobody_else() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    refused = dict.fromkeys(("awaited", "plain", "threaded", "forked"), "TooManyProcesses")
    assert json.loads(found.stdout) == {**refused, "modest": "ended", "memory": 2**20}


def test_the_error_says_the_limit_and_an_agent_that_has_ended_is_forgotten() -> None:
    session = ContextVar[str]("session")
    session.set("one")
    count = StartedProcesses(1, session=session)
    count.start()
    with pytest.raises(TooManyProcesses, match=r"has started 1, which is environment\.max_processes"):
        count.start()
    count.forget("one")
    count.start()

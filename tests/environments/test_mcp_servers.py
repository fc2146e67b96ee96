"""Servers of tools over the Model Context Protocol, in processes of their own."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from tests.real.processes import free_port

from midflight.config.agents import McpSection
from midflight.environments.mcp_servers import McpServerLost, McpServers, check_servers
from midflight.environments.tools import ToolMissed
from midflight.errors import ConfigError

pytest.importorskip("mcp")
COMMAND = (sys.executable, str(Path(__file__).with_name("tool_server.py")))


def section(**options) -> McpSection:
    return McpSection(**{"command": COMMAND, **options})


def test_its_tools_answer_fail_and_i10_a_death_costs_the_rollout_and_the_next_call_has_a_new_server(caplog):
    async def main():
        async with McpServers([section()]) as servers:
            async with servers.of_rollout() as tools:
                by_name = {tool.name: tool for tool in tools}
                assert set(by_name) == {"add", "count", "fail", "die"}
                function = by_name["add"].schema["function"]
                assert function["description"] == "Adds two numbers." and set(function["parameters"]["properties"]) == {"a", "b"}
                assert await by_name["add"].call({"a": 2, "b": 3}) == "5"
                assert await by_name["count"].call({}) == "1"
                with pytest.raises(ToolMissed, match="Error executing tool fail"):
                    await by_name["fail"].call({})
                with pytest.raises(McpServerLost, match=r"calling a tool of .*tool_server.py: the server was lost"):
                    await by_name["die"].call({})
            assert "will be begun again" in caplog.text
            async with servers.of_rollout() as tools:
                count = next(tool for tool in tools if tool.name == "count")
                assert await count.call({}) == "1"  # another process

    asyncio.run(main())


def test_a_server_over_http_answers_and_i10_its_death_costs_the_rollout_until_it_is_there_again():
    port = free_port()
    over_http = McpSection(url=f"http://127.0.0.1:{port}/mcp")

    async def started() -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(*COMMAND, str(port), stderr=asyncio.subprocess.DEVNULL)
        async with asyncio.timeout(30):
            while True:
                try:
                    (await asyncio.open_connection("127.0.0.1", port))[1].close()
                    return process
                except OSError:
                    await asyncio.sleep(0.05)

    async def main():
        server = await started()
        async with McpServers([over_http]) as servers:
            async with servers.of_rollout() as tools:
                by_name = {tool.name: tool for tool in tools}
                assert set(by_name) == {"add", "count", "fail", "die"} and await by_name["add"].call({"a": 2, "b": 3}) == "5"
                with pytest.raises(ToolMissed, match="Error executing tool fail"):
                    await by_name["fail"].call({})
                with pytest.raises(McpServerLost, match=rf"calling a tool of .*{port}/mcp.* the server was lost"):
                    await by_name["die"].call({})
                with pytest.raises(McpServerLost, match=rf"starting the tools of .*a client against http://127.0.0.1:{port}/mcp"):
                    await by_name["count"].call({})
            await server.wait()
            server = await started()
            async with servers.of_rollout() as tools:
                assert await next(tool for tool in tools if tool.name == "count").call({}) == "1"
            server.terminate()
            await server.wait()

    asyncio.run(main())


def test_a_server_of_a_rollout_is_its_own():
    async def main():
        async with McpServers([section(per="rollout")]) as servers, servers.of_rollout() as one, servers.of_rollout() as other:
            found = [next(tool for tool in tools if tool.name == "count") for tools in (one, other)]
            return [await found[0].call({}), await found[0].call({}), await found[1].call({})]

    assert asyncio.run(main()) == ["1", "2", "1"]


def test_a_server_that_does_not_come_up_is_named_before_a_run_with_what_to_try():
    broken = section(command=(sys.executable, "-c", "raise SystemExit(4)"), start_seconds=20.0)
    with pytest.raises(ConfigError, match=r"environment\.mcp: starting the tools of .*by hand"):
        asyncio.run(check_servers([broken]))

"""Servers of tools over the Model Context Protocol, in processes of their own."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

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

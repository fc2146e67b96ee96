"""`/dashboard` leads to the viewer beside a run, which the run neither needs nor waits for."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from midflight.config.load import load_config
from midflight.run.api.dashboard import dashboard_route
from midflight.run.launcher import viewer
from midflight.run.launcher.viewer import RunViewer


def test_dashboard_leads_to_the_viewer_with_the_token_or_says_how_to_get_one(tmp_path: Path) -> None:
    client = TestClient(Starlette(routes=[dashboard_route(tmp_path)]), follow_redirects=False)
    missing = client.get("/dashboard")
    assert missing.status_code == 404 and "pip install 'midflight[view]'" in missing.text
    (tmp_path / "view.json").write_text(json.dumps({"url": "http://127.0.0.1:99"}))
    assert client.get("/dashboard").headers["location"] == "http://127.0.0.1:99/"
    for asked in (client.get("/dashboard?token=se%26cret"), client.get("/dashboard", headers={"Authorization": "Bearer se&cret"})):
        assert (asked.status_code, asked.headers["location"]) == (307, "http://127.0.0.1:99/?token=se%26cret")


def test_a_viewer_starts_with_its_first_visitor_and_its_death_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its place a program that writes a file and ends with status 3."""
    (tmp_path / "logs").mkdir()
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\nenv > {tmp_path}/started\nexit 3\n")
    program.chmod(0o700)
    monkeypatch.setattr(viewer.sys, "executable", str(program))
    monkeypatch.setattr(viewer.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    said: list[str] = []

    async def visit() -> None:
        beside = asyncio.create_task(RunViewer(load_config(None, [f"run.folder={tmp_path}"]), token="t", say=said.append).run())
        while not (tmp_path / "view.json").exists():
            await asyncio.sleep(0.01)
        assert not (tmp_path / "started").exists()
        port = int(json.loads((tmp_path / "view.json").read_text())["url"].rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)):
            while not said:
                await asyncio.sleep(0.01)
        assert (tmp_path / "started").exists() and not (tmp_path / "view.json").exists() and not beside.done()
        beside.cancel()

    asyncio.run(visit())
    environ = (tmp_path / "started").read_text()
    assert "MIDFLIGHT_CONTROL_TOKEN=t\n" in environ and "secret" not in environ, "it is no part of the cluster"
    assert len(said) == 1 and "the viewer ended with status 3" in said[0] and "the run goes on" in said[0]

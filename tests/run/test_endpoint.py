"""How a run tells where it is, to whom, and what it warns of."""

from __future__ import annotations

import json
import stat
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from rich.console import Console

from midflight.config.sections import Config, GatewaySection
from midflight.errors import ConfigError
from midflight.observe.terminal import Terminal
from midflight.run.endpoint import TOKEN_VARIABLE, Endpoint, control_token, remove_endpoint, write_endpoint
from midflight.run.launcher.launch import warn
from midflight.wire.hosts import exposure


def test_the_endpoint_file_is_for_this_user_alone_and_goes_with_its_run(tmp_path: Path) -> None:
    endpoint = Endpoint("http://127.0.0.1:1", "secret-token", "demo", "/model")
    write_endpoint(tmp_path, endpoint)
    path = tmp_path / "endpoint.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and [p.name for p in tmp_path.iterdir()] == ["endpoint.json"]
    assert json.loads(path.read_text()) == {
        "url": "http://127.0.0.1:1", "control_token": "secret-token", "run": "demo", "model_path": "/model", "api_version": 1,
    }  # fmt: skip
    assert "secret-token" not in repr(endpoint)
    remove_endpoint(tmp_path, "of another run")
    assert path.exists()
    remove_endpoint(tmp_path, "secret-token")
    remove_endpoint(tmp_path, "secret-token")
    assert not path.exists()


def test_a_token_is_the_one_given_else_that_of_the_environment_else_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    first, second = control_token(None), control_token(None)
    assert first.is_new and first.value != second.value and len(first.value) >= 32 and first.value not in repr(first)
    monkeypatch.setenv(TOKEN_VARIABLE, "from-the-environment")
    assert (control_token(None).value, control_token(None).is_new) == ("from-the-environment", False)
    assert control_token("given-on-the-command-line").value == "given-on-the-command-line"


@pytest.mark.parametrize("token", ["short", "", "with a space in the middle", "ümlaut-ümlaut-ümlaut", "line\nbreak-line-break", "x" * 600])
def test_a_token_that_could_be_guessed_or_cannot_travel_is_refused_without_showing_it(token: str) -> None:
    with pytest.raises(ConfigError, match="control token has") as caught:
        control_token(token or " ")
    assert not token or token not in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_exposes_nothing(host: str) -> None:
    assert exposure(host, anonymous=True) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "my.host"])
def test_anything_else_is_warned_of_by_name(host: str) -> None:
    open_to_all, sessions_only = exposure(host, anonymous=True), exposure(host, anonymous=False)
    assert open_to_all is not None and sessions_only is not None
    for warning in (open_to_all, sessions_only):
        assert host in warning and "/metrics" in warning and "no TLS" in warning
    assert "for everybody, without a token" in open_to_all and "session's address" in sessions_only


@pytest.mark.parametrize(("host", "num_warnings"), [("127.0.0.1", 0), ("0.0.0.0", 1)])
def test_the_warning_is_shown_before_anything_listens(host: str, num_warnings: int) -> None:
    console = Console(file=StringIO(), width=80)
    warn(Terminal(console), Config(gateway=GatewaySection(host=host)), anonymous=True)
    assert isinstance(console.file, StringIO) and console.file.getvalue().count("warning: 0.0.0.0 can be reached") == num_warnings


def test_a_gateway_on_another_machine_is_in_reach_of_others_though_its_address_is_left_at_loopback() -> None:
    said: list[str] = []
    terminal = cast(Terminal, SimpleNamespace(say=said.append))
    warn(terminal, Config(), anonymous=False)
    assert not said
    warn(terminal, Config.model_validate({"cluster": {"kind": "ray"}}), anonymous=False)
    assert "warning: the gateway's machine can be reached from other machines" in said[0]

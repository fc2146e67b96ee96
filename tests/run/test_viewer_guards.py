"""The viewer's whole application: whom it answers, and that nothing of a conversation or an address becomes a part of its pages or of another file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from tests.archive.stores import Recorded

from midflight.archive.conversation import conversation_of
from midflight.config import Config
from midflight.config.dump import as_toml
from midflight.types import GroupKey, RolloutKey
from midflight.view import app
from midflight.view.guard import COOKIE
from midflight.view.pages.conversation import _branch  # pyright: ignore[reportPrivateUsage]
from midflight.view.visit import RunFolders

pytest.importorskip("nicegui", reason="pip install 'midflight[view]'")
TOKEN = "the-token-of-this-viewer"
SCRIPT = "</script><script>alert('read')</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "shown"
    folder.mkdir()
    with Recorded(folder) as run:
        group = run.group(0, [1.0, 0.0, None], said=SCRIPT, source=SCRIPT, error=SCRIPT)
        run.train(group, version=1)
    (folder / "config.toml").write_text(as_toml(Config()))
    (folder / "metrics.jsonl").write_text("")
    (folder.parent / "secret.txt").write_text("of nobody's business")
    return folder


@pytest.fixture(scope="module")
def viewer(folder: Path) -> Iterator[TestClient]:
    built = app.build(RunFolders([folder]), host="127.0.0.1", token=TOKEN)
    with TestClient(built, base_url="http://127.0.0.1", headers={"authorization": f"Bearer {TOKEN}"}) as client:
        yield client


@pytest.mark.parametrize(
    "page",
    [
        "groups",
        "conversation?epoch=0&position=0&attempt=0&sample=0",
        "conversation?epoch=0&position=0&attempt=0&sample=2",
        "ledger",
        f"groups?q={SCRIPT}",
    ],
)
def test_what_a_model_or_an_address_says_is_shown_as_text(viewer: TestClient, page: str) -> None:
    answer = viewer.get(f"/run/shown/{page}")
    assert answer.status_code == 200
    assert "<script>alert" not in answer.text and "<img src=x" not in answer.text
    if page.startswith("groups"):  # what a conversation says follows over the page's socket
        assert "&lt;" in answer.text, "it is there, as text"


def test_the_tokens_of_a_conversation_are_shown_as_text(folder: Path) -> None:
    seen = conversation_of(folder, RolloutKey(GroupKey(0, 0), 0))
    shown = "".join(_branch(branch, "use") for branch in seen.branches)
    assert "&lt;" in shown and "<script" not in shown and "<img" not in shown


@pytest.mark.parametrize(
    "path",
    [
        "/run/..%2Fsecret.txt/run",
        "/run/shown/..%2F..%2Fsecret.txt",
        "/run/%2Fetc%2Fpasswd/groups",
        "/run/shown/conversation?epoch=../../secret.txt&position=0&attempt=0&sample=0",
        "/_nicegui/..%2F..%2F..%2Fsecret.txt",
        "/../secret.txt",
        "/looks/..%2Fsecret.txt",
    ],
)
def test_no_address_leads_to_another_file(viewer: TestClient, path: str) -> None:
    said = viewer.get(path).text
    assert "nobody's business" not in said and "root:" not in said


@pytest.mark.parametrize("page", ["/", "/run/shown/groups", "/looks/dark", "/health", "/_nicegui/client/none"])
def test_nothing_is_shown_without_the_token_or_by_another_name(viewer: TestClient, page: str) -> None:
    for headers in ({"authorization": ""}, {"authorization": "Bearer wrong"}, {"authorization": "", "cookie": f"{COOKIE}=wrong"}):
        assert viewer.get(page, headers=headers).status_code == 401
    assert viewer.get(page, headers={"host": "evil.example"}).status_code == 421
    assert viewer.get(page, headers={"host": "localhost:8080"}).status_code != 421

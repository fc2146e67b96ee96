"""Groups, conversations and the ledger in a real Chromium, against what the store says."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect
from tests.archive.stores import SAYS, Recorded

from midflight.archive.conversation import conversation_of
from midflight.archive.groups import GroupFilter, page_of
from midflight.archive.ledger import ledger_of
from midflight.archive.store_reader import rollout_key
from midflight.trajectories.database import SCHEMA_VERSION
from midflight.types import Reason

pytestmark = pytest.mark.timeout(300)
expect.set_options(timeout=60_000)  # the first advantages of a viewer load torch
SERVE = """
import socket, sys
from pathlib import Path
from midflight.view.app import build, serve
from midflight.view.visit import RunFolders
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
serve(build(RunFolders([Path(folder) for folder in sys.argv[1:]]), host="127.0.0.1"), listener)
"""
CALL = '<think>which?</think><tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call><|end|>'
WHY = "KeyError: 'unit' is not in the answer of the weather service"


def recorded(folder: Path) -> None:
    """Thirty groups: 0 called a tool and was trained in step 1, of 1 a rollout failed, 2 was dropped, the others wait."""
    with Recorded(folder) as store:
        asked = (SAYS.format(asked="Rain in Ulm?"), False)
        calls = store.row(asked, (CALL, True), ("<|tool|>sunny<|end|><|assistant|>", False), ("No <b>rain</b>.<|end|>", True), version=0)
        other = store.row(asked, (CALL, True), ("<|user|>And Bonn?<|end|><|assistant|>", False), ("Yes.<|end|>", True), untrained=(1,))
        store.train(store.group(0, (1.0, 0.0), rows={0: (calls, other)}), version=1)
        store.group(1, (0.5, None), source="weather", error=WHY)
        store.drop(store.group(2, (0.25, 0.25)), Reason.ZERO_SPREAD)
        for index in range(3, 30):
            store.group(index, (index / 100, 0.5), said="quince" if index == 7 else "pear")
    line = {"kind": "step", "step": 1, "version": 1, "seconds": 1.0, "step_seconds": 1.0, "tokens": 1, "rollouts": 2,
            "generation_rate": 0.0, "training_rate": 0.0, "totals": {}}  # fmt: skip
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (folder / "config.toml").write_text('[gateway]\nreasoning_format = "think"\n')


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for name in ("good", "newer", "going", "ended"):
        recorded(root / name)
    with Recorded(root / "ended") as store:
        store.begin(30)
    with closing(sqlite3.connect(root / "newer" / "store.sqlite")) as other:
        other.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    return root


@pytest.fixture(scope="module")
def address(folders: Path) -> Iterator[str]:
    command = [sys.executable, "-c", SERVE, *(str(folders / name) for name in ("good", "newer", "going", "ended"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=None) as viewer:
        try:
            assert viewer.stdout is not None
            yield f"http://127.0.0.1:{viewer.stdout.readline().strip()}"
        finally:
            viewer.kill()


@pytest.fixture(scope="module")
def tab(chromium: Browser) -> Iterator[Page]:
    page = chromium.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(15_000)
    yield page
    page.close()


def named(tab: Page, name: str) -> str:
    return tab.locator(f'[data-test="{name}"]').first.inner_text()


def test_groups_show_the_numbers_of_the_store_a_page_at_a_time(tab: Page, address: str, folders: Path) -> None:
    tab.goto(f"{address}/run/good/groups")
    assert named(tab, "counted") == "groups 1 to 25 of 30"
    store = page_of(folders / "good", GroupFilter(), number=25)
    for group in store.groups:
        row = tab.locator(f'[data-test="group 0-{group.key.index}-0"]')
        assert row.inner_text().strip().startswith(group.task.id)
        shown = [row.locator(f'[data-test="{name}"]').inner_text() for name in ("mean", "spread")]
        assert shown == [f"{group.mean:.3f}", f"{group.spread:.3f}"]
    tab.locator('[data-test="next page"]').click()
    expect(tab.locator('[data-test="counted"]')).to_have_text("groups 26 to 30 of 30")
    fate = tab.locator('[data-test="group 0-0-0"] td.fate')
    assert fate.inner_text().split() == ["trained", "version", "1,", "step", "1"]
    assert fate.locator(".tag").get_attribute("title") == "trained, made version 1"


def test_the_groups_of_a_step_show_when_their_rollouts_were_made_and_lead_to_their_conversations(
    tab: Page, address: str, folders: Path
) -> None:
    turn = {"began": 0.0, "ended": 4.0, "placed": [["engine0", 0.0]], "sampled": [[0, 1.0], [1, 2.0]], "num_tokens": 5}
    with (folders / "good" / "timeline.jsonl").open("w") as lines:
        for index in (0, 3):  # 3 is in no step
            key = [0, index, 0, 0]
            line = {"kind": "rollout", "key": key, "source": "letters", "began": 0.0, "ended": 5.0, "reward": 1.0, "num_tokens": 5}
            lines.write(json.dumps({**line, "turns": [turn]}) + "\n")
    tab.goto(f"{address}/run/good/groups?step=1")
    expect(tab.get_by_text("1 rollouts, 1 of several versions.")).to_be_visible()
    bars = tab.locator('[data-test="chart rollouts"] .point')
    expect(bars).to_have_count(4)
    bars.nth(1).click(force=True)
    tab.wait_for_url("**/conversation?epoch=0&position=0&attempt=0&sample=0")
    expect(tab.locator('[data-test="chart turns"] .point')).to_have_count(4)
    tab.goto(f"{address}/run/good/groups")
    expect(tab.locator('[data-test="groups"]')).to_be_visible()
    assert not tab.locator('[data-test="chart rollouts"]').count()


def test_a_conversation_stands_among_the_rollouts_of_its_group(tab: Page, address: str) -> None:
    tab.goto(f"{address}/run/good/conversation?epoch=0&position=0&attempt=0&sample=0")
    cells = tab.locator(".cells a")
    expect(cells).to_have_count(2)
    assert cells.nth(0).get_attribute("aria-current") == "page" and cells.nth(1).get_attribute("aria-current") is None
    assert named(tab, "sampled by") == "version 0" and named(tab, "took").endswith(" s")
    cells.nth(1).click()
    tab.wait_for_url("**/conversation?epoch=0&position=0&attempt=0&sample=1")
    expect(tab.locator(".cells a").nth(1)).to_have_attribute("aria-current", "page")


def test_groups_that_a_run_left_under_way_are_counted_and_shown_when_they_are_asked_for(tab: Page, address: str) -> None:
    tab.goto(f"{address}/run/ended/groups")
    assert named(tab, "counted") == "groups 1 to 25 of 30; 1 more were under way when the run ended"
    assert tab.locator("tr[data-test]").first.get_attribute("data-test") == "group 0-29-0"
    tab.goto(f"{address}/run/ended/groups?fate=running")
    assert named(tab, "counted") == "groups 1 to 1 of 1"
    assert tab.locator('[data-test="group 0-30-0"] td.fate').inner_text() == "not finished"


def test_filters_words_and_sorting_stand_in_the_address_and_are_kept(tab: Page, address: str) -> None:
    tab.goto(f"{address}/run/good/groups")
    tab.locator('[data-test="source"]').select_option("weather")
    tab.locator('[data-test="sort"]').select_option("worst")
    tab.locator('[data-test="filter"]').click()
    expect(tab.locator('[data-test="counted"]')).to_have_text("groups 1 to 1 of 1")
    assert "source=weather" in tab.url and "sort=worst" in tab.url
    assert tab.locator('[data-test="source"]').input_value() == "weather"
    tab.goto(f"{address}/run/good/groups")
    tab.locator('[data-test="words"]').fill("quince")
    tab.keyboard.press("Enter")
    expect(tab.locator('[data-test="counted"]')).to_have_text("groups 1 to 1 of 1")
    assert tab.locator("tr[data-test]").get_attribute("data-test") == "group 0-7-0"


def test_from_a_failure_to_what_the_model_said_there_by_keyboard(tab: Page, address: str) -> None:
    tab.goto(f"{address}/run/good/groups?failure=KeyError")
    assert named(tab, "why") == WHY
    tab.locator('[data-test="rollout 0-1-0-1"]').focus()
    tab.keyboard.press("Enter")
    expect(tab.locator('[data-test="error"]')).to_have_text(f"It has no reward: {WHY}")
    assert "answer 1" in named(tab, "assistant")


def test_each_token_has_a_tooltip_of_all_that_the_store_knows(tab: Page, address: str, folders: Path) -> None:
    tab.goto(f"{address}/run/good/conversation?epoch=0&position=0&attempt=0&sample=0&color=logprob")
    tokens = tab.locator('[data-test="tokens"] span.t')
    expect(tokens.first).to_be_visible()
    branch = conversation_of(folders / "good", rollout_key("0-0-0-0")).branches[0]
    at = int(branch.row.loss_mask.argmax())
    tokens.first.focus()
    tip = tokens.first.get_attribute("data-tip") or ""
    assert tip.splitlines() == [
        f"token {at}: {branch.row.token_ids[at]}, {branch.pieces[at]!r}",
        "version 0, age 0",
        f"log-probability {branch.row.logprobs[at]:.3f} (probability {2.718281828 ** float(branch.row.logprobs[at]):.3f})",
        "advantage 0.707",
        f"entropy about {branch.entropies[at]:.3f} nats",
        "mask: trained",
    ]
    shown = tokens.first.evaluate("element => getComputedStyle(element, '::after').content")
    assert "log-probability" in shown
    assert tokens.count() == sum(int(b.row.loss_mask.sum()) for b in conversation_of(folders / "good", rollout_key("0-0-0-0")).branches)


def test_tools_thinking_branches_and_markup_are_shown_as_what_they_are(tab: Page, address: str) -> None:
    tab.goto(f"{address}/run/good/conversation?epoch=0&position=0&attempt=0&sample=0")
    expect(tab.locator('[data-test="call"]').first).to_have_text('calls weather\n{\n  "city": "Ulm"\n}')
    assert named(tab, "thinking") == "which?"
    assert "sunny" in named(tab, "tool")
    assert "No <b>rain</b>." in tab.locator('[data-test="assistant"]').nth(1).inner_text()
    assert tab.get_by_text("Branch 2 of 2").count() == 1
    assert "trained in another branch" in named(tab, "difference")


@pytest.mark.parametrize("color", ["use", "version", "logprob", "advantage", "entropy", "age"])
def test_tokens_take_the_colour_that_is_asked_for(tab: Page, address: str, color: str) -> None:
    tab.goto(f"{address}/run/good/conversation?epoch=0&position=0&attempt=0&sample=0&color={color}")
    expect(tab.locator(f'[data-test="color {color}"]')).to_have_attribute("aria-current", "true")
    colour = tab.locator('[data-test="tokens"] span.t').first.evaluate("element => getComputedStyle(element).backgroundColor")
    assert colour != "rgba(0, 0, 0, 0)"


def test_the_ledger_shows_the_sums_of_the_store_and_that_they_balance(tab: Page, address: str, folders: Path) -> None:
    tab.goto(f"{address}/run/good/ledger")
    ledger = ledger_of(folders / "good")
    assert named(tab, "tokens received") == f"{ledger.accounts.received_tokens:,}"
    assert "it balances" in named(tab, "balance")
    first = tab.locator('[data-test="tokens"] tbody tr').first.inner_text().split()
    assert first[:4] == ["received", *(f"{n:,}" for n in (*(line.received for line in ledger.sources), ledger.accounts.received_tokens))]


def test_a_page_takes_up_what_the_run_goes_on_to_do(tab: Page, address: str, folders: Path) -> None:
    tab.goto(f"{address}/run/going/groups?sort=newest")
    expect(tab.locator('[data-test="counted"]')).to_have_text("groups 1 to 25 of 30")
    with Recorded(folders / "going") as store:
        store._order = 30
        store.group(30, (0.125, 0.375))
    expect(tab.locator('[data-test="counted"]')).to_have_text("groups 1 to 25 of 31")
    assert "0.250" in named(tab, "group 0-30-0")


@pytest.mark.parametrize(
    ("name", "begins"), [("JSON", '{"rollout": "0-0-0-0"'), ("curl", "curl -s http"), ("shell", "midflight serve --model ")]
)
def test_a_conversation_is_copied_as_what_is_asked_for(tab: Page, address: str, name: str, begins: str) -> None:
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.goto(f"{address}/run/good/conversation?epoch=0&position=0&attempt=0&sample=0")
    tab.locator(f'[data-test="copy {name}"]').click()
    expect(tab.get_by_text("copied").first).to_be_visible()
    assert tab.evaluate("navigator.clipboard.readText()").startswith(begins)


def test_what_cannot_be_shown_is_said_on_the_page(tab: Page, address: str, folders: Path) -> None:
    for path, said in (
        ("newer/groups", f"its schema is {SCHEMA_VERSION + 1}, this Midflight knows {SCHEMA_VERSION}"),
        ("newer/ledger", "use the version that wrote it"),
        ("good/groups?step=x", "both are whole numbers"),
        ("good/groups?step=99", "has made no step from 99"),
        ("good/conversation?epoch=0", "the address names no rollout"),
        ("good/conversation?epoch=0&position=99&attempt=0&sample=0", "has no rollout 0-99-0-0"),
    ):
        tab.goto(f"{address}/run/{path}")
        expect(tab.locator('[data-test="problem"]')).to_contain_text(said)
    tab.goto(f"{address}/run/going/groups")
    shutil.rmtree(folders / "going")
    expect(tab.locator('[data-test="counted"]')).to_contain_text("deleted or moved", timeout=30_000)


def test_pages_fit_a_phone_and_ask_nothing_of_the_network(tab: Page, address: str) -> None:
    tab.set_viewport_size({"width": 390, "height": 844})
    asked: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    for path in ("groups", "ledger", "conversation?epoch=0&position=0&attempt=0&sample=0"):
        tab.goto(f"{address}/run/good/{path}")
        tab.wait_for_timeout(500)
        assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    assert [url for url in asked if not url.startswith((address, "data:"))] == []
    tab.set_viewport_size({"width": 1280, "height": 900})


def test_the_first_page_comes_within_a_second(tab: Page, address: str) -> None:
    urllib.request.urlopen(f"{address}/run/good/groups").read()  # what a viewer loads once
    begun = tab.evaluate("performance.timeOrigin")
    tab.goto(f"{address}/run/good/groups")
    assert tab.evaluate("performance.getEntriesByType('navigation')[0].responseEnd") < 1000, begun

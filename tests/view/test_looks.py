"""What pages look like, as far as a test can see it: on a phone and on a wide screen, in the light and in the dark."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from tests.archive.stores import SAYS, Recorded
from tests.archive.test_runs import made_run, score_line, step_line
from tests.view.conftest import NARROW, PATIENCE, viewing

from midflight.report.page import write_report
from midflight.types import Reason

expect.set_options(timeout=PATIENCE)
Look = Callable[..., Page]
LAPTOP = {"width": 1440, "height": 900}
PAGES = (
    "run",
    "time",
    "groups",
    "groups?kind=training&sort=worst",
    "ledger",
    "conversation?epoch=0&position=0&attempt=0&sample=0&color=version",
)
MAX_PHONE_HEIGHT = 5_000
MIN_CONTRAST = 4.5

CONTRASTS = (Path(__file__).parent / "contrasts.js").read_text()


def recorded(folder: Path) -> None:
    """Groups of eight rollouts: of 0 one failed, the others were trained in steps 1 to 6; 20 groups wait or were dropped."""
    lines = [score_line(0, 0.1)]
    with Recorded(folder) as store:
        for index in range(26):
            asked = (SAYS.format(asked=f"question {index}"), False)
            row = store.row(asked, (f"an answer of version {index}<|end|>", True), version=index % 6)
            rewards = [sample / 7 for sample in range(8)]
            group = store.group(
                index,
                [None, *rewards[1:]] if index == 0 else rewards,
                error="ZeroDivisionError: there is no unit to divide by, in a message of a length that a phone has to break somewhere",
                rows=dict.fromkeys(range(8), (row,)),
            )
            if index < 6:
                store.train(group, version=index + 1)
                lines.append(step_line(index + 1, 0.1 * index))
            elif index < 9:
                store.drop(group, Reason.ZERO_SPREAD)
    lines.append(score_line(6, 0.35))
    alarm = {"kind": "alarm", "version": 2, "step": 2, "seconds": 2.0, "name": "failures", "text": "8 of 9 rollouts got no reward; mend it"}
    text = "".join([*lines, json.dumps(alarm) + "\n"])
    (folder / "metrics.jsonl").write_text(text)
    (folder / "config.toml").write_text('[run]\nname = "looks"\nsteps = 6\n')
    bars: list[dict[str, object]] = []
    for version in range(1, 7):
        bars.append({"kind": "step", "lease": version, "version": version, "began": version + 0.1, "ended": version + 0.6, "num_tokens": 9})
        bars.append({"kind": "wait", "who": "trainer", "for_whom": "generation", "began": version + 0.6, "ended": version + 1.0})
    (folder / "timeline.jsonl").write_text("".join(json.dumps(bar) + "\n" for bar in bars))


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("looks")
    recorded(root / "looks")
    made_run(root / "empty")
    with viewing(root) as found:
        yield found


def opened(look: Look, address: str, **how: object) -> Page:
    """The page, when its programs have drawn it."""
    page = look(address, **how)
    page.wait_for_selector("#app .page, [data-test=home]")
    page.wait_for_function("!document.querySelector('.shown') || document.querySelector('[data-test=home]')")
    if "/conversation" in address:
        page.wait_for_selector(".tokens")
    page.wait_for_timeout(300)
    return page


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [NARROW, LAPTOP], ids=["390", "1440"])
def test_nothing_is_cut_and_every_text_can_be_read(address: str, look: Look, size: dict[str, int], dark: bool) -> None:
    addresses = ["/", "/no/such/place", "/run/empty/run", "/run/empty/time", *(f"/run/looks/{part}" for part in PAGES)]
    for path in addresses:
        page = opened(look, address + path, size=size, dark=dark)
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), path
        assert page.evaluate("[...document.querySelectorAll('.scroll')].every(e => e.scrollWidth <= e.clientWidth)"), f"{path}: a cut table"
        assert page.evaluate("document.documentElement.scrollHeight") < MAX_PHONE_HEIGHT, path
        assert page.evaluate(CONTRASTS, MIN_CONTRAST) == [], path
        assert page.evaluate(CONTRASTS, 22), "nothing has such a contrast, so that each text was looked at"
        page.close()


@pytest.mark.parametrize("size", [NARROW, LAPTOP], ids=["390", "1440"])
def test_a_saved_report_of_a_long_run_is_short_and_nothing_of_it_is_cut(tmp_path: Path, look: Look, size: dict[str, int]) -> None:
    recorded(tmp_path / "looks")
    with (tmp_path / "looks" / "metrics.jsonl").open("a") as journal:
        for step in range(7, 47):
            alarm = {
                "kind": "alarm",
                "version": step,
                "step": step,
                "seconds": step,
                "name": "failures",
                "text": "8 of 9 got no reward; mend it",
            }
            journal.write(step_line(step, 0.5) + score_line(step, 0.4) + json.dumps(alarm) + "\n")
    summary = {
        "steps": 46,
        "version": 46,
        "peak_memory_mb": 512.0,
        "training_seconds": 80.0,
        "failures": {"ZeroDivisionError": 12, "TimeoutError": 7, "EnvironmentFailed": 1},
        "advice": "the trainer is idle 60%: more engine.count, while cores are free, or shorter answers",
        "waits": {"trainer for generation": 30.0, "admission for trainer": 20.0, "engine0 for requests": 10.0},
    }
    (tmp_path / "looks" / "summary.json").write_text(json.dumps(summary))
    out = tmp_path / "report.html"
    write_report([tmp_path / "looks"], out)
    page = look(f"data:text/html;base64,{base64.b64encode(out.read_bytes()).decode()}", size=size)
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.evaluate("[...document.querySelectorAll('.scroll')].every(e => e.scrollWidth <= e.clientWidth)"), "a cut table"
    assert page.evaluate("document.documentElement.scrollHeight") < MAX_PHONE_HEIGHT
    assert page.evaluate(CONTRASTS, MIN_CONTRAST) == []
    shown = "[...document.querySelectorAll('.cards td:empty')].filter(e => e.dataset.label && e.getClientRects().length).length"
    assert size != NARROW or page.evaluate(shown) == 0, "a label of nothing"
    facts = page.locator(".facts")
    assert summary["advice"] in facts.inner_text() and "ZeroDivisionError" in facts.inner_text()
    assert page.evaluate("document.querySelector('.facts').getBoundingClientRect().height") < NARROW["height"]


def test_a_phone_shows_every_reward_of_a_group(address: str, look: Look) -> None:
    page = opened(look, f"{address}/run/looks/groups?sort=oldest", size=NARROW)
    cells = page.locator('[data-test="group 0-0-0"] .cells a')
    expect(cells).to_have_count(8)
    for at in range(8):
        box = cells.nth(at).bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= NARROW["width"]
    assert cells.nth(0).inner_text() == "✕" and "ZeroDivisionError" in (cells.nth(0).get_attribute("aria-label") or "")
    assert (cells.nth(7).get_attribute("data-tip") or "").startswith("sample 7: 1.000, right 1.000")
    colours = {cells.nth(at).evaluate("e => getComputedStyle(e).backgroundColor") for at in range(1, 8)}
    assert len(colours) == 7, "a colour for each reward"
    cells.nth(7).focus()
    assert "1.000" in cells.nth(7).evaluate("e => getComputedStyle(e, '::after').content")


def test_a_version_has_one_colour_on_every_page(address: str, look: Look) -> None:
    def colours(path: str) -> dict[str, str]:
        page = opened(look, f"{address}/run/looks/{path}")
        page.locator("[data-version]").first.wait_for()
        pairs = page.evaluate(
            "[...document.querySelectorAll('[data-version]')].map(e => [e.dataset.version, getComputedStyle(e).backgroundColor])"
        )
        found: dict[str, set[str]] = {}
        for version, colour in pairs:
            found.setdefault(version, set()).add(colour)
        assert all(len(those) == 1 for those in found.values()), f"{path}: {found}"
        return {version: those.pop() for version, those in found.items()}

    groups, time = colours("groups?fate=trained"), colours("time")
    assert groups == time and len(set(groups.values())) == 6, "versions near each other differ"
    page = opened(look, f"{address}/run/looks/conversation?epoch=0&position=3&attempt=0&sample=1&color=version")
    token = page.locator('[data-test="tokens"] span.t').first
    expect(token).to_be_visible()
    tint = token.evaluate("e => getComputedStyle(e).backgroundColor")
    assert groups["3"].removeprefix("rgb(").removesuffix(")") in tint, "tokens that version 3 wrote"


def test_the_reward_is_drawn_on_the_first_screen_of_a_laptop_above_the_figures(address: str, look: Look) -> None:
    page = opened(look, f"{address}/run/looks/run", size=LAPTOP)
    reward = page.locator('[data-test="chart Reward by source"] svg').first
    expect(reward).to_be_visible()
    top = "e => e.getBoundingClientRect().top"
    drawn = reward.evaluate(top)
    figures = page.locator(".facts").first.evaluate(top)
    assert drawn < LAPTOP["height"] and drawn < figures


def test_no_choice_of_the_groups_is_cut_on_a_laptop(address: str, look: Look) -> None:
    page = opened(look, f"{address}/run/looks/groups?sort=spread", size=LAPTOP)
    narrow = """[...document.querySelectorAll('.filters select')].filter(e => {
        const shown = document.createElement('span'); shown.textContent = e.selectedOptions[0].textContent;
        shown.style.font = getComputedStyle(e).font; document.body.append(shown);
        const text = shown.getBoundingClientRect().width; shown.remove();
        return text + 30 > e.clientWidth;
    }).length"""
    assert page.evaluate(narrow) == 0


def test_the_lead_has_scores_reward_verdict_and_no_alarm_is_hidden(address: str, look: Look) -> None:
    page = opened(look, f"{address}/run/looks/run")
    lead = page.locator(".lead").first.inner_text()
    assert "held-out sums" in lead and "+0.250" in lead and "0.100 → 0.350" in lead and "reward, last step" in lead and "verdict" in lead
    places = page.evaluate(
        "['.lead', 'table[data-test=alarms]', '.charts'].map(s => document.querySelector(s).getBoundingClientRect().top)"
    )
    assert places == sorted(places) and places[1] < 900, "first the score, then what is wrong, then charts"


@pytest.mark.parametrize("path", ["/no/such/place", "/run/nope/run", "/run/looks/nothing", "/groups"])
def test_an_address_that_is_not_known_leads_home(address: str, look: Look, path: str) -> None:
    asked = urllib.request.Request(address + path, headers={"accept": "text/html"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(asked)
    assert refused.value.code == 404
    page = opened(look, address + path)
    page.locator('[data-test="home"]').click()
    expect(page.locator('table[data-test="runs"]')).to_be_visible()

"""The viewer in a real browser: its numbers, following a run that goes on, and what it says where there is nothing to show."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect
from tests.archive.test_runs import made_run, score_line, step_line
from tests.view.conftest import NARROW, PATIENCE, WIDE, viewing

expect.set_options(timeout=PATIENCE)
Look = Callable[..., Page]


def alarm_line(step: int, text: str) -> str:
    return json.dumps({"kind": "alarm", "version": step, "step": step, "seconds": float(step), "name": "failures", "text": text}) + "\n"


def failed_step(step: int, **failures: int) -> str:
    return json.dumps({**json.loads(step_line(step, 0.5)), "failures": failures}) + "\n"


def timeline(folder: Path, *lines: dict[str, object]) -> None:
    (folder / "timeline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def rollout_line(began: float, ended: float, *, failure: str | None = None, source: str = "sums") -> dict[str, object]:
    turn = {"began": began + 0.25, "ended": ended, "placed": [["engine0", began + 0.25]], "sampled": [[0, began + 0.5]], "num_tokens": 5}
    reward = None if failure else 1.0
    line = {"kind": "rollout", "key": [0, 1, 0, 0], "source": source, "began": began, "ended": ended, "reward": reward, "num_tokens": 5}
    return {**line, "turns": [turn], "of": "training", "failure": failure}


def value(page: Page, name: str) -> str:
    return page.locator(f'[data-test="{name}"]').first.inner_text()


def cells(row: Locator) -> list[str]:
    return [text.strip() for text in row.locator("td").all_inner_texts()]


def test_a_page_shows_the_runs_numbers_as_text_with_three_decimals(tmp_path: Path, look: Look) -> None:
    folder = made_run(tmp_path / "a", score_line(0, 0.25), step_line(1, 0.125), step_line(2, 2 / 3), score_line(2, 0.75))
    timeline(folder, rollout_line(0.0, 1.0), {"kind": "step", "lease": 1, "version": 1, "began": 0.0, "ended": 2.0, "num_tokens": 9})
    with viewing(folder) as address:
        page = look(address)
        assert (value(page, "state"), value(page, "steps"), value(page, "reward, last step")) == ("stopped", "2 of 4", "0.667")
        assert value(page, "held-out sums") == "0.250 → 0.750 (8 tasks)"
        assert "generating 0.500 s (50%); waiting for a first token 0.250 s (25%); environment 0.250 s (25%)" in page.inner_text(".page")
        expect(page.locator('[data-test="chart Reward by source"] svg')).to_be_visible()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_scores_and_links_are_there_before_a_program_of_the_page_runs(tmp_path: Path, chromium: Browser, dark: bool) -> None:
    folder = made_run(tmp_path / "a", score_line(0, 0.25), failed_step(2, ZeroDivisionError=3), score_line(2, 0.75))
    with viewing(folder) as address:
        context = chromium.new_context(java_script_enabled=False, color_scheme="dark" if dark else "light")
        page = context.new_page()
        page.goto(address)
        assert value(page, "held-out sums") == "0.250 → 0.750 (8 tasks)"
        assert page.locator("body > #app > div").first.evaluate("e => getComputedStyle(e).backgroundColor") == (
            "rgb(15, 18, 21)" if dark else "rgb(246, 247, 248)"
        )
        page.locator('table[data-test="failures"] a').first.click()
        page.wait_for_url("**/groups?failure=ZeroDivisionError**")
        context.close()


def test_a_page_takes_the_place_of_what_was_shown_before_its_programs(tmp_path: Path, look: Look) -> None:
    with viewing(made_run(tmp_path / "a", score_line(0, 0.25), step_line(1, 0.5))) as address:
        page = look(address)
        expect(page.locator('[data-test="chart Reward by source"] svg')).to_be_visible()
        assert page.locator(".page").count() == 1 and page.locator(".shown").count() == 0


def test_a_page_follows_a_run_and_survives_its_restart(tmp_path: Path, look: Look) -> None:
    folder = made_run(tmp_path / "a", step_line(1, 0.25))
    with viewing(folder) as address:
        page = look(address)
        expect(page.locator('[data-test="steps"]')).to_have_text("1 of 4")
        with (folder / "metrics.jsonl").open("a") as journal:
            journal.write(step_line(2, 0.5) + step_line(3, 0.875))
        expect(page.locator('[data-test="reward, last step"]')).to_have_text("0.875")
        (folder / "new").write_text(step_line(1, 0.25) + step_line(2, 0.625))  # step 3 was lost in a crash
        (folder / "new").replace(folder / "metrics.jsonl")
        expect(page.locator('[data-test="steps"]')).to_have_text("2 of 4")
        expect(page.locator('[data-test="reward, last step"]')).to_have_text("0.625")
        (folder / "summary.json").write_text(
            '{"steps": 2, "version": 2, "seconds": 75.0, "peak_memory_mb": 1234.5}'
        )  # no line comes with it
        expect(page.locator('[data-test="time"]')).to_have_text("1 min 15 s")
        expect(page.locator('[data-test="peak memory"]')).to_have_text("1,234 MB")


def test_what_fails_is_found_with_its_environment_its_step_and_what_to_do(tmp_path: Path, look: Look) -> None:
    advice = "8 of the last 9 rollouts got no reward; mend the environment"
    folder = made_run(tmp_path / "a", step_line(1, 0.5), failed_step(2, ZeroDivisionError=3), alarm_line(2, advice))
    timeline(folder, rollout_line(0.0, 1.0, source="words"), *(rollout_line(1.0, 2.0, failure="ZeroDivisionError") for _ in range(3)))
    with viewing(folder) as address:
        page = look(address)
        rows = page.locator('table[data-test="failures"] tbody tr')
        expect(rows).to_have_count(1)
        assert cells(rows.first) == ["sums", "ZeroDivisionError", "3 of 3 tries", "step 2 (3)"]
        assert (
            page.locator('table[data-test="failures"] a').first.get_attribute("href")
            == "/run/a/groups?failure=ZeroDivisionError&source=sums"
        )
        assert advice in page.locator('table[data-test="alarms"]').inner_text()


def test_failures_are_those_of_all_steps_where_no_timeline_tells_them_by_environment(tmp_path: Path, look: Look) -> None:
    folder = made_run(tmp_path / "a", failed_step(1, KeyError=4), failed_step(2, KeyError=3), step_line(3, 0.5))
    with viewing(folder) as address:
        rows = look(address).locator('table[data-test="failures"] tbody tr')
        expect(rows).to_have_count(1)
        assert cells(rows.first) == ["all sources", "KeyError", "7 tries", "step 1 (4)"]


def test_the_time_page_says_who_was_busy_when_and_leads_to_the_groups_of_a_step(tmp_path: Path, look: Look) -> None:
    measured = {**json.loads(step_line(1, 0.5)), "waits": {"trainer for generation": 1.5}, "training_seconds": 3.0}
    folder = made_run(tmp_path / "a", json.dumps(measured) + "\n")
    wait = {"kind": "wait", "who": "trainer", "for_whom": "generation", "began": 0.0, "ended": 1.5}
    timeline(folder, rollout_line(0.0, 2.0), wait, {"kind": "step", "lease": 1, "version": 1, "began": 1.5, "ended": 4.5, "num_tokens": 9})
    with viewing(folder) as address:
        page = look(f"{address}/run/a/time")
        expect(page.locator('[data-test="chart time"] .ytick text')).to_have_text(["trainer waits", "trainer", "engine0"])
        assert cells(page.locator('table[data-test="waits"] tbody tr')) == ["trainer", "generation", "2 s", "50%", "1.500 s"]
        assert page.locator('table[data-test="steps"] a').get_attribute("href") == "/run/a/groups?step=1"


def test_a_long_run_is_gone_through_part_by_part_by_links_seconds_and_steps(tmp_path: Path, look: Look) -> None:
    """30 000 rollouts and 300 steps, one a minute: more than is read at once."""
    folder = made_run(tmp_path / "a", *(step_line(number, 0.5, seconds=60.0) for number in range(1, 301)))
    lines: list[dict[str, object]] = []
    for number in range(1, 301):
        lines += [rollout_line(60.0 * number - 50 + n / 10, 60.0 * number - 40 + n / 10) for n in range(100)]
        lines.append({"kind": "step", "lease": 1, "version": number, "began": 60.0 * number - 5, "ended": 60.0 * number, "num_tokens": 9})
    timeline(folder, *lines)
    with viewing(folder) as address:
        page = look(f"{address}/run/a/time")
        steps = page.locator('table[data-test="steps"] tbody tr')
        expect(steps.first).to_contain_text("step 300")
        page.locator('[data-test="earlier"]').click()
        expect(steps.first).not_to_contain_text("step 300")
        page.locator('[data-test="newest"]').click()
        expect(steps.first).to_contain_text("step 300")
        page.locator('input[name="step"]').fill("7")
        page.keyboard.press("Enter")
        expect(page.locator('[data-test="later"]')).to_be_visible()
        page.goto(f"{address}/run/a/time?from=0")
        expect(page.locator('[data-test="earlier"]')).to_have_count(0)
        assert "there is no step '999'" in value(look(f"{address}/run/a/time?step=999"), "problem")


def test_several_runs_are_listed_and_seeds_become_one_line_in_a_band(tmp_path: Path, look: Look) -> None:
    for seed in (0, 1):
        made_run(tmp_path / f"seed{seed}", step_line(1, 0.5), step_line(2, 0.25 + 0.5 * seed), options=f"steps = 4\nseed = {seed}")
    made_run(tmp_path / "other", step_line(1, 0.125), options="steps = 8")
    with viewing(tmp_path) as address:
        page = look(address)
        expect(page.locator('table[data-test="runs"] tbody tr')).to_have_count(3)
        page.locator('[data-test="overlay"]').click()
        expect(page.locator(".page")).to_contain_text("other 0.125, seed0 and 1 more seeds 0.500")
        assert page.locator('table[data-test="differences"] td').first.inner_text() == "run.steps"


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["1280", "390"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_pages_fit_the_window_and_every_link_is_reached_by_the_keyboard(
    tmp_path: Path, look: Look, size: dict[str, int], dark: bool
) -> None:
    folder = made_run(tmp_path / "a-run-with-quite-a-long-name-for-a-small-window", score_line(0, 0.25), step_line(1, 0.5))
    timeline(folder, rollout_line(0.0, 2.0), {"kind": "step", "lease": 1, "version": 1, "began": 1.5, "ended": 4.5, "num_tokens": 9})
    with viewing(folder) as address:
        for part in ("run", "time"):
            page = look(f"{address}/run/{folder.name}/{part}", size=size, dark=dark)
            page.locator(".page").wait_for()
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert page.evaluate("document.body.classList.contains('body--dark')") == dark
            reached: set[str] = set()
            for _ in range(3 * page.locator("nav a").count()):  # a page that is still being put together takes the focus away
                page.keyboard.press("Tab")
                reached.add(page.evaluate("document.activeElement.getAttribute('data-test') || document.activeElement.tagName"))
                if {"menu run", "menu time", "look dark"} <= reached:
                    break
            assert {"menu run", "menu time", "look dark"} <= reached


def test_what_cannot_be_shown_is_said_on_a_phone_too(tmp_path: Path, look: Look) -> None:
    name = "a-run-with-quite-a-long-name-for-a-small-window"
    folder = made_run(tmp_path / name, step_line(1, 0.5))
    with viewing(folder) as address:
        for path, said in (
            ("nope/run", "there is no run 'nope' here"),
            (f"{name}/nothing", "there is no page 'nothing'"),
            (f"{name}/groups", "has no rollouts"),
            (f"{name}/groups?kind=evaluation", "no conversations of evaluations"),
            (f"{name}/groups?kind=other", "are not shown"),
            (f"{name}/time?from=x", "is a number of seconds"),
        ):
            page = look(f"{address}/run/{path}", size=NARROW)
            expect(page.locator('[data-test="problem"]')).to_contain_text(said)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path


def test_what_cannot_be_shown_is_said_on_a_page(tmp_path: Path, look: Look) -> None:
    folders = [made_run(tmp_path / name, step_line(1, 0.5)) for name in ("a", "b")]
    with viewing(*folders) as address, viewing(*folders) as second:  # two viewers of one run
        assert value(look(f"{address}/run/nope/run"), "problem").startswith("there is no run 'nope' here")
        assert "there is no page 'nothing'" in value(look(f"{address}/run/a/nothing"), "problem")
        page = look(f"{second}/run/b/run")
        expect(page.locator('[data-test="steps"]')).to_have_text("1 of 4")
        shutil.rmtree(folders[1])
        expect(page.locator('[data-test="problem"]')).to_contain_text("was deleted or moved")
        assert "there is no run 'b' here" in value(look(f"{address}/run/b/run"), "problem")
        assert value(look(f"{address}/run/a/run"), "steps") == "1 of 4"

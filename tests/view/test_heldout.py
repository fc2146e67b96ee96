"""What the model said to held-out tasks, from a run's page to the tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page, expect
from tests.archive.test_heldout import folder as folder
from tests.view.conftest import PATIENCE, viewing

expect.set_options(timeout=PATIENCE)


def test_held_out_conversations_are_reached_from_the_runs_page_and_filtered_by_their_kind(folder: Path, look: Callable[..., Page]) -> None:
    with viewing(folder) as address:
        page = look(address + "/")
        page.locator('[data-test="held out groups"]').click()
        expect(page.locator('[data-test="counted"]')).to_have_text("groups 1 to 4 of 4")
        expect(page.locator("table.groups th").nth(3)).to_have_text("passed, by version")
        answered = page.locator('[data-test="group 7-0-0"] td.fate')
        assert answered.locator(".tag").get_attribute("title") == "held out, answered by version 7"
        expect(answered).to_contain_text("version 7")
        page.locator('[data-test="words"]').fill("apple")
        page.keyboard.press("Enter")
        expect(page.locator('[data-test="counted"]')).to_have_text("groups 1 to 2 of 2")
        page.locator('[data-test="rollout evaluation-7-0-0-0"]').click()
        expect(page.locator('[data-test="assistant"]')).to_contain_text("apple 7")
        expect(page.locator('[data-test="difference"]')).to_contain_text("tokens: held out")
        page.go_back()
        page.locator('[data-test="kind"]').select_option("training")
        page.locator('[data-test="words"]').fill("")
        page.locator('[data-test="filter"]').click()
        expect(page.locator('[data-test="counted"]')).to_have_text("groups 1 to 1 of 1")

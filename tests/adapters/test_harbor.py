"""Tasks in Harbor's folders: the agent works in a box, tests score what it left there, and what cannot be played is refused by name."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from midflight.adapters import harbor
from midflight.errors import BadReward, ConfigError, EnvironmentFailed, SandboxUnavailable
from midflight.types import Result, Task

from .test_games import Speaker

COPIES = "# what it begins with\nFROM ubuntu:24.04\nWORKDIR /app\nCOPY data/ ./data\nCOPY data/*.txt \\\n  /opt/given/\n"
TESTED = 'test "$(cat /app/answer.txt)" = 42 && echo {} > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt'


def folder(at: Path, tests: str | None = TESTED.format(1.0), dockerfile: str = COPIES, options: str = "") -> Path:
    """One task, and what it is in."""
    made = at / "answer"
    for name in ("environment/data", "tests", "solution"):
        (made / name).mkdir(parents=True)
    (made / "instruction.md").write_text("Write 42 into answer.txt.")
    (made / "task.toml").write_text('schema_version = "1.1"\n' + options)
    (made / "environment" / "Dockerfile").write_text(dockerfile)
    (made / "environment" / "data" / "a.txt").write_text("42")
    if tests is not None:
        (made / "tests" / "test.sh").write_text(tests)
    return at


def told(path: Path, **options: Any) -> Task:
    try:
        (row,) = harbor.tasks(str(path), **options)
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    return Task("0", "harbor", row)


def played(path: Path, *said: str, **options: Any) -> Result:
    try:
        return asyncio.run(harbor.play(told(path, **options), Speaker(*said)))
    except SandboxUnavailable as error:
        pytest.skip(str(error))


def test_what_scripts_leave_is_scored_by_the_tests_and_each_says_what_it_printed(tmp_path: Path) -> None:
    speaker = Speaker("I look.\n```bash\nls -d data/* /opt/given/* /tests; pwd\n```", "```\nmv data/a.txt answer.txt\n```", "Done.")
    try:
        result = asyncio.run(harbor.play(told(folder(tmp_path)), speaker))
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    assert (result.reward, result.components) == (1.0, {"reward": 1.0})
    assert "Write 42 into answer.txt." in speaker.seen[0][0]["content"]
    shown = speaker.seen[1][-1]["content"]
    assert shown.startswith("/opt/given/a.txt\n/tests\ndata/a.txt\n/app\n") and shown.endswith("(exit status 0)")


def test_an_agent_that_does_nothing_gets_what_the_tests_give_for_that(tmp_path: Path) -> None:
    assert played(folder(tmp_path), "I can't.").reward == 0.0


def test_what_a_script_leaves_in_place_of_the_tests_is_not_their_reward(tmp_path: Path) -> None:
    lied = (
        "```bash\necho 1 > /logs/reward.txt; mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo exit > /tests/test.sh\n```"
    )
    assert played(folder(tmp_path), lied, "Done.").reward == 0.0


@pytest.mark.parametrize(("written", "reward"), [('{"style": 0.25, "works": 1}', 1.25), ('{"style": 0.25, "reward": 0.5}', 0.5)])
def test_the_parts_of_a_reward_are_its_components(tmp_path: Path, written: str, reward: float) -> None:
    result = played(folder(tmp_path, f"echo '{written}' > /logs/verifier/reward.json"), "Done.")
    assert result.reward == reward and result.components["style"] == 0.25


def test_an_agent_of_ones_own_gets_the_box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "harbor_agent.py").write_text("async def work(task, client, box):\n    await box.run(['tee', 'answer.txt'], stdin='42')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert played(folder(tmp_path / "tasks"), agent="harbor_agent:work").reward == 1.0


def test_variables_of_the_tests_are_theirs_and_their_seconds_too(tmp_path: Path) -> None:
    options = '[verifier]\nenv = { WORTH = "0.5" }\n'
    assert played(folder(tmp_path / "a", "echo $WORTH > /logs/verifier/reward.txt", options=options), "").reward == 0.5
    options = "verifier.timeout_sec = 0.5\n"
    with pytest.raises(EnvironmentFailed, match=r"task 0 of harbor \(answer\): its tests were ended by their limit of time"):
        played(folder(tmp_path / "b", "sleep 77.5", options=options), "")


# --- What cannot be scored --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tests", "error", "said"),
    [
        ("echo oh; exit 1", EnvironmentFailed, r"wrote neither reward.txt nor reward.json.*oh"),
        ("echo yes > /logs/verifier/reward.txt", BadReward, r"'yes', expected a finite number"),
        ("echo nan > /logs/verifier/reward.txt", BadReward, r"'nan', expected a finite number"),
        ('echo \'{"a": "b"}\' > /logs/verifier/reward.json', BadReward, r"the reward 'a' was 'b', expected a finite"),
        ("echo '[1]' > /logs/verifier/reward.json", EnvironmentFailed, r"was '\[1\]', expected an object of numbers"),
        ("echo '{}' > /logs/verifier/reward.json", EnvironmentFailed, r"was '{}', expected an object of numbers"),
    ],
)
def test_a_reward_that_is_no_number_fails_the_rollout(tmp_path: Path, tests: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=f"(?s){said}"):
        played(folder(tmp_path, tests), "Done.")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tests": None}, r"answer has no tests/test.sh, so nothing scores it"),
        (
            {"dockerfile": "FROM a\nRUN apt-get update\n"},
            r"'RUN apt-get update'.*takes a container: play it with sandbox = \{ kind = \"docker\"",
        ),
        ({"dockerfile": "FROM a\nCOPY --from=b x /app/\n"}, r"'COPY --from=b x /app/'.*takes a container"),
        ({"dockerfile": "FROM a\nCOPY data /usr/share/\n"}, r"puts files into /usr, which is the system's here"),
        ({"dockerfile": "FROM a\nCOPY nothing /app/\n"}, r"copies 'nothing', which is not there"),
        ({"options": '[environment]\ndocker_image = "a/b"\n'}, r"'docker_image = a/b'.*takes a container"),
        ({"options": "[environment]\ngpus = 1\n"}, r"several steps, several containers, or a GPU"),
        ({"options": '[verifier]\nenv = { KEY = "${KEY}" }\n'}, r"wants KEY of our environment"),
        ({"options": "[verifier\n"}, r"task.toml that cannot be read"),
    ],
)
def test_a_task_that_cannot_be_played_here_is_refused_by_name(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        harbor.tasks(str(folder(tmp_path, **changed)))


def test_a_folder_without_tasks_and_a_sandbox_without_boxes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        harbor.tasks(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"has a task\.toml"):
        harbor.tasks(str(tmp_path))
    with pytest.raises(ConfigError, match="need a sandbox with boxes"):
        played(folder(tmp_path), "", sandbox={"kind": "trusted"})

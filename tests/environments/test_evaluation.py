"""Evaluation: each task once, by source, with failures counted and never scored."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace
from tests.facts import Facts

from midflight.environments.evaluation import UNFINISHED, Evaluator, SourceScore, evaluation_key
from midflight.environments.single_turn import answer
from midflight.testing.virtual_time import run_virtual
from midflight.types import Kind
from midflight.types.facts import EvaluationKept

from .fakes import FakeClient, Rig, task

TASKS = [
    task(0),
    task(1, question="q", answer="other"),
    task(2, source="sums", question="q", answer="olleh"),
    task(3, source="sums", question="q"),
]


MIXED = "asked of version 7 alone, it was answered by version 7, 8"


def evaluate(rig: Rig, tasks=TASKS, *, slots: int = 64):
    evaluator = Evaluator(rollouts=rig.runner(tracked=False), slots=asyncio.Semaphore(slots), record=rig.observer.apply)
    return run_virtual(lambda: evaluator.run(tasks, version=7))


def test_i10_scores_are_by_source_and_failures_are_counted_beside_them():
    scores = evaluate(Rig(answer))
    assert scores == (SourceScore("spell", 0.5, 2, 0), SourceScore("sums", 1.0, 1, 1, scores[1].error))
    assert "TaskFieldMissing" in scores[1].error
    assert scores[1].num_tasks == 2


def test_evaluations_are_untracked_and_leave_no_fate():
    rig = Rig(answer)
    evaluate(rig)
    assert not any(session.tracked for session in rig.sessions.opened)
    assert not rig.fates.masked and not rig.fates.dropped and not rig.fates.discarded


def test_two_evaluations_use_the_same_keys_and_training_never_does():
    first, second = Rig(answer), Rig(answer)
    evaluate(first)
    evaluate(second)
    assert [s.key for s in first.sessions.opened] == [s.key for s in second.sessions.opened] == [evaluation_key(i) for i in range(4)]
    assert {s.key.kind for s in first.sessions.opened} == {Kind.EVALUATION}


def test_concurrency_is_bounded():
    rig = Rig(answer)
    evaluate(rig, [task(i) for i in range(20)], slots=3)
    assert rig.sessions.most_open == 3


def test_results_are_observed_with_their_version_and_what_has_failed():
    rig = Rig(answer, client=FakeClient("olleh"))
    scores = evaluate(rig, [task(0), task(1, source="empty", question="q")])
    assert scores[1] == SourceScore("empty", None, 0, 1, scores[1].error)
    scored, failed = rig.observer.evaluations
    assert (scored.version, scored.source, scored.num_tasks, scored.mean_reward, scored.num_failed) == (
        7,
        "spell",
        1,
        pytest.approx(1.0),
        0,
    )
    assert (failed.source, failed.num_tasks, failed.mean_reward, failed.num_failed) == ("empty", 0, None, 1) and failed.error


def test_what_is_unfinished_when_an_evaluation_is_over_has_failed_and_says_why():
    """Answers take a second: two of four are there, one is under way, one has no slot yet."""
    rig = Rig(answer)

    async def main():
        over = asyncio.Event()
        asyncio.get_running_loop().call_later(2.5, over.set)
        evaluator = Evaluator(rollouts=rig.runner(tracked=False), slots=asyncio.Semaphore(1), record=rig.observer.apply)
        scores = await evaluator.run([task(i) for i in range(4)], version=7, over=over)
        assert asyncio.get_running_loop().time() == pytest.approx(2.5)
        return scores

    assert run_virtual(main) == (SourceScore("spell", 1.0, 2, 2, UNFINISHED),)
    assert not rig.sessions.open_now
    unfinished = [r for r in rig.observer.rollouts if r.reward is None]
    assert [r.key for r in unfinished] == [evaluation_key(2), evaluation_key(3)]


def test_a_task_that_several_versions_answered_is_not_scored():
    rig = Rig(answer)
    close = rig.sessions.close
    rig.sessions.close = lambda session_id: replace(close(session_id), versions=frozenset({7, 8} if session_id == "s1" else {7}))
    assert evaluate(rig, [task(i) for i in range(3)]) == (SourceScore("spell", 1.0, 2, 1, MIXED),)
    assert [r.error for r in rig.observer.rollouts if r.error] == [MIXED]


def test_the_first_tasks_of_each_source_are_kept_with_what_was_said_and_the_version_that_said_it():
    rig, facts = Rig(answer), Facts()
    evaluator = Evaluator(rollouts=rig.runner(tracked=False), slots=asyncio.Semaphore(64), record=facts.apply, keep=1)
    run_virtual(lambda: evaluator.run(TASKS, version=7))
    kept = facts.of(EvaluationKept)
    assert sorted((fact.version, fact.task.id, fact.trajectory.key) for fact in kept) == [
        (7, TASKS[at].id, evaluation_key(at)) for at in (0, 2)
    ]

"""What the launcher finds to stand still, and what a part says of itself. No processes, no waiting."""

from __future__ import annotations

import asyncio
import time

import msgspec

from midflight.observe.activity import ProcessWork
from midflight.run.heartbeat import ENDLESS, Absence, Beat, Doing, Heartbeat, LoopReport
from midflight.run.launcher.watchdog import HungProcess, Watchdog
from midflight.run.parts import decode_message, encode

STALL = 10.0


class Ring:
    """Parts that beat every second unless told otherwise, on a clock of its own."""

    def __init__(self, *parts: str) -> None:
        self.now = 1000.0
        self.states = dict.fromkeys(parts, "S")
        self.cpu = dict.fromkeys(parts, 0.0)
        self.beats = {name: Beat(self.now) for name in parts}
        self.silent, self.blocked, self.computing = set[str](), set[str](), set[str]()
        self.num_bytes = dict.fromkeys(parts, 0)
        self.reading = set[str]()
        names = list(parts)
        self.dog = Watchdog(
            stall_seconds=STALL,
            work=lambda pid: ProcessWork(self.cpu[names[pid]], self.num_bytes[names[pid]], self.states[names[pid]]),
            clock=lambda: self.now,
        )
        for pid, name in enumerate(names):
            self.dog.begin(name, pid)

    def does(self, part: str, *doing: Doing, absences: tuple[Absence, ...] = ()) -> None:
        self.beats[part] = Beat(self.now, doing, absences)

    def pass_time(self, seconds: int) -> list[HungProcess]:
        """What is found by then; nothing is ended."""
        found: list[HungProcess] = []
        for _ in range(seconds):
            self.now += 1
            for name, beat in self.beats.items():
                self.cpu[name] += 1.0 if name in self.computing else 0.0
                self.num_bytes[name] += 1_000_000 if name in self.reading else 500
                if name not in self.silent:
                    turned = beat.turned if name in self.blocked else self.now
                    self.dog.hear(name, Beat(turned, beat.doing, beat.absences, cpu_seconds=beat.cpu_seconds))
            found.extend(self.dog.look())
        return found


def doing(what: str = "works", since: float = 1000.0, **more: object) -> Doing:
    return Doing(what, since, **more)  # type: ignore[arg-type]


def test_a_ring_that_beats_hides_nothing() -> None:
    ring = Ring("trainer", "rollout", "engine0")
    assert not ring.pass_time(100) and not ring.dog.due()


def test_a_stopped_process_is_named_after_the_stall_seconds_whatever_it_was_doing() -> None:
    ring = Ring("trainer", "engine0")
    ring.does("trainer", doing(limit=600.0, heavy=True))
    ring.silent.add("trainer")
    ring.states["trainer"] = "T"
    assert not ring.pass_time(int(STALL) - 1)
    (hung,) = ring.pass_time(1)
    assert hung.name == "trainer" and hung.stopped and "is stopped (SIGSTOP) since 10 s" in hung.why


def test_a_process_under_a_debugger_is_left_alone() -> None:
    ring = Ring("engine0")
    ring.silent.add("engine0")
    ring.states["engine0"] = "t"
    assert not ring.pass_time(100)


def test_a_silent_process_may_be_silent_for_as_long_as_it_may_hold_the_interpreter() -> None:
    ring = Ring("engine0")
    ring.pass_time(1)
    ring.does("engine0", doing("loads its model", limit=30.0, heavy=True))
    ring.pass_time(1)
    ring.silent.add("engine0")
    assert not ring.pass_time(29)
    assert "was not heard of for 30 s" in ring.pass_time(1)[0].why


def test_a_blocked_loop_is_told_from_a_silent_process() -> None:
    ring = Ring("rollout")
    ring.does("rollout", doing("runs rollout 0.1", limit=3600.0))
    ring.blocked.add("rollout")
    assert not ring.pass_time(9)
    (hung,) = ring.pass_time(1)
    assert "rollout's event loop is blocked since 10 s" in hung.why and not hung.stopped


def test_a_step_may_last_as_long_as_it_computes_and_no_longer() -> None:
    ring = Ring("trainer")
    ring.does("trainer", doing("makes version 3", computes=True))
    ring.computing.add("trainer")
    assert not ring.pass_time(1000)
    ring.computing.clear()
    assert not ring.pass_time(11)
    assert "trainer makes version 3 and took no processor time for 12 s" in ring.pass_time(1)[0].why


def test_of_ranks_that_wait_for_a_stopped_one_only_that_is_to_blame() -> None:
    ring = Ring("trainer", "trainer1")
    for name in ("trainer", "trainer1"):
        ring.does(name, doing("makes version 3", computes=True))
    ring.pass_time(1)
    ring.states["trainer1"] = "T"
    ring.silent.add("trainer1")
    assert {hung.name for hung in ring.pass_time(10)} == {"trainer1"}


def test_an_engine_that_stays_in_quarantine_is_named_with_the_reason_and_given_time_after_a_restart() -> None:
    ring = Ring("rollout", "engine0")
    ring.dog.ready("engine0")
    ring.does("rollout", absences=(Absence("engine0", ring.now, "staging version 3: out of memory"),))
    assert not ring.pass_time(9)
    (hung,) = ring.pass_time(1)
    assert (hung.name, hung.why) == ("engine0", "engine0 was in quarantine for 10 s: staging version 3: out of memory")
    ring.dog.end("engine0")
    ring.dog.begin("engine0", 1)
    assert not ring.pass_time(20), "it is coming up"
    ring.dog.ready("engine0")
    assert not ring.pass_time(9) and ring.pass_time(1)


def test_a_gateway_that_is_blocked_or_stopped_knows_nothing_of_engines_any_more() -> None:
    for fault in ("blocked", "silent"):
        ring = Ring("rollout", "engine0")
        ring.dog.ready("engine0")
        ring.does("rollout", absences=(Absence("engine0", ring.now, "this gateway was started again"),))
        ring.pass_time(5)
        ring.beats["rollout"] = Beat(ring.now, (), ring.beats["rollout"].absences)
        getattr(ring, fault).add("rollout")
        assert {hung.name for hung in ring.pass_time(30)} == {"rollout"}


def test_workers_are_watched_and_who_waits_for_one_says_so() -> None:
    ring = Ring("trainer", "rollout", "worker0", "engine0")
    ring.does("trainer", doing("waits for groups of version 3", whom="rollout"))
    ring.does("rollout", doing("admission waits for trainer", whom="trainer"), doing("rollout 0-0-0 waits for worker0", whom="worker0"))
    ring.pass_time(int(STALL))
    assert ring.dog.due() and ring.dog.standstill() == "nothing has moved for 10 s: trainer waits for rollout, which waits for worker0"
    (hung,) = ring.pass_time(2)
    assert hung.name == "worker0" and "the others wait for worker0" in hung.why


def test_a_part_that_is_not_there_is_in_the_report_too() -> None:
    ring = Ring("trainer", "worker0")
    ring.pass_time(1)
    ring.dog.end("worker0")
    ring.pass_time(3)
    assert "worker0: ended 3 s ago, and has not begun again" in ring.dog.report()
    ring.dog.begin("worker0", 1)
    assert "ended" not in ring.dog.report()


def test_a_loop_that_an_agent_holds_is_not_the_launchers_to_judge_but_one_that_nobody_is_known_to_hold_is() -> None:
    ring = Ring("worker0")
    ring.blocked.add("worker0")
    ring.does("worker0", doing("is blocked by the agent of 0-0-0", holds_loop=True))
    assert not ring.pass_time(300)
    ring.silent.add("worker0")
    assert "was not heard of" in ring.pass_time(int(STALL))[0].why, "of the whole process it is"


def test_what_the_rollout_process_asks_for_is_done_and_a_worker_that_is_stopped_is_said_to_be() -> None:
    ring = Ring("worker0")
    ring.dog.condemn("worker0", "its connection is lost")
    assert [hung.why for hung in ring.pass_time(1)] == ["its connection is lost"]
    ring.states["worker0"] = "T"
    assert [hung.stopped for hung in ring.pass_time(1)] == [True]


def test_a_worker_on_another_machine_is_stopped_when_that_machine_says_so() -> None:
    ring = Ring()
    ring.dog.begin("worker0", None)
    ring.dog.see("worker0", "S")
    ring.dog.hear("worker0", Beat(5.0, at=5.0))
    ring.dog.see("worker0", "T")
    assert not ring.pass_time(9)
    (hung,) = ring.pass_time(1)
    assert hung.stopped and "worker0 is stopped (SIGSTOP)" in hung.why


def test_beats_that_come_late_because_the_machine_is_busy_move_the_bound_by_as_much() -> None:
    ring = Ring("trainer", "engine0", "worker0")
    late = {"trainer": 6, "engine0": 5, "worker0": 4}
    for second in range(1, 200):
        ring.now += 1
        for name, seconds in late.items():
            if second % (seconds + 1) == 0:
                ring.dog.hear(name, Beat(ring.now))
        assert not ring.dog.look()
    ring.silent.update(late)
    silences: dict[str, str] = {}
    for hung in ring.pass_time(40):
        silences.setdefault(hung.name, hung.why)
    for name, seconds in late.items():
        assert f"{name} was not heard of for {STALL + seconds:.0f} s" in silences[name]


def test_a_launcher_that_looks_late_all_the_time_still_finds_who_is_stopped() -> None:
    """An earlier one excused everybody after each late look, and so found nobody for as long as the machine was busy."""
    ring = Ring("trainer", "worker0")
    ring.silent.add("worker0")
    ring.states["worker0"] = "T"
    found: list[HungProcess] = []
    while not found and ring.now < 1100:
        ring.now += 3
        ring.dog.hear("trainer", Beat(ring.now))
        found = [*ring.dog.look()]
    assert [hung.name for hung in found] == ["worker0"] and ring.now - 1000 <= STALL + 2 + 3


def test_when_nothing_moves_the_report_says_who_waits_and_the_last_of_them_is_to_blame() -> None:
    ring = Ring("trainer", "rollout", "engine0")
    ring.does("trainer", doing("waits for the batch of version 3", whom="rollout"))
    ring.dog.progress("step 3")
    assert not ring.pass_time(9) and not ring.dog.due()
    ring.pass_time(1)
    assert ring.dog.due() and not ring.dog.due(), "said once, then after twice the time"
    assert "trainer: last heard of 0 s ago\n    waits for the batch of version 3, since 10 s" in ring.dog.report()
    (hung,) = ring.pass_time(2)
    assert hung.name == "rollout" and "nothing has moved for 12 s" in hung.why


def test_what_has_time_left_excuses_a_standstill_but_not_the_report_of_it() -> None:
    for excuse in (doing("runs rollout 0.1", limit=3600.0), doing("stands paused by the operator", limit=ENDLESS)):
        ring = Ring("trainer", "rollout")
        ring.does("trainer", doing("waits for the batch of version 3", whom="rollout"))
        ring.does("rollout", excuse)
        assert not ring.pass_time(3000)
        assert ring.dog.due()


def test_a_trainer_of_somebody_else_may_take_its_time() -> None:
    ring = Ring("rollout", "engine0")
    ring.does("rollout", doing("admission waits for trainer", whom="trainer"))
    assert not ring.pass_time(3000)
    assert ring.dog.due()


def test_a_step_for_which_processes_below_compile_lasts_as_long_as_they_do() -> None:
    """Only the beat tells of them."""
    ring = Ring("trainer")
    ring.does("trainer", doing("makes version 1", computes=True))
    for second in range(3600):
        ring.beats["trainer"] = msgspec.structs.replace(ring.beats["trainer"], cpu_seconds=float(second))
        assert not ring.pass_time(1)
    (hung,) = ring.pass_time(int(STALL) + 4)[:1]
    assert "makes version 1 and took no processor time" in hung.why


def test_what_may_hold_the_interpreter_may_do_so_for_as_long_as_it_computes_or_reads() -> None:
    for moving in ("computing", "reading"):
        ring = Ring("engine0")
        ring.does("engine0", doing("loads its model", limit=30.0, heavy=True, computes=True))
        assert not ring.pass_time(1)
        ring.silent.add("engine0")
        getattr(ring, moving).add("engine0")
        assert not ring.pass_time(3600)
        getattr(ring, moving).clear()
        (hung,) = ring.pass_time(int(STALL) + 4)[:1]
        assert hung.name == "engine0"


def test_a_model_that_is_read_from_a_slow_disk_is_waited_for_beyond_its_limit_and_one_that_is_not_read_is_found() -> None:
    ring = Ring("rollout", "engine0")
    ring.does("rollout", doing("attaches engine0", whom="engine0"))
    ring.does("engine0", doing("loads its model", limit=100.0, computes=True, heavy=True))
    ring.reading.add("engine0")
    assert not ring.pass_time(5000)
    ring.reading.clear()
    (found, *_) = ring.pass_time(int(STALL) + 3)
    assert found.name == "engine0" and "loads its model and took no processor time" in found.why


def test_progress_ends_a_standstill() -> None:
    ring = Ring("trainer", "rollout")
    ring.does("trainer", doing("waits for the batch of version 3", whom="rollout"))
    for step in range(10):
        ring.dog.progress(step)
        assert not ring.pass_time(9) and not ring.dog.due()


def test_a_part_that_was_started_again_is_not_blamed_for_the_time_before_nor_for_the_moment_after_its_imports() -> None:
    ring = Ring("rollout", "trainer")
    ring.does("rollout", doing("waits for steps", whom="trainer"))
    assert not ring.pass_time(int(STALL))
    ring.dog.begin("trainer", 1)
    ring.does("trainer", doing("imports", since=ring.now, limit=600.0, heavy=True))
    assert not ring.pass_time(int(STALL) + 3)
    ring.does("trainer")
    assert not ring.pass_time(int(STALL) + 2)
    (hung,) = ring.pass_time(1)
    assert hung.name == "trainer"


def test_a_launcher_that_stood_itself_blames_nobody_for_it() -> None:
    ring = Ring("trainer", "engine0")
    ring.pass_time(5)
    ring.now += 300
    assert not ring.pass_time(20)


def test_a_part_on_a_machine_whose_clock_began_days_later_is_judged_by_ours() -> None:
    """It is at 5 s when we are at 1000 s. Its loop stands from its second 10 on, and what it does began at its second 5."""
    ring = Ring()
    ring.dog.begin("engine0", None)
    found: list[HungProcess] = []
    for second in range(1, 31):
        ring.now = 1000.0 + second
        its = 5.0 + second
        ring.dog.hear("engine0", Beat(min(its, 10.0), (doing("makes tokens", since=5.0),), at=its))
        found += ring.dog.look()
        if found:
            break
    assert second == 15 and "engine0's event loop is blocked since 10 s" in found[0].why
    assert "makes tokens, since 15 s" in ring.dog.report()


def test_the_processor_time_of_a_part_elsewhere_is_what_its_beats_say() -> None:
    for computes in (True, False):
        ring = Ring()
        ring.dog.begin("trainer", None)
        found: list[HungProcess] = []
        for second in range(1, 41):
            ring.now = 1000.0 + second
            ring.dog.hear("trainer", Beat(5.0 + second, (doing(since=5.0, computes=True),), at=5.0 + second, cpu_seconds=second * computes))
            found += ring.dog.look()
        assert bool(found) is not computes


def test_a_heart_says_what_is_done_and_when_the_loop_last_turned() -> None:
    heartbeat = Heartbeat()
    silent = heartbeat.beat()
    assert (silent.turned, silent.doing, silent.absences, silent.counters, silent.memory_bytes) == (None, (), (), "", 0)
    with heartbeat.doing("makes version 3", computes=True):
        (said,) = heartbeat.beat().doing
        assert (said.what, said.computes) == ("makes version 3", True) and time.monotonic() - said.since < 1

    async def main() -> Beat:
        heartbeat.ask = lambda: LoopReport((doing("runs rollout 0.1"),), counters="1 rollout runs")
        heartbeat.turn()
        return heartbeat.beat()

    beat = asyncio.run(main())
    assert beat.turned is not None and beat.doing == (doing("runs rollout 0.1"),) and beat.counters == "1 rollout runs"
    assert decode_message(encode(beat)) == beat

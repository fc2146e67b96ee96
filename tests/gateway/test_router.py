"""The choice of an engine: affinity, load, version."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from midflight.gateway.fleet.routing import Candidate, Pins, choose


def engine(name: str, tokens: int = 0, *, version: int = 0, routable: bool = True) -> Candidate:
    return Candidate(name, version, tokens, routable)


def test_the_pinned_engine_is_taken_unless_it_is_not_routable() -> None:
    assert choose([engine("a", 110), engine("b", 100)], pinned="a") == "a"
    assert choose([engine("a", 110, routable=False), engine("b", 100)], pinned="a") == "b"


def test_a_crowded_engine_loses_its_sessions_when_that_is_worth_a_prefill() -> None:
    """The mean load is 100: above 125 the engine is crowded. Moving 80 tokens pays where the lightest is lighter by more."""
    assert choose([engine("a", 125), engine("b", 75)], pinned="a") == "a"
    assert choose([engine("a", 150), engine("b", 50)], pinned="a", tokens=80) == "b"
    assert choose([engine("a", 150), engine("b", 50)], pinned="a", tokens=100) == "a"
    assert choose([engine("b")], pinned="gone") == "b"


def test_without_a_pin_the_fewest_tokens_in_flight_decide() -> None:
    assert choose([engine("a", 300), engine("b", 200), engine("c", 250)], pinned=None) == "b"


def test_the_newest_version_is_preferred_among_engines_about_equally_loaded() -> None:
    assert choose([engine("old", 100), engine("new", 125, version=1)], pinned=None) == "new"
    assert choose([engine("old", 100), engine("new", 126, version=1)], pinned=None) == "old"


def test_no_routable_engine_is_no_choice() -> None:
    assert choose([], pinned="a") is None
    assert choose([engine("a", routable=False)], pinned="a") is None


@given(st.lists(st.integers(20, 60), min_size=60, max_size=200), st.integers(2, 4))
def test_load_stays_within_1_3_of_even(sizes: list[int], num_engines: int) -> None:
    loads = dict.fromkeys("abcd"[:num_engines], 0)
    for size in sizes:
        name = choose([engine(n, load) for n, load in loads.items()], pinned=None)
        assert name is not None
        loads[name] += size
    assert max(loads.values()) <= 1.3 * sum(loads.values()) / num_engines


def test_pins_are_bounded_and_forgotten_with_session_or_engine() -> None:
    pins = Pins(max_pins=3)
    for session in "pqrs":
        pins.pin(session, "a" if session in "pq" else "b")
    assert (pins.get("p"), pins.get("q"), pins.get("s"), len(pins)) == (None, "a", "b", 3)
    pins.forget("s")
    pins.forget_engine("a")
    pins.pin("", "a")
    assert (pins.get("q"), pins.get("r"), pins.get(""), len(pins)) == (None, "b", None, 1)

"""The choice of an engine: affinity, load, version."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from midflight.gateway.fleet.routing import Loads, Pins

Engines = dict[str, tuple[int, int]]
"""By name the version and the tokens in flight."""


def chosen(engines: Engines, *, pinned: str | None = None, tokens: int = 0) -> str | None:
    loads = Loads()
    for order, (name, (version, load)) in enumerate(engines.items()):
        loads.put(name, version=version, load=load, order=order)
    return loads.choose(pinned=pinned, tokens=tokens)


def by_hand(engines: Engines, *, pinned: str | None, tokens: int) -> str | None:
    """As it is said: the pinned engine unless it has more than 1.25 times the mean load, and more than the lightest has with the request;
    else of those with at most 1.25 times the lightest load the newest version, the lightest, the first."""
    if not engines:
        return None
    loads = {name: load for name, (_, load) in engines.items()}
    if pinned in loads and loads[pinned] <= max(min(loads.values()) + tokens, 1.25 * sum(loads.values()) / len(loads)):
        return pinned
    near = [name for name, load in loads.items() if load <= 1.25 * min(loads.values())]
    return min(near, key=lambda name: (-engines[name][0], loads[name]))


def test_a_pinned_engine_that_is_not_in_is_not_taken() -> None:
    assert chosen({"a": (0, 110), "b": (0, 100)}, pinned="a") == "a"
    assert chosen({"b": (0, 100)}, pinned="a") == "b"


def test_a_crowded_engine_loses_its_sessions_when_that_is_worth_a_prefill() -> None:
    """The mean load is 100: above 125 the engine is crowded. Moving 80 tokens pays where the lightest is lighter by more."""
    assert chosen({"a": (0, 125), "b": (0, 75)}, pinned="a") == "a"
    assert chosen({"a": (0, 150), "b": (0, 50)}, pinned="a", tokens=80) == "b"
    assert chosen({"a": (0, 150), "b": (0, 50)}, pinned="a", tokens=100) == "a"


def test_without_a_pin_the_fewest_tokens_in_flight_decide_and_then_the_order() -> None:
    assert chosen({"a": (0, 300), "b": (0, 200), "c": (0, 250)}) == "b"
    assert chosen({"b": (0, 0), "a": (0, 0)}) == "b"


def test_the_newest_version_is_preferred_among_engines_about_equally_loaded() -> None:
    assert chosen({"old": (0, 100), "new": (1, 125)}) == "new"
    assert chosen({"old": (0, 100), "new": (1, 126)}) == "old"


def test_an_engine_with_a_free_slot_is_taken_before_one_that_is_full_of_few_tokens() -> None:
    loads = Loads()
    loads.put("full", version=1, load=100, order=0, full=True)
    loads.put("free", version=0, load=900, order=1)
    assert loads.choose(pinned=None) == "free"
    loads.add("free", 50, full=True)  # now 950: where all are full, the fewest tokens decide again
    assert loads.choose(pinned=None) == "full"
    loads.add("full", -50)
    assert (loads.choose(pinned=None), loads.choose(pinned="free", tokens=900)) == ("full", "free")  # 950 is what the lighter would have


def test_no_engine_is_no_choice() -> None:
    assert chosen({}, pinned="a") is None


NAMES = st.sampled_from("abcdef")


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), NAMES, st.integers(0, 2), st.integers(0, 60)),
            st.tuples(st.just("add"), NAMES, st.just(0), st.integers(-20, 60)),
            st.tuples(st.just("drop"), NAMES, st.just(0), st.just(0)),
        ),
        max_size=40,
    ),
    NAMES,
    st.integers(0, 40),
)
def test_after_any_changes_the_choice_is_that_of_a_look_at_all(changes: list[tuple[str, str, int, int]], pinned: str, tokens: int) -> None:
    loads, engines = Loads(), Engines()
    for kind, name, version, load in changes:
        if kind == "put":
            loads.put(name, version=version, load=load, order=ord(name))
            engines[name] = version, load
        elif kind == "drop":
            loads.drop(name)
            engines.pop(name, None)
        elif name in engines:
            more = max(load, -engines[name][1])
            loads.add(name, more)
            engines[name] = engines[name][0], engines[name][1] + more
        engines = dict(sorted(engines.items()))
        assert len(loads) == len(engines)
        assert loads.choose(pinned=pinned, tokens=tokens) == by_hand(engines, pinned=pinned, tokens=tokens)


@given(st.lists(st.integers(20, 60), min_size=60, max_size=200), st.integers(2, 4))
def test_load_stays_within_1_3_of_even(sizes: list[int], num_engines: int) -> None:
    loads, spread = Loads(), dict.fromkeys("abcd"[:num_engines], 0)
    for order, name in enumerate(spread):
        loads.put(name, version=0, load=0, order=order)
    for size in sizes:
        name = loads.choose(pinned=None)
        assert name is not None
        loads.add(name, size)
        spread[name] += size
    assert max(spread.values()) <= 1.3 * sum(sizes) / num_engines


def test_pins_are_bounded_and_forgotten_with_session_or_engine() -> None:
    pins = Pins(max_pins=3)
    for session in "pqrs":
        pins.pin(session, "a" if session in "pq" else "b")
    assert (pins.get("p"), pins.get("q"), pins.get("s"), len(pins)) == (None, "a", "b", 3)
    pins.forget("s")
    pins.forget_engine("a")
    pins.pin("", "a")
    assert (pins.get("q"), pins.get("r"), pins.get(""), len(pins)) == (None, "b", None, 1)

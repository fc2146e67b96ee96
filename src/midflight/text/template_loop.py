"""A chat template that goes on where it left off: it writes the new messages of a conversation
without those before them.

A template is a program with a loop over the messages. What one round of the loop writes depends on
the message, on variables from before the loop, and on namespaces, because nothing else outlives a
round in Jinja. So the rounds of old messages need not be made again if

- the messages, tools and options are the same,
- the text and all variables before the loop are the same, which is looked at each time,
- no round of an old message looked at the end of the conversation, and
- the loop begins with the namespaces as they were.

What a template looks at is watched: it gets the conversation as an object that notes each look. A
template that does what is not understood here is left to the plain way, which writes everything.
"""

# A template may read any name of what it gets but those that begin with an underscore.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, cast

import jinja2
import xxhash
from jinja2 import nodes
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.utils import Namespace, missing, pass_context

from midflight.types import Json

_LOOP = "midflight_loop"
"""The name of the function that the loops of a template are led through."""

_MAX_ITEMS = 64
"""The most items of a list in a variable. A longer one is likely to hold the conversation itself,
which is not kept.
"""
_PARTED = (nodes.Extends, nodes.Block, nodes.Include, nodes.Import, nodes.FromImport)
"""Parts of templates whose text comes from elsewhere."""
OWN_NAMES = frozenset({"messages", "namespace", "strftime_now", _LOOP})
"""The names that a template gets from here. An option of such a name would not be seen."""
Item: TypeAlias = Mapping[str, Json]
_Values: TypeAlias = dict[str, object]


class NotResumable(Exception):
    """The template must write the whole conversation. No error of a lookup, because a template's
    own lookups must not catch it.
    """


@dataclass(frozen=True, slots=True)
class LoopPlace:
    """Where a template stood before one of the messages, in one conversation."""

    loop: int
    """The number of the loop in the template."""
    skipped: int
    """The messages before the loop's first one."""
    place: int
    """The number of the loop's round."""
    num_letters: int
    """The length of the text until there."""
    beginning: bytes
    """The digest of the text before the loop."""
    variables: Mapping[str, object]
    """The template's variables before the loop."""
    first: tuple[Mapping[str, object], ...]
    """The values of its namespaces before the loop."""
    spaces: tuple[Mapping[str, object], ...]
    """Their values before the round."""

    @property
    def item(self) -> int:
        """The number of the message of the round, among all."""
        return self.skipped + self.place


@dataclass(frozen=True, slots=True)
class LoopText:
    """What a template wrote."""

    text: str
    """The text from letter `start` on."""
    start: int
    place: LoopPlace | None
    """Where it can go on once there are more messages. `None` if it cannot."""


class LoopTemplate:
    """A compiled template, if its loop over the messages is understood."""

    def __init__(self, environment: jinja2.Environment, source: str) -> None:
        """Raises `NotResumable` for a template without such a loop."""
        tree = environment.parse(source)
        if any(tree.find(kind) is not None for kind in _PARTED):
            raise NotResumable
        if not _lead_through(tree.body, environment):
            raise NotResumable
        self._compiled = environment.from_string(tree)
        names = cast(Any, self._compiled.root_render_func).__globals__
        names["LoopContext"] = _loop_context

    def render(
        self,
        chat: Sequence[Item],
        values: Mapping[str, object],
        *,
        since: LoopPlace | None = None,
        until: int,
        clock: Callable[[str], str],
    ) -> LoopText:
        """The text of the conversation, from `since` on if that is given. The place where it goes
        on is before a message up to number `until`. `clock` is the template's `strftime_now`.
        Raises `NotResumable`, and whatever the template raises.
        """
        run = _Rendering(chat, since, until, clock)
        given = {**values, "messages": run.messages, "namespace": run.namespace}
        given |= {_LOOP: run.loop, "strftime_now": run.date}
        context = self._compiled.new_context(given)
        for piece in self._compiled.root_render_func(context):
            run.pieces.append(piece)
        return run.written()


def _lead_through(
    body: Sequence[nodes.Node], environment: jinja2.Environment, number: int = 0
) -> int:
    """Leads the loops at the top of a template through `_LOOP`. Returns how many there are. Loops
    inside of others, of macros or of blocks write no text that would be seen in time.
    """
    for node in body:
        if isinstance(node, nodes.If):
            for branch in (node.body, node.elif_, node.else_):
                number = _lead_through(branch, environment, number)
        elif isinstance(node, nodes.For) and not node.recursive and node.test is None:
            led = nodes.Call(
                nodes.Name(_LOOP, "load"), [node.iter, nodes.Const(number)], [], None, None
            )
            led.set_lineno(node.lineno, override=True)
            led.set_environment(environment)
            node.iter = led
            number += 1
    return number


class _Rendering:
    """One run of a template over one conversation."""

    def __init__(
        self,
        chat: Sequence[Item],
        since: LoopPlace | None,
        until: int,
        clock: Callable[[str], str],
    ) -> None:
        self.pieces: list[str] = []
        self.num_looks = 0
        """How often the template looked at what changes when the conversation goes on."""
        self.messages = _ShownList(self, chat)
        self.until = until
        self._since = since
        self._clock = clock
        self._spaces: list[Namespace] = []
        self._rounds: _Rounds | None = None
        """The last loop over the messages."""
        self._resumed: _Rounds | None = None

    def namespace(self, *given: Any, **values: Any) -> Namespace:
        """Jinja's `namespace`."""
        made = Namespace(*given, **values)
        self._spaces.append(made)
        return made

    def date(self, form: str) -> str:
        """The template's `strftime_now`."""
        self.num_looks += 1
        return self._clock(form)

    @property
    def loop(self) -> Callable[[Context, object, int], object]:
        @pass_context
        def loop(context: Context, iterable: object, number: int) -> object:
            if not isinstance(iterable, _ShownList):
                return iterable
            since = self._since
            rounds = _Rounds(self, iterable, number, dict(context.vars))
            self._rounds = rounds
            if since is not None and since.loop == number:
                rounds.resume(since)
                self._resumed = rounds
            return rounds

        return loop

    def spaces(self) -> tuple[_Values, ...]:
        """The values of all namespaces."""
        return tuple([dict(_values(space)) for space in self._spaces])

    def set_spaces(self, values: Sequence[Mapping[str, object]]) -> None:
        for space, given in zip(self._spaces, values, strict=True):
            held = _values(space)
            held.clear()
            held.update(given)

    def written(self) -> LoopText:
        """What the template has written, after its end."""
        rounds = self._rounds
        if self._since is not None:
            if rounds is None or rounds is not self._resumed:
                raise NotResumable
            start = self._since.num_letters
            return LoopText("".join(self.pieces[rounds.begin :]), start, rounds.found(start))
        place = None
        if rounds is not None:
            place = rounds.found(sum([len(piece) for piece in self.pieces[: rounds.begin]]))
        return LoopText("".join(self.pieces), 0, place)


@dataclass(frozen=True, slots=True)
class _Standing:
    """Stands for a variable that is the conversation itself, from a message on, or a namespace."""

    kind: str
    number: int


class _Rounds:
    """The rounds of a loop over the messages."""

    def __init__(
        self, run: _Rendering, messages: _ShownList, number: int, variables: Mapping[str, object]
    ) -> None:
        self._run = run
        self._messages = messages
        self._number = number
        self._first = run.spaces()
        self._variables = {name: self._kept(value) for name, value in variables.items()}
        self.begin = len(run.pieces)
        self.start = 0
        """The first round that is made."""
        self.marks = True
        """True if each step to the next message begins a round."""
        self._at = 0
        self._end = messages._number
        self._looks = run.num_looks
        self._steady = True
        """True if no round so far looked at the end of the conversation."""
        self._best: tuple[int, int, tuple[_Values, ...]] | None = None
        """The last round that can begin once there are more messages, the pieces before it, and
        the namespaces.
        """

    def resume(self, since: LoopPlace) -> None:
        """Begins with the round of an earlier run. Raises `NotResumable` if something before the
        loop is not as it was.
        """
        run = self._run
        if self._messages._skipped != since.skipped or since.place >= self._end:
            raise NotResumable
        if _digest(run.pieces) != since.beginning or len(self._first) != len(since.first):
            raise NotResumable
        if not _all_same(self._variables, since.variables):
            raise NotResumable
        for now, then in zip(self._first, since.first, strict=True):
            if not _all_same(now, then):
                raise NotResumable
        run.set_spaces(since.spaces)
        self._first = cast("tuple[_Values, ...]", since.first)
        self.start = since.place
        self._at = since.place

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        place = self._at
        if place >= self._end:
            raise StopIteration
        if self.marks:
            self.mark(place)
        self._at += 1
        return self._messages._item(place)

    def __len__(self) -> int:
        self.look()
        return self._end

    def item(self, place: int) -> Item:
        """The message of a round."""
        return self._messages._item(place)

    def look(self) -> None:
        """The template looks at the end of the conversation."""
        self._run.num_looks += 1

    def mark(self, place: int) -> None:
        """A round begins."""
        run = self._run
        self._steady = self._steady and (place == self.start or run.num_looks == self._looks)
        self._looks = run.num_looks
        if self._steady and self._messages._skipped + place <= run.until:
            self._best = (place, len(run.pieces), run.spaces())

    def found(self, num_before: int) -> LoopPlace | None:
        """Where the loop can go on. `num_before` is the length of the text before its first
        round.
        """
        if self._best is None:
            return None
        place, num_pieces, spaces = self._best
        pieces = self._run.pieces
        if not all(_is_plain(value) for values in spaces for value in values.values()):
            return None
        return LoopPlace(
            loop=self._number,
            skipped=self._messages._skipped,
            place=place,
            num_letters=num_before + sum([len(p) for p in pieces[self.begin : num_pieces]]),
            beginning=_digest(pieces[: self.begin]),
            variables=self._variables,
            first=self._first,
            spaces=spaces,
        )

    def _kept(self, value: object) -> object:
        """The value of a variable as it can be compared in a later run."""
        if isinstance(value, _ShownList):
            return _Standing("messages", value._skipped)
        if isinstance(value, Namespace):
            for number, space in enumerate(self._run._spaces):
                if space is value:
                    return _Standing("namespace", number)
        if isinstance(value, Macro):
            return _Standing(f"macro {value.name}", 0)
        if isinstance(value, list | tuple) and len(cast("list[object]", value)) > _MAX_ITEMS:
            raise NotResumable
        return value


class _RoundsContext(LoopContext):
    """What a template sees as `loop` in its loop over the messages."""

    def __init__(self, rounds: _Rounds, undefined: type[Undefined]) -> None:
        rounds.marks = False
        super().__init__(rounds, undefined)
        self._rounds = rounds
        self.index0 = rounds.start - 1
        if rounds.start:
            self._current = rounds.item(rounds.start - 1)

    @property
    def last(self) -> bool:
        is_last = super().last
        if is_last:
            self._rounds.look()
        return is_last

    @property
    def nextitem(self) -> Any:
        if super().last:
            self._rounds.look()
        return super().nextitem

    @property
    def length(self) -> int:
        self._rounds.look()
        return self._rounds._end

    def changed(self, *value: Any) -> bool:
        self._rounds.look()
        raise NotResumable

    def __next__(self) -> Any:
        found = super().__next__()
        self._rounds.mark(self.index0)
        return found


def _loop_context(
    iterable: Any, undefined: type[Undefined], recurse: Any = None, depth0: int = 0
) -> LoopContext:
    """Takes the place of Jinja's `LoopContext` in a template."""
    if isinstance(iterable, _Rounds):
        return _RoundsContext(iterable, undefined)
    return LoopContext(iterable, undefined, recurse, depth0)


def _cannot(*_: object) -> NoReturn:
    raise NotResumable


class _ShownList(Sequence[Item]):
    """The conversation as a template gets it, from a message on. It can do what a list can, as far
    as it is understood; for everything else it raises `NotResumable`.
    """

    def __init__(self, run: _Rendering, chat: Sequence[Item], skipped: int = 0) -> None:
        self._run = run
        self._chat = chat
        self._skipped = skipped
        self._number = max(0, len(chat) - skipped)

    def _item(self, place: int) -> Item:
        return self._chat[self._skipped + place]

    def _look(self) -> None:
        self._run.num_looks += 1

    def __len__(self) -> int:
        self._look()
        return self._number

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            start: Any = index.start
            whole = index.stop is None and index.step in (None, 1)
            if whole and isinstance(start, int) and 0 <= start <= self._number:
                return _ShownList(self._run, self._chat, self._skipped + start)
            self._look()
            return [self._item(place) for place in range(self._number)[index]]
        if not isinstance(index, int):
            raise TypeError("list indices must be integers or slices")
        if not 0 <= index < self._number:
            self._look()
        if not -self._number <= index < self._number:
            raise IndexError("list index out of range")
        return self._item(index % self._number)

    def __iter__(self) -> Iterator[Item]:
        self._look()
        return iter([self._item(place) for place in range(self._number)])

    def __reversed__(self) -> Iterator[Item]:
        self._look()
        return iter([self._item(place) for place in reversed(range(self._number))])

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _cannot
    __add__ = __radd__ = __mul__ = __rmul__ = _cannot
    __str__ = __repr__ = __format__ = __hash__ = _cannot  # pyright: ignore[reportAssignmentType]
    copy = append = extend = insert = remove = pop = clear = sort = reverse = property(_cannot)


class GoneItem(Mapping[str, Json]):
    """A message of which only the role is at hand. Whoever looks for more gets `NotResumable`."""

    def __init__(self, role: str) -> None:
        self._role = role

    def __getitem__(self, name: str) -> Json:
        if name == "role":
            return self._role
        raise NotResumable

    __iter__ = __len__ = __bool__ = _cannot  # pyright: ignore[reportAssignmentType]
    __eq__ = __ne__ = __str__ = __repr__ = __format__ = __hash__ = _cannot  # pyright: ignore[reportAssignmentType]


def _values(space: Namespace) -> _Values:
    """The values of a namespace itself."""
    return cast(_Values, cast(Any, space)._Namespace__attrs)


def _digest(pieces: Sequence[str]) -> bytes:
    return xxhash.xxh3_128_digest("".join(pieces).encode("utf-8", "surrogatepass"))


def _all_same(now: Mapping[str, object], then: Mapping[str, object]) -> bool:
    return now.keys() == then.keys() and all(_same(now[name], then[name]) for name in now)


def _same(now: object, then: object) -> bool:
    """True if two values are the same for a template, whatever it does with them."""
    if now is then:
        return True
    if type(now) is not type(then):
        return False
    if isinstance(now, str | int | float | _Standing):
        return now == then
    if isinstance(now, list | tuple):
        one = cast("Sequence[object]", now)
        other = cast("Sequence[object]", then)
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(now, dict):
        values = cast(_Values, now)
        others = cast(_Values, then)
        # the order of the keys is seen by a loop over them
        return list(values) == list(others) and all(_same(values[k], others[k]) for k in values)
    if isinstance(now, Undefined):
        return str(cast(Any, now)._undefined_name) == str(cast(Any, then)._undefined_name)
    return False


def _is_plain(value: object) -> bool:
    """True for a value that stays as it is after the run."""
    if value is None or value is missing or isinstance(value, str | int | float):
        return True
    if isinstance(value, list | tuple):
        return all(map(_is_plain, cast("Sequence[object]", value)))
    if isinstance(value, dict):
        return all(map(_is_plain, cast(_Values, value).values()))
    return False

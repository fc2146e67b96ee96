"""The token tree of a session: every prompt and answer in tokens. Synchronous.

I4: a prompt that continues a recorded turn holds that turn's ids verbatim; only the rest is
tokenised. A template may write a reply otherwise than the model did: it may serialise arguments
anew or trim blanks. The sampled ids are kept if both texts mean the same, reasoning included, when
the model's own message format reads them.

I3: every generated token is trained in exactly one row, or has exactly one reason why not. The path
from the root to a leaf is a row. The first leaf (in order of recording) that holds a token trains
it; in later rows the token is context.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias, TypeVar

import msgspec
import numpy as np

from midflight.errors import MidflightError
from midflight.gateway.sessions import history as remembered
from midflight.gateway.sessions.history import History, Node, NotAtHand, Prompt, Written
from midflight.gateway.sessions.seams import ResentMessages, Seam, ShownMessages
from midflight.text import Ending, Message, Tokenizer
from midflight.text.formats import AssistantMessage, MessageFormat, Tool
from midflight.text.template_loop import LoopPlace, LoopText, NotResumable
from midflight.types import (
    Int32,
    Json,
    Reason,
    Row,
    SamplingParams,
    Turn,
    UInt8,
    fill_unknown,
)
from midflight.types.token_ids import AnyIds, SharedIds, packed, unpacked

_log = logging.getLogger(__name__)
_Options: TypeAlias = Mapping[str, Json] | None
_PROBE = "Zq7x"
"""Content that no template contains."""

_MAX_TWINS = 64
"""The most turns with the same messages that are read back. This is more than a usual best-of-n
has, and costs some milliseconds.
"""

_MAX_AGAIN = 8
"""The most messages of a prompt that are kept, because the template goes on before them. Usually it
is the last one.
"""
_NUM_TO_PROVE = 4
"""So many prompts that are made of what is new are compared with those of the whole."""

_MAX_KEPT = 256
_MAX_KEPT_BYTES = 16_384
"""The most first prompts that are kept, and the most bytes that each may have as JSON. They suffice
for some batches of groups and take 40 MB at most.
"""
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation to be continued. `text` is its rendering by the template."""

    text: Written
    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    options: Mapping[str, Json] = field(default_factory=dict[str, Json])

    @property
    def tools_as_json(self) -> Sequence[Message] | None:
        return [tool.as_json() for tool in self.tools] or None


class Matcher:
    """Finds the recorded turn that a text continues. It knows the tokenizer, the message format and
    the template's end of turn, but no session, so one serves all sessions.
    """

    def __init__(self, tokenizer: Tokenizer, message_format: MessageFormat | None = None) -> None:
        self.tokenizer = tokenizer
        self._given_format = message_format
        self._first: OrderedDict[bytes, Prompt] = OrderedDict()
        """The prompts that conversations began with recently, the newest last."""
        self.num_to_prove = _NUM_TO_PROVE
        """The prompts made of what is new that are still to be compared; -1 after one differed."""

    def first(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None,
        options: _Options,
        ending: Ending = Ending.TURN,
    ) -> Prompt:
        """The prompt of a conversation that holds no reply, or no reply of this session. The
        rollouts of a group begin alike, so the prompt is written and tokenised once for all of
        them.
        """
        key = _encode((messages, tools, options, ending))
        prompt = self._first.pop(key, None)
        if prompt is None:
            text = self.tokenizer.prompt(messages, tools=tools, options=options, ending=ending)
            history, begun = remembered.read(messages).begun(messages, ending)
            prompt = Prompt(self.tokenizer.encode(text), text, history.end, begun=begun)
        if len(key) <= _MAX_KEPT_BYTES:
            self._first[key] = prompt
        if len(self._first) > _MAX_KEPT:
            self._first.popitem(last=False)
        return prompt

    def proves(self, prompt: Prompt, whole: Callable[[], Prompt]) -> bool:
        """True if a prompt that was made of what is new may be used. The first ones are compared
        with the prompt of the whole conversation; one that differs ends the use of all.
        """
        if self.num_to_prove > 0:
            self.num_to_prove -= 1
            if not prompt.is_like(whole()):
                self.num_to_prove = -1
                _log.warning(
                    "prompts are made of whole conversations from now on: the chat template wrote "
                    "a conversation that went on otherwise than the whole of it."
                )
        return self.num_to_prove >= 0

    @cached_property
    def _format(self) -> MessageFormat:
        """Made only when needed: a session with one request never reads a reply back."""
        return self._given_format or MessageFormat(self.tokenizer)

    @cached_property
    def end_of_turn(self) -> str:
        """The text that the template writes after an assistant's content, without the blanks around
        it. Empty if unknown.
        """
        probe: list[Message] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": _PROBE},
        ]
        try:
            text = self.tokenizer.render(probe)
        except MidflightError:  # a template may insist on another conversation
            return ""
        return text.rpartition(_PROBE)[2].strip() if _PROBE in text else ""

    def verbatim(self, nodes: Iterable[Node], text: Written) -> tuple[Node, str] | None:
        """The turn whose reply follows its prompt unchanged in the text, and the text after the
        reply.
        """
        for node in nodes:
            end = node.num_letters + node.num_reply_letters
            written = text.between(node.num_letters, end)
            if remembered.text_digest(written) != node.reply_digest:
                continue
            if self._ends_there(node, text.after(end)):
                return node, self._rest(node, text.after(end))
        return None

    def reworded(self, nodes: Sequence[Node], chat: Chat, place: int) -> tuple[Node, str] | None:
        """The turn whose reply the template wrote at this place in another form, and the text after
        the reply.
        """
        for node in nodes[-_MAX_TWINS:]:
            end = self._end_of_message(node, chat, place)
            if end is not None and self._means_the_same(node, chat, end):
                return node, self._rest(node, chat.text.after(end))
        return None

    def respelled(self, node: Node, text: Written, rest: str, rest_ids: tuple[int, ...]) -> bool:
        """True if `text`, which continues `node` with `rest`, has other ids when it is tokenised
        anew.

        Tokenisers cut at special tokens first. So it is enough to tokenise from the last special
        token before the output to the first one after it. The output is tokenised once more, but
        never the whole history.
        """
        specials = self.tokenizer.special_token_ids
        tail = unpacked(node.tail)
        output = unpacked(node.output)
        start = next((k for k in reversed(range(len(tail))) if tail[k] in specials), None)
        if start is None:
            ids = self.tokenizer.encode(text.whole)
            return ids != unpacked(node.packed_ids) + rest_ids
        if output and output[-1] in specials:
            stop = 0
        else:
            stop = next((k for k, i in enumerate(rest_ids) if i in specials), len(rest_ids))
        lead = tail[start:]
        head = rest_ids[:stop]
        first = node.num_letters - len(self.tokenizer.decode(lead))
        last = len(text) - len(rest) + (len(self.tokenizer.decode(head)) if head else 0)
        return self.tokenizer.encode(text.between(first, last)) != lead + output + head

    def _ends_there(self, node: Node, tail: str) -> bool:
        """True if the message ends where the reply did, as far as the text shows it."""
        tail = tail.lstrip()
        own = self._own_end(node)
        if not tail:  # the reply itself is to be continued
            return not own
        return tail.startswith(self.end_of_turn) or (bool(own) and tail.startswith(own))

    def _end_of_message(self, node: Node, chat: Chat, place: int) -> int | None:
        """The position in the text where the end of turn after the reply begins."""
        if self.end_of_turn:
            at = chat.text.find(self.end_of_turn, node.num_letters)
            return None if at < 0 else at
        text = chat.text.whole
        try:
            written = self.tokenizer.render(
                chat.messages[: place + 1], tools=chat.tools_as_json, options=chat.options
            )
        except MidflightError:  # the template takes the whole conversation, but none that ends here
            return None
        if not text.startswith(written) or len(written) < node.num_letters:
            return None
        return len(written)

    def _means_the_same(self, node: Node, chat: Chat, end: int) -> bool:
        """True if the text up to `end` means the same as the recorded reply. Calls are read in
        both, whether the agent saw them as calls or as content.
        """
        prompt = chat.text.ending(node.num_letters)
        written = chat.text.between(node.num_letters, end)
        said = self.tokenizer.decode(
            unpacked(node.output), skip_special=True, keep=self._format.kept_token_ids
        )
        texts = (written, said[: node.num_reply_letters])
        parsed = [
            self._format.parse(each, prompt, calls=True, forced=True, tools=chat.tools)
            for each in texts
        ]
        return remembered.meaning(parsed[0]) == remembered.meaning(parsed[1])

    def _rest(self, node: Node, tail: str) -> str:
        """The text after the reply that becomes context. An end of turn that the model wrote itself
        is not repeated.
        """
        own = self._own_end(node)
        if own and tail.lstrip().startswith(own):
            return tail.lstrip().removeprefix(own)
        return tail

    def _own_end(self, node: Node) -> str:
        """The text of the special token that the output ends with. Empty if it ends with none."""
        last = unpacked(node.output[-4:])
        if last and last[0] in self.tokenizer.special_token_ids:
            return self.tokenizer.decode(last)
        return ""


_MAX_READ = 8
"""The most replies of one prompt, newest first, that are read back and compared by meaning. A
template that cuts thoughts changes every reply, and reading all of them for each prompt would be
quadratic in the turns.
"""


class TokenTree:
    """The turns of one session. `plan_*` turns a prompt into tokens and changes nothing; `record`
    adds the finished turn.
    """

    def __init__(self, tokenizer: Tokenizer, *, matcher: Matcher | None = None) -> None:
        """All trees of a gateway share the `matcher`."""
        self._tokenizer = tokenizer
        self._matcher = matcher or Matcher(tokenizer)
        self._roots: list[Node] = []
        self._by_history: dict[bytes, list[Node]] = {}
        """The turns that a conversation may end with, by the conversation's digest. There are
        several if choices differ only in their reasoning.
        """
        self._replies: set[bytes] = set()
        """Digests of the single replies."""
        self._answered: set[bytes] = set()
        """Digests of the conversations that were answered."""
        self._unread: list[tuple[Prompt, Node, AssistantMessage]] = []
        """Turns that are not yet in the three collections above."""
        self._own = object()
        """Stands for this tree."""
        self.keeps_seams = False
        """True if its prompts keep what the next one needs if it begins with the same messages."""
        self.nodes: list[Node] = []
        self.num_branches = 0
        """Turns beside a turn of another request: a second root, or a second child of a turn."""
        self.num_rewritten = 0
        """Answered chats that hold a recorded reply, or another message in its place, but could not
        continue it token by token: the client edited the history, or the template writes it in
        another form. They start a branch.
        """
        self.num_mismatches = 0
        """Answered prompts whose text would have had other ids than the reused ones if it had been
        tokenised anew.
        """

    def emptied(self) -> TokenTree:
        """A new, empty tree for the same session."""
        tree = TokenTree(self._tokenizer, matcher=self._matcher)
        tree.keeps_seams = self.keeps_seams
        return tree

    def plan_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        options: _Options = None,
        ending: Ending = Ending.TURN,
        num_left: int = 0,
    ) -> Prompt:
        """The prompt of a conversation: the ids of the longest recorded prefix, then the rest
        tokenised. The last `num_left` messages may come in another form when it goes on.
        """
        goes_on = ending is Ending.TURN and self._matcher.num_to_prove >= 0
        if goes_on and isinstance(messages, ResentMessages):
            prompt = self._plan_on(messages, tools, options, num_left)
            if prompt is not None and self._matcher.proves(
                prompt, lambda: self._plan_whole(messages, tools, options, ending, num_left)
            ):
                return prompt
        return self._plan_whole(messages, tools, options, ending, num_left)

    def _plan_whole(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        options: _Options,
        ending: Ending,
        num_left: int,
    ) -> Prompt:
        """The prompt of a conversation that is read from its first message on."""
        if isinstance(messages, ResentMessages):
            messages = messages.whole
        written = [tool.as_json() for tool in tools] or None
        if not self.nodes or all(message.get("role") != "assistant" for message in messages):
            first = self._matcher.first(messages, tools=written, options=options, ending=ending)
            parent = self._longest_prefix(first.ids)
            return first if parent is None else replace(first, parent=parent)
        cut = len(messages) - num_left
        steady = remembered.read(messages[:cut])
        read = steady.then(remembered.read(messages[cut:], since=steady))
        found: LoopText | None = None
        if self.keeps_seams and ending is Ending.TURN:
            found = self._watched(messages, written, options, num_left)
        if found is None:
            text = self._tokenizer.prompt(messages, tools=written, options=options, ending=ending)
        else:
            text = found.text
        self._read()
        chat = Chat(Written(text), messages, tools, options or {})
        history, begun = read.begun(messages, ending)
        prompt = self._continuing(chat, read, history)
        if prompt is None:
            ids = self._tokenizer.encode(text)
            prompt = Prompt(
                ids,
                text,
                history.end,
                self._longest_prefix(ids),
                rewritten=self._is_rewritten(history, since=0),
            )
        if begun:
            prompt = replace(prompt, begun=begun)
        if found is None or found.place is None or _is_far(found.place, cut):
            return prompt
        shown = ShownMessages.of(messages, last=max(0, found.place.item - 2))
        return self._with_seam(prompt, chat, steady, found.place, shown)

    def _plan_on(
        self, messages: ResentMessages, tools: Sequence[Tool], options: _Options, num_left: int
    ) -> Prompt | None:
        """The prompt of a conversation that begins as an earlier prompt did, made of what is new.
        `None` if the whole conversation must be read: the client did not continue that prompt's
        answer, or the template cannot go on. It is the prompt that the whole conversation would
        give.
        """
        seam = messages.seam
        if seam.owner is not self._own or seam.tools != tuple(tools):
            return None
        if seam.options != (options or {}):
            return None
        shown = seam.messages.grown(messages.new)
        if shown is None:
            return None
        written = [tool.as_json() for tool in tools] or None
        try:
            found = self._tokenizer.write_on(
                shown, tools=written, options=options, since=seam.place, num_left=num_left
            )
            text = Written(found.text, found.start, seam.text_state)
            new = messages.new
            cut = max(0, len(new) - num_left)
            steady = remembered.read(new[:cut], since=seam.history)
            history = steady.then(remembered.read(new[cut:], since=steady))
            self._read()
            chat = Chat(text, messages, tools, options or {})
            prompt = self._continuing(chat, history, history, seam)
        except (NotResumable, NotAtHand):
            return None
        # an answer is read by the end of the prompt's text
        if prompt is None or not found.text.strip():
            return None
        if found.place is None or _is_far(found.place, len(messages) - num_left):
            return prompt
        return self._with_seam(prompt, chat, steady, found.place, shown)

    def _watched(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        options: _Options,
        num_left: int,
    ) -> LoopText | None:
        """The text of a conversation, and where the template can go on. `None` if it cannot be
        watched.
        """
        try:
            return self._tokenizer.write_on(
                messages, tools=tools, options=options, num_left=num_left
            )
        except NotResumable:
            return None

    def _with_seam(
        self,
        prompt: Prompt,
        chat: Chat,
        steady: History,
        place: LoopPlace,
        shown: ShownMessages | None,
    ) -> Prompt:
        """The prompt with what the next one needs. `steady` are the messages that will come in the
        same form.
        """
        if shown is None:
            return prompt
        history = steady.closed
        # a message of the list of tools may stand before the first one
        last = max(0, place.item - 2)
        seam = Seam(
            owner=self._own,
            tools=tuple(chat.tools),
            options=chat.options,
            history=history,
            place=place,
            text_state=chat.text.state_at(place.num_letters),
            messages=shown.between(last, history.start),
            parent=prompt.parent,
            tail=prompt.tail,
        )
        return replace(prompt, seam=seam, own_tail=seam.tail)

    def plan_text(self, text: str) -> Prompt:
        """The prompt of a text completion. A text that continues a recorded one reuses its ids."""
        written = Written(text)
        starts = written.beginnings(node.num_letters for node in self.nodes)
        ends: list[tuple[int, Node]] = []
        for node in self.nodes:
            digest = node.prompt_digest
            if digest is None or starts.get(node.num_letters) != digest:
                continue
            said = self._tokenizer.decode(unpacked(node.output))
            if text.startswith(said, node.num_letters):
                ends.append((node.num_letters + len(said), node))
        if not ends:
            ids = self._tokenizer.encode(text)
            return Prompt(ids, text, parent=self._longest_prefix(ids))
        length, node = max(ends, key=lambda pair: pair[0])
        return self._going_on(node, written, text[length:])

    def plan_ids(self, token_ids: Sequence[int]) -> Prompt:
        ids = tuple(token_ids)
        return Prompt(ids, None, parent=self._longest_prefix(ids))

    def record(
        self,
        prompt: Prompt,
        turn: Turn,
        *,
        reply: str,
        request: int,
        message: AssistantMessage | None = None,
        sampling: SamplingParams | None = None,
    ) -> Node:
        """Adds a finished turn. `turn.prompt_ids` are the ids of `prompt`, and `sampling` are the
        parameters of its request.
        """
        assert turn.prompt_ids is prompt.ids or turn.prompt_ids == prompt.ids, (
            "I4: the turn was sampled from the ids that were planned"
        )
        node = Node.of(prompt, turn, reply=reply, request=request, sampling=sampling)
        siblings = self._roots if prompt.parent is None else prompt.parent.children
        self._count(prompt, request, siblings)
        siblings.append(node)
        self.nodes.append(node)
        if prompt.history is not None:
            self._unread.append((prompt, node, message or AssistantMessage(reply)))
        return node

    def _read(self) -> None:
        """Digests the replies that were recorded since the last time. They wait until here because
        most sessions send one request and need no digest of its answer.
        """
        for prompt, node, said in self._unread:
            whole = said
            if prompt.begun:
                whole = msgspec.structs.replace(said, content=prompt.begun + said.content)
            own = remembered.digest(remembered.assistant_reply(whole))
            before = prompt.history or remembered.EMPTY
            self._by_history.setdefault(remembered.linked(before, own), []).append(node)
            self._replies.add(own)
            self._answered.add(before)
        self._unread.clear()

    def _count(self, prompt: Prompt, request: int, siblings: Sequence[Node]) -> None:
        """A prompt counts once, with the first of its choices."""
        of_others = [sibling.request != request for sibling in siblings]
        if any(of_others):
            self.num_branches += 1
        if all(of_others):
            self.num_rewritten += prompt.rewritten
            self.num_mismatches += prompt.respelled

    def _continued(self, chat: Chat, history: History) -> tuple[Node, str, int] | None:
        """The turn that the conversation continues, the text after it, and the place of its
        reply.
        """
        known: list[tuple[int, list[Node]]] = []
        for place in reversed(history.replies):
            nodes = self._by_history.get(history.through(place))
            if nodes:
                known.append((place, nodes))
        starts = chat.text.beginnings(node.num_letters for _, nodes in known for node in nodes)
        for rank, (place, nodes) in enumerate(known):
            begun = [node for node in nodes if starts.get(node.num_letters) == node.prompt_digest]
            found = self._matcher.verbatim(begun, chat.text)
            if found is None and rank < _MAX_READ:
                found = self._matcher.reworded(begun, chat, place)
            if found is not None:
                node, rest = found
                return node, rest, place
        return None

    def _is_rewritten(self, history: History, *, since: int) -> bool:
        """True if a message at place `since` or later repeats a recorded reply, or is in the place
        of one.
        """
        return any(
            own in self._replies or history.before(place) in self._answered
            for place, own in history.replies.items()
            if place >= since
        )

    def _continuing(
        self, chat: Chat, read: History, history: History, seam: Seam | None = None
    ) -> Prompt | None:
        """The prompt of a conversation that continues a recorded turn. `None` if it continues none.
        `read` are all its messages, `history` those that an answer is recorded under.
        """
        found = self._continued(chat, read)
        if found is None:
            return None
        node, rest, place = found
        rewritten = self._is_rewritten(history, since=place + 1)
        return self._going_on(
            node, chat.text, rest, history=history.end, rewritten=rewritten, seam=seam
        )

    def _going_on(
        self,
        node: Node,
        text: Written,
        rest: str,
        *,
        history: bytes | None = None,
        rewritten: bool = False,
        seam: Seam | None = None,
    ) -> Prompt:
        last = unpacked((node.output or node.tail)[-4:])
        rest_ids = (
            self._tokenizer.encode_after(last[0], rest) if last else self._tokenizer.encode(rest)
        )
        respelled = node.respelled or self._matcher.respelled(node, text, rest, rest_ids)
        tail = packed(rest_ids)
        is_whole = text.start == 0
        return Prompt(
            SharedIds(
                node.end + len(rest_ids),
                lambda: (*node.parts, tail),
                after=node.number,
                tail=tail,
            ),
            text.tail if is_whole else None,
            history,
            node,
            respelled,
            rewritten,
            own_tail=tail,
            written=None if is_whole else text,
            before=seam.states if seam is not None and seam.is_of(node) else {},
        )

    def _longest_prefix(self, ids: AnyIds) -> Node | None:
        """The longest recorded turn that these ids continue. Only the children of turns that the
        ids continue are looked at.
        """
        key = packed(ids) if self._roots else b""
        best = None
        best_end = 0
        ends = [(0, self._roots)]
        while ends:
            start, nodes = ends.pop()
            for node in nodes:
                middle = start + len(node.tail)
                end = middle + len(node.output)
                if end >= len(key) or not key.startswith(node.tail, start):
                    continue
                if not key.startswith(node.output, middle):
                    continue
                ends.append((end, node.children))
                if end > best_end:
                    best = node
                    best_end = end
        return best


def _is_far(place: LoopPlace, num_messages: int) -> bool:
    """True if a template would have to write too many of the messages again."""
    return num_messages - place.item > _MAX_AGAIN


class Harvest(msgspec.Struct, frozen=True, eq=False):
    """Rows to train on, and the numbers of generated tokens that are not trained, by reason."""

    rows: tuple[Row, ...]
    masked: Mapping[Reason, int]
    dropped: Mapping[Reason, int]
    masked_by: Mapping[str, int]
    """See `SessionRecord`."""


K = TypeVar("K")


def counted(numbers: Iterable[tuple[K, int]]) -> dict[K, int]:
    """The sum of the numbers of each key. Numbers that are 0 add no entry."""
    sums: dict[K, int] = {}
    for key, number in numbers:
        if number:
            sums[key] = sums.get(key, 0) + number
    return sums


def harvest(nodes: Sequence[Node], *, count_all_choices: bool = False) -> Harvest:
    """Makes rows of a tree. `nodes` are in order of recording. Paths without a trainable token give
    no row.

    With `count_all_choices` choices that the agent did not continue are trained too, each as a row
    of its own.
    """
    unchosen = set[Node]()
    if not count_all_choices and len(nodes) > 1:
        unchosen = _unchosen(nodes)
    chosen = [node for node in nodes if node not in unchosen] if unchosen else nodes
    requests = sorted({node.request for node in nodes})
    turn_of = {request: turn for turn, request in enumerate(requests)}
    untrained = [node for node in chosen if not node.policy_sampled]
    masked = [(Reason.NOT_POLICY_SAMPLED, node.num_output) for node in untrained]
    masked_by = [(field, node.num_output) for node in untrained for field in node.masked_by]
    dropped = [(Reason.UNCHOSEN, node.num_output) for node in unchosen]
    dropped += [(Reason.OVERSHOOT, node.num_overshoot) for node in nodes]
    return Harvest(_rows(chosen, turn_of), counted(masked), counted(dropped), counted(masked_by))


def _unchosen(nodes: Sequence[Node]) -> set[Node]:
    """The choices of an n > 1 request that the agent did not continue, if it continued another."""
    continued = {node.request for node in nodes if node.children}
    return {node for node in nodes if node.request in continued and not node.children}


def _rows(nodes: Sequence[Node], turn_of: Mapping[int, int]) -> tuple[Row, ...]:
    claimed: set[Node] = set()
    rows: list[Row] = []
    for leaf in nodes:
        if leaf.children:
            continue
        path = leaf.path
        unclaimed = [node for node in path if node not in claimed]
        trained = {node for node in unclaimed if node.policy_sampled and node.output}
        claimed.update(path)
        if trained:
            rows.append(_row(leaf, path, trained=trained, turn_of=turn_of))
    return tuple(rows)


_KINDS = tuple([np.dtype(kind) for kind in ("<i4", "?", "?", "<f4", "<i4", "<i4", "<i4")])
"""The types of a row's ids and of `Node.columns`. They are made once, because making a type from
its name takes as long as making the array.
"""


def _row(
    leaf: Node, path: Sequence[Node], *, trained: Set[Node], turn_of: Mapping[int, int]
) -> Row:
    """`turn_of` is the place of each request among those that were answered."""
    kept, kept_lengths = _kept([node for node in path if node in trained], length=leaf.end)
    parts = [node.columns(trained=node in trained, turn=turn_of[node.request]) for node in path]
    columns = [leaf.packed_ids]
    if len(parts) == 1:
        columns += parts[0]
    else:
        columns += [b"".join(column) for column in zip(*parts, strict=True)]
    arrays = [np.frombuffer(column, kind) for column, kind in zip(columns, _KINDS, strict=True)]
    return Row(
        *arrays,
        kept=kept,
        kept_lengths=kept_lengths,
        experts=_experts(path),
        records=tuple(node.record for node in path),
    )


def _kept(trained: Sequence[Node], *, length: int) -> tuple[UInt8, Int32] | tuple[None, None]:
    """The records of truncation for the tokens of these turns, which are in order. Both are `None`
    if no turn has a record.
    """
    if not any(node.kept for node in trained):
        return None, None
    lengths = np.zeros(length, dtype=np.int32)
    for node in trained:
        if node.kept_lengths:
            lengths[node.num_prompt : node.end] = np.frombuffer(node.kept_lengths, dtype="<i4")
    return np.frombuffer(b"".join(node.kept for node in trained), dtype=np.uint8), lengths


def _experts(path: Sequence[Node]) -> UInt8 | None:
    """The records of experts for all tokens of the path. If two turns have a record of one token,
    the first stays, because the token was sampled with that choice of experts.
    """
    if not any(node.experts for node in path):
        return None
    width = max(node.num_expert_bytes for node in path)
    found = np.full((path[-1].end, width), 255, dtype=np.uint8)
    for node in path:
        if node.num_expert_bytes == width:
            fill_unknown(
                found[node.first_recorded : node.end],
                np.frombuffer(node.experts, dtype=np.uint8).reshape(-1, width),
            )
    return found

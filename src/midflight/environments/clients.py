"""The clients that agents get: OpenAI's, bound to one session, with the other parts of the rollout
that an agent may ask. Importing this imports `openai`, which takes a second.

`Client` and `PlainClient` are the same except for waiting. `RolloutClientMixin` defines what they have
beyond the SDK's clients.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from openai import APIConnectionError, APIStatusError, AsyncOpenAI, OpenAI

from midflight.config.agents import UntrackedSection
from midflight.errors import ConfigError, UntrackedUnavailable
from midflight.types.names import UNTRACKED, part_of

_ITS_OWN = frozenset({400, 409, 413, 422})
"""Answers that blame the request. They say nothing about the server, and the agent must deal with
them.
"""


def key_of(section: UntrackedSection) -> str:
    """The key of the untracked server. Raises `ConfigError` if the section names a variable that is
    not there.
    """
    if not section.api_key_env:
        return "none"
    key = os.environ.get(section.api_key_env)
    if not key:
        raise ConfigError(
            f"environment.untracked.api_key_env names {section.api_key_env}, and there is no such "
            "variable here; set it."
        )
    return key


@dataclass(slots=True)
class RolloutClientState:
    """The state that all clients of one rollout share."""

    section: UntrackedSection
    pool: Callable[[], Any]
    """Connections to servers outside the run."""
    public_url: str = ""
    """The beginning of the gateway's address on other machines, or an empty string if it is as
    here.
    """
    trouble: str = ""
    """The error with which the last untracked request ended; empty after an answer."""


class RolloutClientMixin:
    """The parts of a client beyond those of the SDK's."""

    beside: RolloutClientState | None = None
    is_untracked = False
    api_key: str
    with_options: Any

    def untracked(self) -> Self:
        """A client for judges and simulated users. None of its tokens is recorded or trained. It
        asks `environment.untracked.url`, or the engines that are reserved for this, whose weights
        stay as they are. Raises `ConfigError` if a run has neither.

        While these do not answer, requests raise `UntrackedUnavailable`, and a rollout that ends
        then has failed, whatever it returns (I10).
        """
        section = UntrackedSection(engines=1) if self.beside is None else self.beside.section
        if section.url and self.beside is not None:
            made = self.with_options(
                base_url=section.url, api_key=key_of(section), http_client=self.beside.pool()
            )
        elif section.engines:
            made = self._part(UNTRACKED)
        else:
            raise ConfigError(
                "client.untracked(): this run has nothing that answers without being trained; set "
                "environment.untracked.url to a server of the OpenAI API, or "
                "environment.untracked.engines to a number of engines below engine.count."
            )
        made.is_untracked = True
        return made

    @property
    def public_url(self) -> str:
        """The address of the same session for an agent on another machine, such as a program in a
        box elsewhere. It begins with `gateway.public_url`, if that is set. With this address one
        can ask the model in this session, and nothing else.
        """
        _, named, rest = self._address.partition(f"/s/{self.api_key}")
        begin = self.beside.public_url if self.beside is not None and named else ""
        return f"{begin}{named}{rest}" if begin else self._address

    def role(self, name: str) -> Self:
        """A client of another role in the same rollout, such as a critic, or the other side of a
        game. The role has a session of its own. It is trained with the reward that `Result.roles`
        has under its name, and compared with the same role in the group's other rollouts.
        """
        if name == UNTRACKED:
            raise ConfigError(
                f"client.role({name!r}): a role is trained; take another name, or call "
                "client.untracked()."
            )
        return self._part(name)

    def _part(self, name: str) -> Self:
        """A client of the rollout's session of that name, which has an address of its own."""
        named = part_of(self.api_key, name)
        return self.with_options(base_url=self._address.replace(self.api_key, named), api_key=named)

    @property
    def _address(self) -> str:
        sdk: Any = self
        return str(sdk.base_url)

    def answered(self) -> None:
        if self.is_untracked and self.beside is not None:
            self.beside.trouble = ""

    def lost(self, error: APIConnectionError | APIStatusError) -> UntrackedUnavailable | None:
        """The error to raise in its place, if it says that an untracked server does not answer."""
        if not self.is_untracked:
            return None
        if isinstance(error, APIStatusError) and error.status_code in _ITS_OWN:
            return None
        where = "an engine of the run"
        if self.beside is not None and self.beside.section.url:
            where = self._address
        remedy = "see the engines' logs"
        if where.startswith("http"):
            remedy = "see that it runs and takes environment.untracked's key"
        found = UntrackedUnavailable(
            f"asking {where} by client.untracked(): {type(error).__name__}: {error}; {remedy}."
        )
        if self.beside is not None:
            self.beside.trouble = str(found)
        return found


class Client(RolloutClientMixin, AsyncOpenAI):
    """`openai.AsyncOpenAI`, for one session of a rollout."""

    def copy(self, **options: Any) -> Self:
        made = super().copy(**options)
        made.beside = self.beside
        made.is_untracked = self.is_untracked
        return made

    with_options = copy

    async def request(self, *args: Any, **options: Any) -> Any:
        """Sends a request as the SDK's method does. Waits for the answer, and for further tries."""
        try:
            answer = await super().request(*args, **options)
        except (APIConnectionError, APIStatusError) as error:
            raise self.lost(error) or error from error.__cause__
        self.answered()
        return answer


class PlainClient(RolloutClientMixin, OpenAI):
    """`openai.OpenAI`, for one session of a rollout whose agent has a thread of its own."""

    def copy(self, **options: Any) -> Self:
        made = super().copy(**options)
        made.beside = self.beside
        made.is_untracked = self.is_untracked
        return made

    with_options = copy

    def request(self, *args: Any, **options: Any) -> Any:
        """Sends a request as the SDK's method does. Waits for the answer, and for further tries."""
        try:
            answer = super().request(*args, **options)
        except (APIConnectionError, APIStatusError) as error:
            raise self.lost(error) or error from error.__cause__
        self.answered()
        return answer


class SessionClient(Client):
    """A client whose pool others use too."""

    async def close(self) -> None:
        """Does nothing: the pool is shared."""


class PlainSessionClient(PlainClient):
    """A client whose pool others use too."""

    def close(self) -> None:
        """Does nothing: the pool is shared."""

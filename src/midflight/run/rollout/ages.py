"""The age of groups that still run: the gateway's sessions, remembered by the group they belong to."""

from __future__ import annotations

from collections import defaultdict

from midflight.ports import SessionHandle, Sessions
from midflight.types import GroupKey, RolloutKey, SamplingParams, SessionRecord, Version


class GroupAges:
    """Implements `ports.Sessions` around the gateway's, and knows the oldest token of each running group (I2).

    A group's age counts its ended rollouts too; it is forgotten with the group.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._live: dict[GroupKey, set[str]] = defaultdict(set)
        self._group_of: dict[str, GroupKey] = {}
        self._ended: dict[GroupKey, Version] = {}

    def open(self, key: RolloutKey, *, sampling: SamplingParams, tracked: bool) -> SessionHandle:
        handle = self._sessions.open(key, sampling=sampling, tracked=tracked)
        self._live[key.group].add(handle.session_id)
        self._group_of[handle.session_id] = key.group
        return handle

    def close(self, session_id: str) -> SessionRecord:
        record = self._sessions.close(session_id)
        group = self._group_of.pop(session_id, None)
        if group is not None:
            self._live[group].discard(session_id)
            versions = [v for row in record.rows if (v := row.oldest_version) is not None]
            if versions:
                self._ended[group] = min(*versions, self._ended.get(group, versions[0]))
        return record

    def oldest_version(self, session_id: str) -> Version | None:
        return self._sessions.oldest_version(session_id)

    def of_group(self, key: GroupKey) -> Version | None:
        """The oldest version among the tokens of the group's rollouts so far, `None` before the first."""
        live = (self._sessions.oldest_version(session) for session in self._live.get(key, ()))
        return min((v for v in (*live, self._ended.get(key)) if v is not None), default=None)

    def forget(self, key: GroupKey) -> None:
        """The group has finished: the buffer knows its age from now on."""
        self._live.pop(key, None)
        self._ended.pop(key, None)

"""Broker groups as etcd has them, in the types of the coordinator's interface."""

from collections.abc import Iterable
from typing import Final

import msgspec

from mqmesh.coordination.etcd.keys import EtcdKeys, session_id
from mqmesh.coordination.etcd.messages import EtcdKeyValue, KeyEvent
from mqmesh.coordination.interface import (
    GroupState,
    GroupView,
    LiveReplica,
    Presence,
    SettingsRecord,
    SettingValue,
    StateRecord,
    decode,
)

MAX_GROUPS: Final = 1_024
"""Limit of the groups whose ages of presences are kept; those read first are forgotten."""


class SeenPresence(msgspec.Struct, frozen=True):
    """A presence, as this process saw it.

    Attributes:
        revision: Revision of its key.
        since_ms: Time at which this revision was seen first; monotonic clock.
        age_ms: Time from then to the last read that found the same revision.
    """

    revision: int
    since_ms: int
    age_ms: int = 0


class Ages:
    """Ages of presences, by the clock of their reader; etcd reports whole seconds only.

    A renewal puts its key anew. A process that reads the same revision twice, each time with all
    changes answered before, knows that nothing was renewed in between. A watch does not
    prove that: its member may be behind.
    """

    def __init__(self) -> None:
        self._groups: dict[str, dict[int, SeenPresence]] = {}

    def on_read(
        self, group: str, revisions: dict[int, int], sent_ms: int, now_ms: int
    ) -> dict[int, int]:
        """Takes note of a read.

        Args:
            group: Broker group.
            revisions: Revisions of all present replicas, by replica id.
            sent_ms: Time of the request; monotonic clock.
            now_ms: Time of the answer.

        Returns:
            Time in ms since the renewal of each of them, at least.
        """
        known = self._groups.pop(group, {})
        if len(self._groups) >= MAX_GROUPS:
            del self._groups[next(iter(self._groups))]
        seen = self._groups[group] = {}
        for replica_id, revision in revisions.items():
            one = known.get(replica_id)
            if one is None or one.revision != revision:
                seen[replica_id] = SeenPresence(revision, now_ms)
            else:
                age_ms = max(one.age_ms, sent_ms - one.since_ms)
                seen[replica_id] = SeenPresence(revision, one.since_ms, age_ms)
        return {replica_id: one.age_ms for replica_id, one in seen.items()}

    def on_watch(self, group: str, revisions: dict[int, int], now_ms: int) -> dict[int, int]:
        """Takes note of a watch's events; see ``on_read``."""
        seen = self._groups.setdefault(group, {})
        for replica_id, revision in revisions.items():
            one = seen.get(replica_id)
            if one is None or one.revision != revision:
                seen[replica_id] = SeenPresence(revision, now_ms)
        return {replica_id: seen[replica_id].age_ms for replica_id in revisions}


class WatchedKeys:
    """The keys of one watched group: those read, and later changes from a watch.

    Args:
        keys: Keys of the cluster.
        group: Broker group.
    """

    def __init__(self, keys: EtcdKeys, group: str) -> None:
        self._keys = keys
        self._group = group
        self._found: dict[bytes, EtcdKeyValue] = {}

    def replace(self, kvs: Iterable[EtcdKeyValue]) -> None:
        """Replaces all keys: everything was read anew."""
        self._found = {one.key: one for one in kvs}

    def apply(self, events: Iterable[KeyEvent]) -> None:
        """Takes note of keys that changed."""
        for event in events:
            if event.type == "DELETE":
                self._found.pop(event.kv.key, None)
            else:
                self._found[event.kv.key] = event.kv

    def revisions(self) -> dict[int, int]:
        """Return the revisions of the sessions, by replica id."""
        return revisions_of(self._keys, self._group, self._found.values())

    def view(self, ages: dict[int, int]) -> GroupView:
        """Return the view of the group.

        Raises:
            RemoteProtocolError: Another program has written there.
        """
        record = state_of(self._found.get(self._keys.state(self._group)))
        members = members_of(self._keys, self._group, self._found.values(), ages)
        return GroupView(self._group, record, members)


def state_of(found: EtcdKeyValue | None) -> StateRecord:
    """Return a group's record.

    Raises:
        RemoteProtocolError: The value is no record.
    """
    if found is None:
        return StateRecord(0, None)
    return StateRecord(found.mod_revision, decode(GroupState, found.value))


def settings_of(found: EtcdKeyValue | None) -> SettingsRecord:
    """Return a cluster's settings.

    Raises:
        RemoteProtocolError: The value holds no settings.
    """
    if found is None:
        return SettingsRecord(0)
    return SettingsRecord(found.mod_revision, decode(dict[str, SettingValue], found.value))


def revisions_of(keys: EtcdKeys, group: str, kvs: Iterable[EtcdKeyValue]) -> dict[int, int]:
    """Return the revisions of the sessions among some keys, by replica id."""
    found = ((keys.replica_of(group, one.key), one.mod_revision) for one in kvs)
    return {replica_id: revision for replica_id, revision in found if replica_id is not None}


def members_of(
    keys: EtcdKeys, group: str, kvs: Iterable[EtcdKeyValue], ages: dict[int, int]
) -> tuple[LiveReplica, ...]:
    """Return the sessions among some keys, by replica id.

    Raises:
        RemoteProtocolError: The value of a presence is invalid.
    """
    found = []
    for one in kvs:
        replica_id = keys.replica_of(group, one.key)
        if replica_id is not None:
            presence = decode(Presence, one.value)
            session = session_id(replica_id, one.lease)
            found.append(LiveReplica(session, presence, ages.get(replica_id, 0)))
    return tuple(sorted(found, key=lambda live: live.presence.replica_id))

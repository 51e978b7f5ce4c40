"""Members of groups and owners of queues, kept in the log where copies confirm it.

A lock is answered once the record of it is confirmed, so a new master knows every owner that may
be at work. It restores them as members and holders whose connections have just broken: those who
come back in time go on with their tokens, and only queues of the others wait.

Claims of queues without locks are kept as well, so that the next division moves few queues. They
are restored as of an earlier generation: the members of now may claim what they were not given.

A master whose log may lack owners waits for those who show up, and only behind that the log knows
all of them again. So it says since which epoch it does: one that is elected meanwhile waits, too.
"""

from collections.abc import Iterable

from mqmesh.protocol.membership import ConsumerData, Subscription
from mqmesh.roles.broker.group_state.consumer_groups import ConsumerGroups
from mqmesh.roles.broker.group_state.queue_locks import QueueKey, QueueLocks
from mqmesh.roles.broker.state_records import MemberSubscriptions, OwnersRecord, QueueOwner

_Member = tuple[str, str]
_Queue = tuple[str, str, int]
_Key = _Member | _Queue | tuple[()]


class OwnerRecords:
    """State records of the members and owners at one broker.

    Args:
        groups: Members of groups, and claims of their queues.
        locks: Locks of queues.
        is_kept: Changes are written.

    Attributes:
        changed: Members (group, client id) and queues (group, topic, queue id) that changed; an
            empty key for ``known_epoch``.
        known_epoch: Epoch of the last master that knew all owners; 0 if the log may lack some.
    """

    def __init__(self, groups: ConsumerGroups, locks: QueueLocks, *, is_kept: bool) -> None:
        self.changed: dict[_Key, None] = {}
        self.known_epoch = 0
        self._groups = groups
        self._locks = locks
        self._is_kept = is_kept
        # Records read from the log, until they are restored.
        self._members: dict[_Member, MemberSubscriptions] = {}
        self._owners: dict[_Queue, QueueOwner] = {}
        if is_kept:
            groups.on_member = self._note
            groups.claims.on_owner = locks.on_owner = self._note

    def _note(self, *key: str | int) -> None:
        self.changed[key] = None  # type: ignore[index]  # of a member or a queue

    def restore(
        self, first_generation: int, members_until_ms: int, locks_until_ms: int, now_ms: int
    ) -> None:
        """Restore members and owners of the epochs before; the log was read.

        Args:
            first_generation: Below every generation of this epoch.
            members_until_ms: Monotonic time until which members may come back.
            locks_until_ms: Monotonic time until which holders of locks may.
            now_ms: Monotonic clock.
        """
        members, owners = self._members, self._owners
        self._members, self._owners = {}, {}
        self._groups.restore(
            ((group, client_id, _data(group, one)) for (group, client_id), one in members.items()),
            members_until_ms,
            now_ms,
        )
        for (group, topic, queue_id), one in owners.items():
            if one.token:
                queue = topic, queue_id
                self._locks.restore(group, queue, one.client_id, one.token, locks_until_ms)
            self._groups.claims.claim(group, topic, queue_id, one.client_id, first_generation)
        self.changed.clear()

    def drop(self) -> None:
        """Drop what the log says of the epochs before: it may lack what came last."""
        self.known_epoch = 0
        if self._is_kept:
            # First of all that no owners are known: the rest may be lost.
            self.changed.update(dict.fromkeys([(), *self._members, *self._owners]))
        self._members, self._owners = {}, {}

    def note_known(self, epoch: int) -> None:
        """Note that the log names all owners in the epoch of this master."""
        if self._is_kept:
            self.known_epoch = epoch
            self.changed[()] = None

    def on_damaged(self) -> None:
        """Note that records of the log are damaged, which may have named owners."""
        self.known_epoch = 0

    def state_keys(self) -> Iterable[_Key]:
        """Members and queues of all groups."""
        if not self._is_kept:
            return ()
        keys: dict[_Key, None] = dict.fromkeys([(), *self._members, *self._owners])
        for name in self._groups.names():
            keys.update(((name, client_id), None) for client_id in self._groups.group(name).members)
        for group, queue in self._locks.locked():
            keys[group, *queue] = None
        for group in self._groups.claims.groups():
            for topic, queue_id, _ in self._groups.claims.of_group(group):
                keys[group, topic, queue_id] = None
        return keys

    def records_of(self, key: _Key) -> tuple[OwnersRecord]:
        """Return the state record of a member or of a queue, or of what is known."""
        if len(key) == 0:
            return (OwnersRecord("", known_epoch=self.known_epoch),)
        if len(key) == 2:
            name, client_id = key
            group = self._groups.find(name)
            data = None if group is None else group.members.get(client_id)
            member = self._members.get(key) if data is None else _record(data)
            return (OwnersRecord(name, {client_id: member}),)
        if key in self._owners:
            return (OwnersRecord(key[0], queues=[self._owners[key]]),)
        name, topic, queue_id = key
        return (OwnersRecord(name, queues=[self._owner(name, (topic, queue_id))]),)

    def apply(self, record: OwnersRecord) -> None:
        """Takes over what a record says."""
        if record.known_epoch is not None:
            self.known_epoch = record.known_epoch
        for client_id, member in record.members.items():
            if member is None:
                self._members.pop((record.group, client_id), None)
            else:
                self._members[record.group, client_id] = member
        for one in record.queues:
            if one.client_id:
                self._owners[record.group, one.topic, one.queue_id] = one
            else:
                self._owners.pop((record.group, one.topic, one.queue_id), None)

    def _owner(self, group: str, queue: QueueKey) -> QueueOwner:
        lock = self._locks.find(group, queue)
        if lock is not None:
            return QueueOwner(*queue, lock.client_id, lock.token)
        claim = self._groups.claims.find(group, *queue)
        return QueueOwner(*queue, "" if claim is None else claim.client_id)


def _record(data: ConsumerData) -> MemberSubscriptions:
    return MemberSubscriptions(
        data.message_model,
        data.consume_from_where,
        [(one.topic, one.expression, one.expression_type) for one in data.subscriptions],
        data.delivery,
        data.divides_by_number,
    )


def _data(group: str, member: MemberSubscriptions) -> ConsumerData:
    return ConsumerData(
        group,
        member.message_model,
        member.consume_from_where,
        [Subscription(*one) for one in member.subscriptions],
        member.delivery,
        member.divides_by_number,
    )

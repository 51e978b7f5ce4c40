"""Connections of members that receive, and members that lost theirs."""

from mqmesh.protocol.delivery import ReceiveResponse
from mqmesh.protocol.request import Peer
from mqmesh.roles.broker.delivery_state.runs import NOBODY
from mqmesh.roles.broker.delivery_state.windows import DeliveryWindows
from mqmesh.roles.broker.features.delivery.receive_hold import ReceiveHold
from mqmesh.roles.broker.group_state.consumer_groups import ConsumerGroups
from mqmesh.roles.broker.group_state.group_table import GroupTable

Member = tuple[str, str]
"""Group and client id."""


class MemberPeers:
    """Connections of members: a member that loses its connection keeps its leases for a while.

    Args:
        groups: Members of groups.
        group_table: Settings of groups.
        windows: Messages that groups hold.
        hold: Receives that wait.
    """

    def __init__(
        self,
        groups: ConsumerGroups,
        group_table: GroupTable,
        windows: DeliveryWindows,
        hold: ReceiveHold,
    ) -> None:
        self._groups = groups
        self._group_table = group_table
        self._windows = windows
        self._hold = hold
        self._peers: dict[Member, Peer] = {}
        self._members: dict[Peer, dict[Member, None]] = {}
        self._lost: dict[Member, int] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def meet(self, peer: Peer, member: Member, *, reports: bool) -> None:
        """Note by which connection a member comes: it is not lost, or not any more.

        Args:
            peer: The connection.
            member: The member.
            reports: It comes with a report, maybe by a connection of its own: what it holds lasts
                as long as that of its heartbeats.
        """
        known = self._peers.get(member)
        if known is peer:
            return  # nearly always
        if reports and (peer := self._groups.peer_of(member[1]) or known or peer) is known:
            return
        if known is not None:
            self._leave(known, member)
            # Nothing more goes there. Should the connection stand still, its client asks anew.
            for held in self._hold.of_peer(known):
                if (held.wanted.group, held.wanted.member) == member:
                    self._hold.release(held)
                    held.pending.done(ReceiveResponse())
        self._peers[member] = peer
        self._members.setdefault(peer, {})[member] = None
        self._lost.pop(member, None)

    def is_lost(self, member: Member) -> bool:
        """Return whether a member lost its connection, and still keeps its leases."""
        return member in self._lost

    def lose(self, peer: Peer, now_ms: int) -> None:
        """Note that a connection broke; monotonic clock."""
        for member in self._members.pop(peer, ()):
            del self._peers[member]
            self._lost[member] = now_ms + self._group_table.settings(member[0]).lost_grace_ms

    def take_lost(self, now_ms: int) -> list[Member]:
        """Forget and return the members whose connections did not come back in time."""
        found = [one for one, at in self._lost.items() if at <= now_ms]
        for member in found:
            del self._lost[member]
        return found

    def forget_gone(self) -> list[Member]:
        """Forget and return members that left and hold nothing.

        The connection of a gateway outlives its members.
        """
        gone = [one for one in self._peers if self._groups.client(one[1]) is None]
        holders = {
            (group, run.member)
            for group in {group for group, _ in gone}
            for window in self._windows.of_group(group).values()
            for run in window.runs
            if run.lease != NOBODY
        }
        found = [one for one in gone if one not in holders]
        for member in found:
            self._leave(self._peers.pop(member), member)
        return found

    def _leave(self, peer: Peer, member: Member) -> None:
        members = self._members[peer]
        del members[member]
        if not members:
            del self._members[peer]

"""Consumer groups that clients use for the first time: these give them settings."""

from mqmesh.clock import Clock
from mqmesh.protocol.delivery import DeliveryMode
from mqmesh.protocol.request import Request
from mqmesh.roles.broker.auto_creation import CreationRate, client_of
from mqmesh.roles.broker.group_state.group_table import GroupTable


class UsedGroups:
    """Groups that clients use, within the rate at which each may make some.

    Args:
        clock: Source of time.
        table: Settings of groups.
        rate: How many each client makes.
    """

    def __init__(self, clock: Clock, table: GroupTable, rate: CreationRate) -> None:
        self._clock = clock
        self._table = table
        self._rate = rate

    def note(self, request: Request, group: str, delivery: str = DeliveryMode.QUEUE) -> None:
        """Give a group settings if it has none.

        Args:
            request: Of the client that uses it.
            group: Checked by ``check_client_group``.
            delivery: Delivery mode of the client.

        Raises:
            NoPermission: The group shares messages in another way than the client.
            GroupNotFound: Groups get no settings by themselves.
            SystemBusy: There are too many groups, here or in its namespace, or this client made
                too many.
        """
        if not self._table.makes(group):
            self._table.note_used(group)
            self._table.check_delivery(group, delivery)
            return
        client, now_ms = client_of(request.peer), self._clock.monotonic_ms()
        self._rate.check(client, now_ms)
        self._table.note_used(group, delivery)
        self._rate.note(client, now_ms)

"""Structs about the clients of a gateway, which are RocketMQ's."""

from collections.abc import Collection
from heapq import nsmallest
from typing import Annotated, Final

import msgspec

from mqmesh.protocol.names import GroupName, TopicName
from mqmesh.protocol.route import Name
from mqmesh.units import MIB

MAX_GATEWAY_CLIENTS: Final = 500
"""Clients of one answer."""
MAX_ANSWER_BYTES: Final = 4 * MIB
"""An answer ends behind the client with which it is longer."""
MAX_GATEWAY_NAMES: Final = 100
"""Groups, and topics, of one client that an answer names."""
MAX_NAME_LENGTH: Final = 512


class GatewayClientsRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """GET_GATEWAY_CLIENTS: clients of RocketMQ that are connected to a gateway, in pages by client
    id and user.

    Attributes:
        after_client_id: Go on behind this one: the last of the former answer.
        after_user: Its user.
        namespace: Only clients with names of this one; "" for all that the user may see.
    """

    after_client_id: Name = ""
    after_user: Name = ""
    namespace: Name = ""


class GatewayClient(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One client of RocketMQ.

    Attributes:
        client_id: Client id.
        user: Access key that it signs with; "" for none.
        protocol: ``remoting`` or ``gRPC``.
        address: Where its newest connection comes from, ``host:port``; "" for one that is gone.
        language: As it says.
        version: As it says: of remoting RocketMQ's number of a version.
        connected: It has a connection.
        silent_ms: Since something came of it last.
        producer_groups: Groups that it sends for; of gRPC topics that it sends transactions to. Of
            these and the next two at most 100, then how many more there are.
        consumer_groups: Groups that it consumes for.
        topics: Topics that it subscribes to.
        brokers: Broker groups that it is known to.
    """

    client_id: str
    user: str
    protocol: str
    address: str
    language: str
    version: str
    connected: bool
    silent_ms: int
    producer_groups: list[GroupName]
    consumer_groups: list[GroupName]
    topics: list[TopicName]
    brokers: list[str]


def shown_names(names: Collection[str]) -> list[str]:
    """Return names in order, as far as a row has them, and how many more there are."""
    shown = [name[:MAX_NAME_LENGTH] for name in nsmallest(MAX_GATEWAY_NAMES, names)]
    more = len(names) - len(shown)
    return [*shown, f"and {more} more"] if more else shown


class GatewayClients(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Clients of a gateway, by client id and user.

    Attributes:
        clients: At most 500, and some 4 MiB.
        more: Ask again behind the last one.
    """

    clients: Annotated[list[GatewayClient], msgspec.Meta(max_length=MAX_GATEWAY_CLIENTS)]
    more: bool

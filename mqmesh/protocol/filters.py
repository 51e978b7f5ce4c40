"""Structs of brokers, filter servers and consumers about filters in Python."""

from typing import Annotated

import msgspec

from mqmesh.protocol.names import GroupName
from mqmesh.protocol.route import BrokerAddress, Name


class RegisterFilterServerRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """REGISTER_FILTER_SERVER: a filter server's heartbeat to its broker, each second; answered with
    an empty header.

    The broker forgets it when the connection breaks, or after 10 s of silence.

    Attributes:
        name: Name of the filter server.
        address: Where it listens.
        filters: Filters that it has.
        parked: Of them, those whose process died again and again.
        matched: Messages that matched, so far.
        passed_over: Messages that did not, so far.

    Errors:
        NO_PERMISSION: ``filter_server_enable`` is off.
        SYSTEM_BUSY: 16 are registered.
    """

    name: Name
    address: BrokerAddress
    filters: int = 0
    parked: int = 0
    matched: int = 0
    passed_over: int = 0


class GetFilterServerRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """GET_FILTER_SERVER: the filter server that runs the filter of a group; the same one for all
    members, while the same ones are registered.

    Attributes:
        group: Consumer group of the client.

    Errors:
        NO_PERMISSION: ``filter_server_enable`` is off.
        SERVICE_NOT_AVAILABLE: None is registered at the moment.
        MESSAGE_ILLEGAL: The name of the group.
    """

    group: GroupName


class FilterServerInfo(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to GET_FILTER_SERVER.

    Attributes:
        name: Name of the filter server.
        address: Where it listens.
    """

    name: str
    address: BrokerAddress


class UploadFilterRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """REGISTER_MESSAGE_FILTER_CLASS: uploads a filter in Python; the body is its source, UTF-8, 1
    to 65,536 bytes.

    Answered when the filter's process has confined itself and loaded the filter. To upload it again
    is harmless, and is the remedy for SUBSCRIPTION_NOT_EXIST.

    Attributes:
        group: Consumer group; filters of one group are never seen by another.
        filter_id: BLAKE2b of the source, 16 bytes, as 32 lower-case hex digits.

    Errors:
        FILTER_FAILED: No Python, no ``match``, an error while it was loaded, or it is parked.
        NO_PERMISSION: The platform cannot confine it.
        MESSAGE_ILLEGAL: The size, no UTF-8, or another id.
        SYSTEM_BUSY: ``max_filters`` or ``max_filters_per_group`` is reached.
    """

    group: GroupName
    filter_id: Annotated[str, msgspec.Meta(max_length=64)]


class UploadFilterResponse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to REGISTER_MESSAGE_FILTER_CLASS.

    Attributes:
        rungs: Layers that confine the filter there, by name.
    """

    rungs: list[str]

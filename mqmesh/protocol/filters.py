"""Structs of brokers, filter servers and consumers about filters in Python."""

from typing import Annotated

import msgspec

from mqmesh.protocol.route import BrokerAddress, Name


class RegisterFilterServerRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """REGISTER_FILTER_SERVER: a filter server's heartbeat to its broker; empty answer.

    Attributes:
        name: Name of the filter server.
        address: Where it listens.
        filters: Filters that it has.
        parked: Of them, those whose process died again and again.
        matched, passed_over: Messages so far.
    """

    name: Name
    address: BrokerAddress
    filters: int = 0
    parked: int = 0
    matched: int = 0
    passed_over: int = 0


class GetFilterServerRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """GET_FILTER_SERVER, answered with ``FilterServerInfo``.

    Attributes:
        group: Consumer group that asks.
    """

    group: Name


class FilterServerInfo(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to GET_FILTER_SERVER.

    Attributes:
        name: Name of the filter server.
        address: Where it listens.
    """

    name: str
    address: BrokerAddress


class UploadFilterRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """REGISTER_MESSAGE_FILTER_CLASS; the body is the filter's source, UTF-8.

    Uploading what is there already does no harm. The answer comes when the filter was
    loaded, or could not be.

    Attributes:
        group: Consumer group; filters of one group are never seen by another.
        filter_id: ``filtering.python_filter.filter_id`` of the source.
    """

    group: Name
    filter_id: Annotated[str, msgspec.Meta(max_length=64)]


class UploadFilterResponse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to REGISTER_MESSAGE_FILTER_CLASS.

    Attributes:
        rungs: Layers that confine the filter there, by name.
    """

    rungs: list[str]

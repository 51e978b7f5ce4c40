"""REGISTER_FILTER_SERVER and GET_FILTER_SERVER: who filters for this broker."""

import logging

import msgspec

from mqmesh.protocol.command import EMPTY_REPLY, Reply, Request, reply_with
from mqmesh.protocol.filters import GetFilterServerRequest, RegisterFilterServerRequest
from mqmesh.protocol.groups import check_client_group
from mqmesh.roles.broker.context import BrokerContext

_log = logging.getLogger(__name__)


def register_filter_server(
    context: BrokerContext, request: Request, asked: RegisterFilterServerRequest
) -> Reply:
    """A filter server says that it is there."""
    now_ms = context.clock.monotonic_ms()
    # Consumers trust the key that it proved, whatever it says.
    address = msgspec.structs.replace(asked.address, server_key=request.principal.key)
    asked = msgspec.structs.replace(asked, address=address)
    if context.filter_servers.on_register(request.peer, asked, now_ms):
        _log.info("filter server %s registered, at %s", asked.name, asked.address.tcp)
    return EMPTY_REPLY


def get_filter_server(
    context: BrokerContext, request: Request, asked: GetFilterServerRequest
) -> Reply:
    """A consumer asks where its filter shall run."""
    check_client_group(asked.group)
    return reply_with(context.filter_servers.choose(asked.group, context.clock.monotonic_ms()))

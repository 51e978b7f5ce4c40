"""REGISTER_FILTER_SERVER and GET_FILTER_SERVER: the filter servers of this broker."""

import logging
from collections.abc import Mapping

import msgspec

from mqmesh.metrics import gauge
from mqmesh.protocol.command import EMPTY_REPLY, Answer, Reply
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.filters import GetFilterServerRequest, RegisterFilterServerRequest
from mqmesh.protocol.groups import check_client_group
from mqmesh.protocol.request import Peer, Request
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.features.filter_servers.state import FilterServers
from mqmesh.roles.dispatch import Handler

_log = logging.getLogger(__name__)


class FilterServersFeature(Feature):
    """Filter servers that run consumers' filters for this broker.

    Args:
        core: The core of the broker.

    Attributes:
        servers: Filter servers that have registered.
    """

    def __init__(self, core: Core) -> None:
        config = core.settings.now
        self._clock = core.clock
        self.servers = FilterServers(config.filter_server_enable, config.broker_name)

    def commands(self) -> Mapping[RequestCode, Handler]:
        """Implement ``Feature.commands``."""
        return {
            RequestCode.REGISTER_FILTER_SERVER: self.register_filter_server,
            RequestCode.GET_FILTER_SERVER: self.get_filter_server,
        }

    def client_gone(self, peer: Peer, now_ms: int) -> None:
        """Forget a filter server whose connection broke."""
        self.servers.on_disconnect(peer)

    def register_filter_server(
        self, request: Request, header: RegisterFilterServerRequest
    ) -> Reply:
        """Registers a filter server."""
        now_ms = self._clock.monotonic_ms()
        # Consumers trust the key that it proved, whatever it says.
        address = msgspec.structs.replace(header.address, server_key=request.peer.principal.key)
        header = msgspec.structs.replace(header, address=address)
        if self.servers.on_register(request.peer, header, now_ms):
            _log.info("filter server %s registered, at %s", header.name, header.address.tcp)
        return EMPTY_REPLY

    def get_filter_server(self, request: Request, header: GetFilterServerRequest) -> Answer:
        """Returns the filter server on which a consumer's filter shall run."""
        check_client_group(header.group)
        return self.servers.choose(header.group, self._clock.monotonic_ms())

    metrics = (
        gauge(
            "filter_servers",
            "filter servers that are there",
            lambda feature: len(feature.servers.registrations),
        ),
        gauge(
            "filters",
            "filters in Python",
            lambda feature: sum(one.filters for one in feature.servers.registrations),
        ),
        gauge(
            "filters_parked",
            "filters that are parked because they kill their process",
            lambda feature: sum(one.parked for one in feature.servers.registrations),
        ),
        gauge(
            "filter_matches",
            "messages that filters wanted, as reported by the filter servers that are there",
            lambda feature: sum(one.matched for one in feature.servers.registrations),
            unit="messages",
        ),
        gauge(
            "filter_misses",
            "messages that filters did not want, likewise",
            lambda feature: sum(one.passed_over for one in feature.servers.registrations),
            unit="messages",
        ),
    )

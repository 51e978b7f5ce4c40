"""Sees to brokers that run: their settings."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from mqmesh.errors import MQMeshError, NoRoute
from mqmesh.protocol.admin import (
    ConfigChange,
    ConfigChanges,
    ConfigEntries,
    ConfigEntry,
    GetConfigRequest,
    UpdateConfigRequest,
)
from mqmesh.protocol.codes import RequestCode
from mqmesh.protocol.command import decode_header, encode_header
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.transport.endpoints import endpoint_of


class BrokerAdmin(AdminClient):
    """Administration of brokers that run; arguments as for ``AdminClient``."""

    def config(self, broker_name: str) -> dict[int, list[ConfigEntry]]:
        """All settings of a broker group, by the ids of its replicas.

        Args:
            broker_name: Broker group.

        Raises:
            NoRoute: The name servers do not know it.
            TransportError: A name server or a replica does not answer.
        """
        header = encode_header(GetConfigRequest())
        code = RequestCode.GET_BROKER_CONFIG
        return {
            broker_id: decode_header(
                ConfigEntries, self._request(endpoint, code, header).header
            ).entries
            for broker_id, endpoint in self._replicas(broker_name).items()
        }

    def set_config(
        self, broker_name: str, settings: Mapping[str, Any], unset: Iterable[str] = ()
    ) -> dict[int, list[ConfigChange]]:
        """Changes settings of every replica of a broker group, from now on and over restarts.

        A replica that is down is not changed: repeat it once it is back.

        Args:
            broker_name: Broker group.
            settings: Dotted keys and values; a text stands for what it says in TOML.
            unset: Keys that are to have the value of the configuration file again.

        Returns:
            What has another value now, by the ids of the replicas.

        Raises:
            NoRoute: The name servers do not know it.
            MessageIllegal: A key may not be changed, or a value is wrong; nothing was changed.
            BrokerError, TransportError: A replica refused or did not answer; the sentence says
                which ones had done it before. Repeating the call is safe.
        """
        header = encode_header(config_request(settings, unset))
        done: dict[int, list[ConfigChange]] = {}
        for broker_id, endpoint in self._replicas(broker_name).items():
            try:
                answer = self._request(endpoint, RequestCode.UPDATE_BROKER_CONFIG, header)
            except MQMeshError as error:
                before = ", ".join(str(one) for one in done)
                said = f" (done already at id {before})" if done else ""
                error.args = (f"broker {broker_name}, id {broker_id}: {error}{said}",)
                raise
            done[broker_id] = decode_header(ConfigChanges, answer.header).changes
        return done

    def _replicas(self, broker_name: str) -> dict[int, str]:
        """Endpoints of a group's replicas, by id; the master's first."""
        groups = {one.broker_name: one for one in self.cluster().brokers}
        if broker_name not in groups:
            known = ", ".join(sorted(groups)) or "none"
            raise NoRoute(f"no broker group {broker_name!r}; there are {known}")
        addresses = groups[broker_name].addresses
        return {one: endpoint_of(addresses[one].tcp) for one in sorted(addresses)}


def config_request(settings: Mapping[str, Any], unset: Iterable[str]) -> UpdateConfigRequest:
    """A request to change settings.

    Args:
        settings: Dotted keys and values; a text stands for what it says in TOML.
        unset: Keys that are to have the value of the start again.
    """
    said = {
        key: value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for key, value in settings.items()
    }
    return UpdateConfigRequest(said, list(unset))

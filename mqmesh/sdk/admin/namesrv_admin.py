"""Key/value configuration and drained brokers, as administrators set them at name servers."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec

from mqmesh.errors import BrokerError, MQMeshError, TransportError
from mqmesh.protocol.admin import (
    ConfigChange,
    ConfigChanges,
    ConfigEntries,
    ConfigEntry,
    GetConfigRequest,
)
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.command import decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.route import (
    KvRequest,
    KvResponse,
    Name,
    WipeWritePermRequest,
    WipeWritePermResponse,
)
from mqmesh.sdk.admin.admin import NAMESRV_TIMEOUT_MS, AdminClient, no_namesrv_answers
from mqmesh.sdk.admin.broker_admin import config_request
from mqmesh.transport.endpoints import endpoint_of

_ALL_NAMESPACES: Final = ""


class NamesrvChange(msgspec.Struct, frozen=True):
    """Result of a change, by name server; name servers know nothing of each other.

    Attributes:
        namesrvs: Name servers that have it.
        silent_namesrvs: Name servers that did not answer: repeat the call once they are back.
    """

    namesrvs: list[str]
    silent_namesrvs: list[str]


class Draining(NamesrvChange, frozen=True):
    """Result of the beginning, or the end, of draining a broker.

    Attributes:
        topic_count: Topics whose routes it changes.
    """

    topic_count: int


class NamesrvConfigChange(NamesrvChange, frozen=True):
    """Result of a change of settings.

    Attributes:
        changes: Settings with another value now, by name server.
    """

    changes: dict[str, list[ConfigChange]]


class NamesrvAdmin(AdminClient):
    """Administration of name servers; arguments as for ``AdminClient``.

    A change goes to every name server of the client. It fails when one refuses it, or none answers;
    repeating it does no harm.
    """

    # ---- Key/value configuration -----------------------------------------------------

    def put_kv(self, namespace: str, key: str, value: str) -> NamesrvChange:
        """Stores a small text under a key, for clients and brokers.

        Args:
            namespace: 1 to 255 characters.
            key: 1 to 255 characters.
            value: Up to 65,536 characters.

        Raises:
            BrokerError: There is no room (``max_kv_bytes``), or an argument is out of bounds.
            TransportError: No name server answers.
        """
        return self._change(RequestCode.PUT_KV_CONFIG, KvRequest(namespace, key, value))

    def get_kv(self, namespace: str, key: str) -> str:
        """Return the text of a key, by the first name server that answers.

        Raises:
            BrokerError: There is none.
            TransportError: No name server answers.
        """
        request = KvRequest(namespace, key)
        return self._ask_namesrv(RequestCode.GET_KV_CONFIG, request, KvResponse).pairs[key]

    def has_kv(self, namespace: str, key: str) -> bool:
        """Return whether a name server that answers has a key.

        Raises:
            BrokerError: An argument is out of bounds.
            TransportError: No name server answers.
        """
        header, code = encode_header(KvRequest(namespace, key)), RequestCode.GET_KV_CONFIG
        has_answered = False
        failures: list[TransportError] = []
        for address in self._namesrvs:
            try:
                self._request(endpoint_of(address), code, header, NAMESRV_TIMEOUT_MS)
            except TransportError as failure:
                failures.append(failure)
                continue
            except BrokerError as error:
                if error.code != ResponseCode.QUERY_NOT_FOUND:
                    raise
                has_answered = True
            else:
                return True
        if not has_answered:
            raise no_namesrv_answers(failures)
        return False

    def delete_kv(self, namespace: str, key: str) -> NamesrvChange:
        """Removes a key; one that is not there is no error.

        Raises:
            BrokerError: An argument is out of bounds.
            TransportError: No name server answers.
        """
        return self._change(RequestCode.DELETE_KV_CONFIG, KvRequest(namespace, key))

    def list_kv(self, namespace: str) -> dict[str, str]:
        """Return all keys of a namespace with their texts, by the first name server that answers.

        Raises:
            BrokerError: It has none.
            TransportError: No name server answers.
        """
        request = KvRequest(namespace)
        return self._ask_namesrv(RequestCode.LIST_KV_CONFIG, request, KvResponse).pairs

    def kv_namespaces(self) -> list[str]:
        """Namespaces that have keys, sorted.

        Raises:
            TransportError: No name server answers.
        """
        request = KvRequest(_ALL_NAMESPACES)
        found = self._ask_namesrv(RequestCode.LIST_KV_CONFIG, request, KvResponse)
        return sorted(found.namespaces)

    # ---- Draining --------------------------------------------------------------------

    def drain(self, broker_name: Name) -> Draining:
        """Drains a broker: routes lose its right to be written to, so producers go elsewhere.

        Consumers go on reading it; when they are done it can be stopped. It lasts, also over
        restarts of the broker and of name servers, until ``undrain``.

        Raises:
            BrokerError: No name server knows the broker.
            TransportError: No name server answers.
        """
        return self._set_draining(broker_name, restore=False)

    def undrain(self, broker_name: Name) -> Draining:
        """Ends the drain of a broker: producers use it again.

        Raises:
            BrokerError: No name server knows the broker.
            TransportError: No name server answers.
        """
        return self._set_draining(broker_name, restore=True)

    # ---- Settings --------------------------------------------------------------------

    def config(self, address: str) -> list[ConfigEntry]:
        """Return all settings of a name server.

        Args:
            address: ``host:port``.

        Raises:
            TransportError: It does not answer.
        """
        header = encode_header(GetConfigRequest())
        code = RequestCode.GET_NAMESRV_CONFIG
        answer = self._request(endpoint_of(address), code, header)
        return decode_header(ConfigEntries, answer.header).entries

    def set_config(
        self, settings: Mapping[str, Any], unset: Iterable[str] = ()
    ) -> NamesrvConfigChange:
        """Changes settings of name servers from now on, and over restarts if they have a data_dir.

        Args:
            settings: Keys and values; ``broker_expire_ms`` and ``scan_interval_ms`` may be changed.
            unset: Keys that are to have the value of the configuration file again.

        Raises:
            MessageIllegal: A key may not be changed, or a value is wrong.
            TransportError: No name server answers.
        """
        found: list[list[ConfigChange]] = []

        def note(header: memoryview) -> None:
            found.append(decode_header(ConfigChanges, header).changes)

        request = config_request(settings, unset)
        done = self._change(RequestCode.UPDATE_NAMESRV_CONFIG, request, note)
        changes = dict(zip(done.namesrvs, found, strict=True))
        return NamesrvConfigChange(done.namesrvs, done.silent_namesrvs, changes)

    # ---- Helpers ---------------------------------------------------------------------

    def _set_draining(self, broker_name: str, *, restore: bool) -> Draining:
        counts: list[int] = []

        def note(header: memoryview) -> None:
            counts.append(decode_header(WipeWritePermResponse, header).topic_count)

        request = WipeWritePermRequest(broker_name, restore)
        done = self._change(RequestCode.WIPE_WRITE_PERM_OF_BROKER, request, note)
        return Draining(done.namesrvs, done.silent_namesrvs, max(counts))

    def _change(
        self,
        code: RequestCode,
        request: msgspec.Struct,
        note: Callable[[memoryview], None] = lambda header: None,
    ) -> NamesrvChange:
        header = encode_header(request)
        done: list[str] = []
        silent: list[str] = []
        failures: list[TransportError] = []
        for address in self._namesrvs:
            try:
                answer = self._request(endpoint_of(address), code, header, NAMESRV_TIMEOUT_MS)
            except TransportError as failure:
                failures.append(failure)
                silent.append(address)
                continue
            except MQMeshError as error:
                before = f" (done already at {', '.join(done)})" if done else ""
                error.args = (f"name server {address}: {error}{before}", *error.args[1:])
                raise
            done.append(address)
            note(answer.header)
        if not done:
            raise no_namesrv_answers(failures)
        return NamesrvChange(done, silent)

"""The access list of a cluster, for administrators."""

from typing import Final

import msgspec

from mqmesh.errors import MQMeshError, TransportError
from mqmesh.protocol.admin import AccessListInfo, GetAccessListRequest, UpdateAccessListRequest
from mqmesh.protocol.command import decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.sdk.admin.admin import AdminClient, no_namesrv_answers
from mqmesh.transport.endpoints import endpoint_of

NO_TEXT: Final = (1 << 53) - 1


class AccessListState(msgspec.Struct, frozen=True):
    """Access list in force at one process.

    Attributes:
        where: Its address.
        version: Of its list; 0 if it does not answer.
        digest: Equal for lists that say the same.
        problem: Why it does not answer, or took no list; "" if it did.
    """

    where: str
    version: int
    digest: str
    problem: str = ""


class AccessClient(AdminClient):
    """Client that reads and changes the access list; arguments as of ``AdminClient``."""

    def access_list(self) -> AccessListInfo:
        """Return the list in force: the newest of all name servers, since one may have been down.

        Raises:
            TransportError: No name server answers.
            NoPermission: It is not for this user.
            UnsupportedCommand: Security is off there.
        """
        header = encode_header(GetAccessListRequest())
        found: list[AccessListInfo] = []
        failures: list[TransportError] = []
        for where in self._namesrvs:
            try:
                answer = self._request(endpoint_of(where), RequestCode.GET_ACCESS_LIST, header)
                found.append(decode_header(AccessListInfo, answer.header))
            except TransportError as error:
                failures.append(error)
        if not found:
            raise no_namesrv_answers(failures)
        return max(found, key=lambda one: one.version)

    def access_states(self) -> list[AccessListState]:
        """Return the version in force at each name server and broker."""
        header = encode_header(GetAccessListRequest(NO_TEXT))
        return [self._state(where, header) for where in self._everybody()]

    def put_access_list(self, text: str, expected_version: int) -> list[AccessListState]:
        """Puts an access list into force at all name servers and brokers; may be repeated.

        Processes that did not get it keep the former one.

        Args:
            text: TOML, with the version after ``expected_version``.
            expected_version: Version that was changed.

        Returns:
            Those that did not take it, with the reason.

        Raises:
            MessageIllegal: The first process refuses the list, so nothing is changed.
            NoPermission: It is for administrators.
        """
        header = encode_header(UpdateAccessListRequest(text, expected_version))
        failed = []
        for number, where in enumerate(self._everybody()):
            try:
                self._request(endpoint_of(where), RequestCode.UPDATE_ACCESS_LIST, header)
            except MQMeshError as error:
                if not number and not error.retriable:
                    raise
                failed.append(AccessListState(where, 0, "", str(error)))
        return failed

    def _everybody(self) -> list[str]:
        groups = self.cluster().brokers
        brokers = {one.tcp for group in groups for one in group.addresses.values()}
        return [*self._namesrvs, *sorted(brokers)]

    def _state(self, where: str, header: bytes) -> AccessListState:
        try:
            answer = self._request(endpoint_of(where), RequestCode.GET_ACCESS_LIST, header)
            info = decode_header(AccessListInfo, answer.header)
        except MQMeshError as error:
            return AccessListState(where, 0, "", str(error))
        return AccessListState(where, info.version, info.digest)

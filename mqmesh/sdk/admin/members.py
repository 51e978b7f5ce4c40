"""Members of consumer groups: their state, and messages handed to them."""

from typing import Final

from mqmesh.errors import BrokerError, ClientNotOnline, GroupNotFound, RequestTimeout
from mqmesh.message import check_consumer_group
from mqmesh.protocol.client_rpc import HandedOver, HandToRequest, RunningInfo, RunningInfoRequest
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.command import decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.sdk.admin.group_admin import GroupAdmin
from mqmesh.sdk.admin.queries import QueryClient, parse_offset_message_id
from mqmesh.transport.endpoints import endpoint_of

HAND_TO_TIMEOUT_MS: Final = 15_000


class MemberClient(QueryClient, GroupAdmin):
    """Client for requests to members of consumer groups, one at a time, in the caller's thread."""

    def running_info(self, group: str, client_id: str, *, with_stacks: bool = False) -> RunningInfo:
        """Return the state of a running consumer: settings, queues, messages at hand, and its work.

        Args:
            group: Consumer group.
            client_id: Member; ``connections`` lists them.
            with_stacks: Also where its threads and tasks stand.

        Raises:
            InvalidArgument: The name is illegal.
            GroupNotFound: The group has no members.
            ClientNotOnline: The client is no member, or does not answer.
            NoPermission: It reports nothing (``admin_introspection = False``).
            TransportError, BrokerError: A name server or broker does not answer, or refuses.
        """
        header = encode_header(
            RunningInfoRequest(check_consumer_group(group), client_id, with_stacks)
        )
        refusal: GroupNotFound | ClientNotOnline | None = None
        for endpoint in self._masters().values():
            try:
                answer = self._request(endpoint, RequestCode.GET_CONSUMER_RUNNING_INFO, header)
            except GroupNotFound as error:
                refusal = refusal or error
            except ClientNotOnline as error:
                refusal = error
            except RequestTimeout as error:
                raise ClientNotOnline(f"member {client_id} of {group}: {error}") from error
            else:
                return decode_header(RunningInfo, answer.header)
        assert refusal is not None, "there is at least one master"
        raise refusal

    def hand_to(self, message_id: str, group: str, client_id: str) -> HandedOver:
        """Hands a message to a member of a group, which consumes it at once; no offset moves.

        The listener sees that by ``message.is_handed_over``.

        Args:
            message_id: A message id, or an offset message id.
            group: Consumer group, which neither broadcasts nor consumes in order.
            client_id: Member; ``connections`` lists them.

        Returns:
            Result of the delivery within 10 s.

        Raises:
            InvalidArgument: That is no id, or there is no such message.
            GroupNotFound: The group has no members.
            ClientNotOnline: The client is no member, or went away.
            BrokerError: The group or the message does not permit it, among other reasons.
            TransportError: A name server or broker does not answer.
        """
        check_consumer_group(group)
        host, offset, ordinal = self._place_of(message_id)
        answer = self._request(
            endpoint_of(host),
            RequestCode.CONSUME_MESSAGE_DIRECTLY,
            encode_header(HandToRequest(group, client_id, offset, ordinal)),
            HAND_TO_TIMEOUT_MS,
        )
        return decode_header(HandedOver, answer.header)

    def _place_of(self, message_id: str) -> tuple[str, int, int]:
        """Return broker, log offset and number in its batch; of copies, of the one in its topic."""
        if "#" in message_id:
            return parse_offset_message_id(message_id)
        found = self.by_id(message_id).messages
        if not found:
            raise BrokerError(
                f"no broker has a message with the id {message_id}",
                code=ResponseCode.QUERY_NOT_FOUND,
            )
        own = [one for one in found if one.info.topic == one.topic]
        message = (own or found)[0]
        return message.store_host, message.commitlog_offset, message.ordinal

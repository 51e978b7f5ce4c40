"""Administration of half messages that wait for their decision."""

import msgspec

from mqmesh.batch.record_batch import check_batch, decode_messages
from mqmesh.errors import BrokerError, MessageIllegal, MQMeshError
from mqmesh.message import StoredMessage, check_group, check_topic, parse_message_id
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.command import decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.transactions import (
    Decision,
    EndHalfMessageRequest,
    EndOutcome,
    HalfInfo,
    HalfList,
    HalfState,
    ListHalfMessagesRequest,
    ViewHalfMessageRequest,
    decode_end_outcomes,
)
from mqmesh.sdk.admin.admin import AdminClient


class HalfMessage(msgspec.Struct, frozen=True):
    """A half message that waits.

    Attributes:
        broker_name: Broker group that holds it.
        info: Its broker's record of it.
        message: Its contents, None in a list.
    """

    broker_name: str
    info: HalfInfo
    message: StoredMessage | None = None

    @property
    def is_parked(self) -> bool:
        """True after the last allowed check, in vain; the broker sends no more checks."""
        return self.info.state == HalfState.PARKED


class HalfMessages(msgspec.Struct, frozen=True):
    """Half messages that wait.

    Attributes:
        messages: Oldest first.
        pending_count: All that wait and are not parked, listed or not.
        parked_count: All that are parked.
    """

    messages: list[HalfMessage]
    pending_count: int
    parked_count: int


class TransactionAdmin(AdminClient):
    """Client that lists, shows and ends half messages, one at a time, in the caller's thread."""

    def half_messages(
        self,
        *,
        group: str = "",
        topic: str = "",
        min_age_ms: int = 0,
        parked: bool = False,
        max_count: int = 100,
    ) -> HalfMessages:
        """Return the messages that wait for their decision, at all brokers.

        Args:
            group: Only of this producer group.
            topic: Only for this topic.
            min_age_ms: Only those that are at least so old.
            parked: Only parked ones.
            max_count: Messages to list, 1 to 10,000.

        Raises:
            InvalidArgument: A name that is none.
            NoRoute: No broker is known.
            TransportError, BrokerError: A broker does not answer, or refuses.
        """
        request = ListHalfMessagesRequest(
            check_group(group) if group else "",
            check_topic(topic) if topic else "",
            min_age_ms,
            parked,
            max_count,
            self.namespace,
        )
        lists = self.ask_masters(RequestCode.LIST_HALF_MESSAGES, request, HalfList)
        found = [HalfMessage(name, info) for name, one in lists.items() for info in one.messages]
        found.sort(key=lambda one: one.info.store_timestamp)
        return HalfMessages(
            found[:max_count],
            sum(one.pending_count for one in lists.values()),
            sum(one.parked_count for one in lists.values()),
        )

    def half_message(self, message_id: str) -> HalfMessage:
        """Return one half message that waits, with its contents.

        Raises:
            InvalidArgument: That is no message id.
            BrokerError: It waits at no broker.
            TransportError: A broker does not answer.
        """
        parse_message_id(message_id)
        header = encode_header(ViewHalfMessageRequest(message_id))
        for name, endpoint in self._masters().items():
            try:
                answer = self._request(endpoint, RequestCode.VIEW_HALF_MESSAGE, header)
            except BrokerError as error:
                if error.code != ResponseCode.QUERY_NOT_FOUND:
                    raise
                continue
            batch = bytes(answer.body)
            (message,) = decode_messages(
                batch, check_batch(batch), broker_name=name, namespace=self.namespace
            )
            return HalfMessage(name, decode_header(HalfInfo, answer.header), message)
        raise _not_found(message_id)

    def end_half_message(self, message_id: str, decision: Decision) -> str:
        """Commits or rolls back a half message that waits, parked or not.

        The caller should know that the local transaction ended so.

        Returns:
            Name of the broker group that held it.

        Raises:
            InvalidArgument: That is no message id.
            BrokerError: It waits at no broker, or cannot be ended so.
            TransportError: A broker does not answer; repeating the call is safe.
        """
        parse_message_id(message_id)
        header = encode_header(EndHalfMessageRequest(message_id, int(decision)))
        failure: MQMeshError | None = None
        for name, endpoint in self._masters().items():
            try:
                answer = self._request(endpoint, RequestCode.END_HALF_MESSAGE, header)
            except BrokerError as error:
                if error.code != ResponseCode.QUERY_NOT_FOUND:
                    failure = error
                continue
            (outcome,) = decode_end_outcomes(answer.body, 1)
            if outcome not in (EndOutcome.ENDED, EndOutcome.ENDED_BEFORE):
                raise MessageIllegal(
                    f"half message {message_id} cannot be ended by {decision.name}: {outcome.name}"
                )
            return name
        raise failure or _not_found(message_id)


def _not_found(message_id: str) -> BrokerError:
    return BrokerError(
        f"half message {message_id} waits at no broker: it has ended, or never was",
        code=ResponseCode.QUERY_NOT_FOUND,
    )

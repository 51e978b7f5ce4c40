"""Cancels delayed messages by their ids."""

from mqmesh.errors import BrokerError, CancelRefused, MQMeshError, TransportError
from mqmesh.message import parse_message_id
from mqmesh.protocol.codes import RequestCode, ResponseCode
from mqmesh.protocol.command import encode_header
from mqmesh.protocol.schedule import CancelDelayedRequest
from mqmesh.sdk.admin import AdminClient


class DelayClient(AdminClient):
    """Cancels delayed messages, one at a time, in the caller's thread.

    Whoever has the ``SendResult`` can use ``Producer.cancel_delayed``, which asks one broker
    and not all of them. Arguments as of ``AdminClient``.
    """

    def cancel(self, message_id: str) -> list[str]:
        """Cancels a message wherever it waits.

        Args:
            message_id: 32 hex digits.

        Returns:
            Broker groups at which it waited: one, unless a send was repeated at another.

        Raises:
            InvalidArgument: It is no message id.
            CancelRefused: It was delivered or cancelled before, or is being delivered.
            BrokerError: No broker knows it.
            TransportError: A broker did not answer, and no other had it.
        """
        producer_id, sequence = parse_message_id(message_id)
        header = encode_header(CancelDelayedRequest(producer_id, sequence))
        cancelled: list[str] = []
        errors: list[MQMeshError] = []
        for name, endpoint in self._masters().items():
            try:
                self._request(endpoint, RequestCode.CANCEL_DELAYED, header)
                cancelled.append(name)
            except (BrokerError, TransportError) as error:
                errors.append(error)
        if not cancelled and errors:
            # A broker that knows it says most, one that does not, least.
            raise min(errors, key=_rank)
        return cancelled


def _rank(error: MQMeshError) -> int:
    if isinstance(error, CancelRefused):
        return 0
    unknown = isinstance(error, BrokerError) and error.code == ResponseCode.QUERY_NOT_FOUND
    return 2 if unknown else 1

"""Error answers of servers: the same code, remark and count by each transport."""

from collections.abc import Callable
from typing import Final

from mqmesh.errors import MQMeshError
from mqmesh.protocol.codes import ResponseCode, code_of, error_header
from mqmesh.protocol.command import (
    MAX_REMARK_CHARACTERS,
    ONEWAY,
    RESPONSE,
    encode_frame,
    encode_header,
)

NoteRefusal = Callable[[int, str], None]
"""Function that counts and logs a refusal: response code and remark."""

_ANSWERS: Final = frozenset(
    {
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.QUERY_NOT_FOUND,
        ResponseCode.CONSUMER_GROUP_NOT_EXIST,
        ResponseCode.CLIENT_NOT_ONLINE,
    }
)
"""Codes that count as an answer rather than a refusal: something is not there."""


def error_frame(
    opaque: int, flags: int, error: Exception, note_refusal: NoteRefusal
) -> bytes | None:
    """Return the frame that answers a request with an error; None where none may be sent.

    Args:
        opaque: Opaque of the request.
        flags: Flags of the request.
        error: Error that the handler raised. The text of a bug is not shown to clients.
        note_refusal: Called unless the error only says that something is not there.
    """
    if isinstance(error, MQMeshError):
        remark = str(error)
    else:
        # The text of a bug may hold any data; it belongs only into the server's log.
        remark = f"internal error ({type(error).__name__}); see the server's log"
    remark = remark[:MAX_REMARK_CHARACTERS].encode(errors="replace").decode()
    code = vars(error).get("code") or code_of(error)
    if code not in _ANSWERS:
        note_refusal(code, remark)
    if flags & (ONEWAY | RESPONSE):
        return None
    header = encode_header(error_header(error, remark))
    return encode_frame(code, opaque, header=header, flags=RESPONSE)

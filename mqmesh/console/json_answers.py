"""JSON answers of the console: encoded results, and HTTP statuses of errors. Pure."""

from http import HTTPStatus
from typing import Any, Final

import msgspec
from starlette.exceptions import HTTPException

from mqmesh.errors import (
    BrokerError,
    ConfigError,
    GroupNotFound,
    MQMeshError,
    NoPermission,
    OffsetIllegal,
    RequestTimeout,
    TopicNotFound,
    TransportError,
)
from mqmesh.protocol.codes import ResponseCode

EXACT_MAX: Final = (1 << 53) - 1
"""Largest integer that JavaScript keeps exact; larger ones are texts."""

_STATUSES: Final[tuple[tuple[type[MQMeshError], HTTPStatus], ...]] = (
    (NoPermission, HTTPStatus.FORBIDDEN),
    (TopicNotFound, HTTPStatus.NOT_FOUND),
    (GroupNotFound, HTTPStatus.NOT_FOUND),
    (OffsetIllegal, HTTPStatus.NOT_FOUND),
    (ConfigError, HTTPStatus.BAD_REQUEST),
    (RequestTimeout, HTTPStatus.GATEWAY_TIMEOUT),
    (TransportError, HTTPStatus.SERVICE_UNAVAILABLE),
    (MQMeshError, HTTPStatus.CONFLICT),
)


def status_of(error: Exception) -> tuple[int, str]:
    """Return the HTTP status of an error, and a sentence."""
    if isinstance(error, BrokerError) and error.code == ResponseCode.QUERY_NOT_FOUND:
        return HTTPStatus.NOT_FOUND, str(error)
    for kind, status in _STATUSES:
        if isinstance(error, kind):
            return status, str(error)
    if isinstance(error, HTTPException):
        is_missing = error.status_code == HTTPStatus.NOT_FOUND
        return error.status_code, "there is no such page" if is_missing else error.detail
    return HTTPStatus.INTERNAL_SERVER_ERROR, "the console has a bug; its log has the traceback"


def encode_json(value: Any) -> bytes:
    """Encode a result; integers beyond 2^53 and bytes become texts (bytes in base64)."""
    return msgspec.json.encode(_exact(msgspec.to_builtins(value, str_keys=True)))


def _exact(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _exact(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_exact(one) for one in value]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > EXACT_MAX:
        return str(value)
    return value

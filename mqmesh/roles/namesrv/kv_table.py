"""Key/value configuration by namespace. Pure."""

from mqmesh.errors import BrokerError, InvalidArgument, SystemBusy
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.route import KvRequest
from mqmesh.roles.namesrv.effects import Effect, Persist

_PAIR_OVERHEAD = 64
"""Bytes counted for a pair beside its text, so that empty values are not free."""


class KvTable:
    """Small texts that administrators leave for clients and brokers.

    Args:
        max_bytes: Limit of all pairs together, the setting ``max_kv_bytes``.
        pairs: Pairs of before, by namespace.
    """

    def __init__(self, max_bytes: int, pairs: dict[str, dict[str, str]] | None = None) -> None:
        self._max_bytes = max_bytes
        self._pairs = pairs or {}
        self._size = sum(
            _size_of(namespace, key, value)
            for namespace, content in self._pairs.items()
            for key, value in content.items()
        )

    def put(self, request: KvRequest) -> list[Effect]:
        """Sets a key.

        Raises:
            InvalidArgument: The key is empty.
            SystemBusy: No capacity is left.
        """
        _check_key(request)
        old = self._pairs.get(request.namespace, {}).get(request.key)
        if old == request.value:
            return []
        size = self._size + _size_of(request.namespace, request.key, request.value)
        if old is not None:
            size -= _size_of(request.namespace, request.key, old)
        if size > self._max_bytes:
            raise SystemBusy(
                f"the configuration would have {size} bytes (max_kv_bytes = {self._max_bytes})"
            )
        self._size = size
        self._pairs.setdefault(request.namespace, {})[request.key] = request.value
        return [Persist()]

    def get(self, request: KvRequest) -> dict[str, str]:
        """Return one pair.

        Raises:
            InvalidArgument: The key is empty.
            BrokerError: With QUERY_NOT_FOUND, it does not exist.
        """
        _check_key(request)
        value = self._pairs.get(request.namespace, {}).get(request.key)
        if value is None:
            raise _not_found(f"key {request.key!r} does not exist", request.namespace)
        return {request.key: value}

    def delete(self, request: KvRequest) -> list[Effect]:
        """Removes a key; removing one that does not exist is no error.

        Raises:
            InvalidArgument: The key is empty.
        """
        _check_key(request)
        content = self._pairs.get(request.namespace, {})
        value = content.pop(request.key, None)
        if value is None:
            return []
        self._size -= _size_of(request.namespace, request.key, value)
        if not content:
            del self._pairs[request.namespace]
        return [Persist()]

    def list_namespace(self, request: KvRequest) -> dict[str, str]:
        """Return all pairs of a namespace.

        Raises:
            BrokerError: With QUERY_NOT_FOUND, it has none.
        """
        content = self._pairs.get(request.namespace)
        if not content:
            raise _not_found("there is no key", request.namespace)
        return dict(content)

    def namespaces(self) -> list[str]:
        """Return the namespaces that have keys."""
        return list(self._pairs)

    def dump(self) -> dict[str, dict[str, str]]:
        """Return everything, by namespace."""
        return self._pairs


def _check_key(request: KvRequest) -> None:
    if not request.namespace:
        raise InvalidArgument("the namespace is empty; 1 to 255 characters are allowed")
    if not request.key:
        raise InvalidArgument("the key is empty; 1 to 255 characters are allowed")


def _size_of(namespace: str, key: str, value: str) -> int:
    return _PAIR_OVERHEAD + len(namespace) + len(key) + len(value)


def _not_found(what: str, namespace: str) -> BrokerError:
    return BrokerError(f"{what} in namespace {namespace!r}", code=ResponseCode.QUERY_NOT_FOUND)

"""TLS and plain text on one port: the first byte of a connection tells them apart.

A stream of TLS is a ``ByteStream`` on another one. It uses Python's ``ssl`` in memory, so it works
on real and on simulated connections alike.
"""

import contextlib
import logging
import ssl
from collections.abc import Callable
from typing import Final

from mqmesh.certificates import ServerCertificate
from mqmesh.transport.interface import ByteStream, Loop, StreamHandler
from mqmesh.units import KIB

HANDSHAKE: Final = 0x16
"""First byte of every connection of TLS; a frame of RocketMQ that begins so would have 352 MiB."""
HANDSHAKE_MS: Final = 5_000
"""Time for a handshake, and for the first byte if only TLS is served."""
MOST_HANDSHAKES: Final = 256
"""Handshakes under way at a time; further connections are ended."""
MAX_HANDSHAKE_BYTES: Final = 64 * KIB
READ_BYTES: Final = 256 * KIB

_log = logging.getLogger(__name__)


class TlsGate:
    """Acceptor of connections that may speak TLS.

    Args:
        certificate: Certificate of the server.
        only_tls: End connections that speak plain text.

    Attributes:
        refused: Number of connections that were ended: with a broken, a slow or no handshake, or
            with plain text.
        handshakes: Number of handshakes in progress.
    """

    def __init__(self, certificate: ServerCertificate, *, only_tls: bool) -> None:
        self._certificate = certificate
        self._only_tls = only_tls
        self.refused = 0
        self.handshakes = 0

    def guard(
        self, loop: Loop, accept: Callable[[ByteStream], None]
    ) -> Callable[[ByteStream], None]:
        """Return an acceptor of plain connections, which hands streams on.

        Args:
            loop: Loop of the connections.
            accept: Called with each stream, which it starts or closes.
        """
        return lambda stream: accept(GuardedStream(stream, loop, self))

    def begin(self) -> ssl.SSLContext | None:
        """Return the context of a new handshake; None if too many are under way."""
        if self.handshakes >= MOST_HANDSHAKES:
            return None
        self.handshakes += 1
        return self._certificate.context

    def takes_plain(self) -> bool:
        """Return True if connections may speak plain text."""
        return not self._only_tls


class GuardedStream:
    """A connection that speaks TLS or plain text, which its first byte decides.

    Args:
        stream: The connection below.
        loop: Loop of the connection.
        gate: Gate with certificate and limits.
    """

    def __init__(self, stream: ByteStream, loop: Loop, gate: TlsGate) -> None:
        self._stream = stream
        self._loop = loop
        self._gate = gate
        self._handler: StreamHandler
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls: ssl.SSLObject | None = None
        self._is_plain = self._is_shaking = self._is_paused = False
        self._came_bytes = 0

    @property
    def peer(self) -> str:
        """Other end: ``host:port``."""
        return self._stream.peer

    @property
    def waiting_bytes(self) -> int:
        """Bytes that were written and that the system has not taken yet."""
        return self._stream.waiting_bytes

    @property
    def is_closed(self) -> bool:
        """True if no more bytes are written or arrive."""
        return self._stream.is_closed

    # ---- For the owner -------------------------------------------------------------------

    def start(self, handler: StreamHandler) -> None:
        """Give arriving bytes to this handler, from the next turn on."""
        self._handler = handler
        self._stream.start(self)
        if not self._gate.takes_plain():
            self._loop.call_later(HANDSHAKE_MS, self._end_if_silent)

    def write(self, *parts: bytes | memoryview) -> None:
        """Write bytes, now or when the system takes them; never blocks."""
        if self._tls is None:
            self._stream.write(*parts)
            return
        data = memoryview(b"".join(parts))
        try:
            while data and not self.is_closed:
                data = data[self._tls.write(data) :]
        except ssl.SSLError as error:
            _log.info("nothing can be written to %s: %s", self.peer, error)
            self._loop.call_later(0, self._lose)
        self._flush()

    def pause(self) -> None:
        """Read nothing until ``resume``."""
        self._is_paused = True
        self._stream.pause()

    def resume(self) -> None:
        """Read again."""
        self._is_paused = False
        self._stream.resume()
        if self._tls is not None:
            self._loop.call_later(0, self._give)  # decrypted bytes, or bytes to decrypt

    def close(self) -> None:
        """End the connection; written bytes that the system takes at once are still sent."""
        if self.is_closed:
            return
        if self._tls is not None and not self._is_shaking:
            with contextlib.suppress(ssl.SSLError):
                self._tls.unwrap()  # announces the end; no answer is waited for
            self._flush()
        self._end()

    # ---- Of the connection below ---------------------------------------------------------

    def on_bytes(self, data: bytes) -> None:
        """Take bytes that arrived."""
        if self._is_plain:
            self._handler.on_bytes(data)
            return
        if self._tls is None:
            if not data:
                return
            if data[0] != HANDSHAKE and self._gate.takes_plain():
                self._is_plain = True
                self._handler.on_bytes(data)
                return
            context = self._gate.begin() if data[0] == HANDSHAKE else None
            if context is None:
                self._refuse("it speaks no TLS, or too many handshakes are under way")
                return
            self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
            self._is_shaking = True
            self._loop.call_later(HANDSHAKE_MS, self._end_if_slow)
        self._incoming.write(data)
        if self._is_shaking:
            self._came_bytes += len(data)
            self._shake_hands()
        self._give()

    def on_stuck(self) -> None:
        """Note that the system takes no more of the written bytes for now."""
        self._handler.on_stuck()

    def on_drained(self) -> None:
        """Note that all written bytes have left, after some of them had to wait."""
        self._handler.on_drained()

    def on_closed(self) -> None:
        """Note the end of the connection."""
        self._shaken()
        self._handler.on_closed()

    # ---- TLS -----------------------------------------------------------------------------

    def _shake_hands(self) -> None:
        assert self._tls is not None
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            if self._came_bytes > MAX_HANDSHAKE_BYTES:
                self._refuse(f"a handshake of over {MAX_HANDSHAKE_BYTES} bytes")
        except ssl.SSLError as error:
            self._flush()  # the alert
            self._refuse(f"a handshake that failed: {error}")
        else:
            self._shaken()
            self._flush()

    def _give(self) -> None:
        """Give the owner the decrypted bytes."""
        while not (self._is_paused or self.is_closed or self._is_shaking):
            assert self._tls is not None
            try:
                data = self._tls.read(READ_BYTES)
            except ssl.SSLWantReadError:
                break
            except ssl.SSLError as error:
                _log.info("%s breaks TLS: %s", self.peer, error)
                data = b""
            if not data:
                self._lose()
                return
            self._handler.on_bytes(data)
        self._flush()

    def _flush(self) -> None:
        data = self._outgoing.read()
        if data:
            self._stream.write(data)

    def _shaken(self) -> None:
        """Note the end of a handshake, successful or not."""
        if self._is_shaking:
            self._is_shaking = False
            self._gate.handshakes -= 1

    def _end_if_slow(self) -> None:
        if self._is_shaking:
            self._refuse(f"no handshake in {HANDSHAKE_MS} ms")

    def _end_if_silent(self) -> None:
        if self._tls is None and not self.is_closed:
            self._refuse(f"nothing came in {HANDSHAKE_MS} ms")

    def _refuse(self, why: str) -> None:
        self._gate.refused += 1
        _log.debug("the connection of %s is ended: %s", self.peer, why)
        self._lose()

    def _lose(self) -> None:
        """End the connection, and notify the owner."""
        if not self.is_closed:
            self._end()
            self._handler.on_closed()

    def _end(self) -> None:
        self._shaken()
        self._stream.close()

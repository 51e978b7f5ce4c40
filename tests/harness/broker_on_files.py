"""A broker on files, without sockets and threads: for tests in which it dies."""

from __future__ import annotations

from typing import Any

from harness.peers import KeptAnswers
from harness.served import features_on, served
from harness.store_files import SEGMENT_BYTES, StoreFiles
from mqmesh.protocol.command import Reply, decode_frame, encode_frame, encode_header
from mqmesh.protocol.request import Request
from mqmesh.roles.broker.config import BrokerConfig, BrokerStoreConfig
from mqmesh.testing.clock import ManualClock


class BrokerOnFiles:
    """A broker whose handlers are called.

    Args:
        files: Of its store, with segments of ``SEGMENT_BYTES``.

    Attributes:
        store: The store.
        features: The features.
        clock: Source of time.
    """

    lives = 0

    def __init__(self, files: StoreFiles) -> None:
        self.store = files.open()
        self.clock = ManualClock()
        self._kept = KeptAnswers()
        self._peer = self._kept.peer(b"peer")
        storage = BrokerStoreConfig(mapped_file_size_commit_log=SEGMENT_BYTES)
        config = BrokerConfig(store_path_root_dir=str(files.directory), storage=storage)
        BrokerOnFiles.lives += 1
        self.features = features_on(
            self.store,
            config,
            self.clock,
            is_kept=True,
            instance_id=BrokerOnFiles.lives,
            seed=BrokerOnFiles.lives,
        )
        self.features.load()
        self.features.state.half_messages.recover(
            self.store, None, wall_ms=self.clock.wall_ms(), now_ms=self.clock.monotonic_ms()
        )
        self.features.core.state.save()
        self._handlers = served(self.features)
        self.turn()

    def turn(self) -> None:
        """Ends a turn of the loop."""
        self.features.transactions.finish()
        self.features.writes.write()

    def ask(self, code: int, header: Any, *body: bytes) -> Reply:
        """Answers a request that must succeed."""
        data = header if isinstance(header, bytes) else encode_header(header)
        frame = encode_frame(code, 1, *body, header=data)
        reply = self._handlers[code](Request(self._peer, decode_frame(frame)))
        self.turn()
        answer = self._kept.answers.pop(1) if reply is None else reply
        assert isinstance(answer, Reply), answer
        assert not answer.code
        return answer

    def close(self) -> None:
        """Stops in order."""
        self.features.core.state.save()
        self.turn()
        self.store.close()

"""Remembers decoded batch metas: a producer's are the same for batch after batch."""

from typing import Final

from mqmesh.batch.record_batch import HEADER_SIZE, BatchHeader, BatchMeta, read_meta

MAX_ENTRIES: Final = 32_768
MAX_KEY_BYTES: Final = 512
"""Larger metas are decoded each time: they differ anyway, or come from somebody strange."""


class MetaCache:
    """Decoded metas by their bytes; at most a few MiB."""

    def __init__(self) -> None:
        self._metas: dict[bytes, BatchMeta] = {}

    def __len__(self) -> int:
        return len(self._metas)

    def read(self, data: memoryview, header: BatchHeader) -> BatchMeta:
        """The meta of a batch, as ``record_batch.read_meta`` decodes it.

        Args:
            data: One batch.
            header: Its header.

        Raises:
            CorruptBatch: It is not what the format says.
        """
        size = header.meta_size
        if size > MAX_KEY_BYTES:
            return read_meta(data, header)
        key = bytes(data[HEADER_SIZE : HEADER_SIZE + size])
        meta = self._metas.get(key)
        if meta is None:
            meta = read_meta(data, header)
            # With a hash for each message it fits this number of messages only.
            if len(meta.tag_hashes) <= 8:
                if len(self._metas) >= MAX_ENTRIES:
                    self._metas.clear()
                self._metas[key] = meta
        return meta

"""Settings of an index process; its broker makes them from its own."""

from typing import Annotated

import msgspec

from mqmesh.storage.index.config import IndexConfig
from mqmesh.units import MIB


class IndexerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of an index process.

    Attributes:
        broker_name: Broker of the index, for logs.
        store_path_root_dir: The broker's directory; the index is in ``index/`` below it.
        endpoint: Endpoint to listen at, ``ipc://path``.
        suspect: The process before died by a fault: its files are checked before they are used.
        disk_reserve_bytes: Room on the disk that the index leaves for the log, from 0.
        index: Settings of the index.
    """

    broker_name: str = "broker-a"
    store_path_root_dir: Annotated[str, msgspec.Meta(min_length=1)] = "./mqmesh-data/broker-a"
    endpoint: Annotated[str, msgspec.Meta(min_length=1)]
    suspect: bool = False
    disk_reserve_bytes: Annotated[int, msgspec.Meta(ge=0)] = 64 * MIB
    index: IndexConfig = msgspec.field(default_factory=IndexConfig)

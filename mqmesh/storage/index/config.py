"""Settings of the message index."""

from typing import Annotated

import msgspec

from mqmesh.units import GIB, KIB, MIB


class IndexConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the index of keys and message ids, and of the process that makes it.

    Attributes:
        enable: Index messages. Without it, they cannot be looked up by key or id; by offset
            they always can. Messages stored meanwhile are indexed when it is turned on again.
        query_timeout_ms: Time after which a query is answered with the messages found so far, 10 to
            60,000 ms.
        live_map_size: Room that LMDB reserves for the index of one log segment, 64 KiB to
            256 GiB. Address space only; it grows by itself.
        step_bytes: Bytes of the log indexed in one step, 64 KiB to 64 MiB. Larger steps cost less,
            and queries wait for them.
        niceness: Niceness of the process, 0 to 19. Lower it if the index trails far behind on a
            machine that is never idle.
        max_open_environments: Log segments whose index is kept open, 2 to 10,000.
        max_queries: Queries at a time, 1 to 10,000; more are refused with SYSTEM_BUSY.
    """

    enable: bool = True
    query_timeout_ms: Annotated[int, msgspec.Meta(ge=10, le=60_000)] = 2_000

    live_map_size: Annotated[int, msgspec.Meta(ge=64 * KIB, le=256 * GIB)] = 256 * MIB
    step_bytes: Annotated[int, msgspec.Meta(ge=64 * KIB, le=64 * MIB)] = 2 * MIB
    niceness: Annotated[int, msgspec.Meta(ge=0, le=19)] = 5
    max_open_environments: Annotated[int, msgspec.Meta(ge=2, le=10_000)] = 128
    max_queries: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 256

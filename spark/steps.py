"""The steps by which an archive has come to where it is. Pure: no table, no Spark."""

import msgspec

from mqmesh.errors import ConfigError


class Ingest(msgspec.Struct, frozen=True, kw_only=True):
    """One step of an archive: a stretch of a store's log that was taken in.

    Attributes:
        broker: Name under which the archive knows the store.
        store_id: Identity of the store.
        epoch: Epoch of its log at the end of the stretch.
        from_offset: Commit-log offset where the stretch begins.
        to_offset: Commit-log offset where it ends.
        gap_before: Bytes of log before it that never came into the archive.
        snapshot: Name of the snapshot that it came of.
        last_offset: Commit-log offset of the last batch in it, -1 for none.
        mark: Mark that identifies this batch.
    """

    broker: str
    store_id: int
    epoch: int
    from_offset: int
    to_offset: int
    gap_before: int
    snapshot: str
    last_offset: int
    mark: str


class Step(msgspec.Struct, frozen=True):
    """Range of a snapshot's log to take in.

    Attributes:
        from_offset: Commit-log offset to begin at.
        to_offset: Commit-log offset to end at; not beyond ``from_offset`` if nothing is to be done.
        gap_before: Bytes of log that are missing before ``from_offset``.
    """

    from_offset: int
    to_offset: int
    gap_before: int


def next_step(
    position: int | None, start_offset: int, end_offset: int, *, broker: str, allow_gap: bool
) -> Step:
    """Returns the step for a snapshot, from the position that an archive has come to.

    Args:
        position: Position of the archive in this store's log; None if it has nothing of it.
        start_offset: Commit-log offset at which the snapshot begins.
        end_offset: Commit-log offset at which the snapshot ends.
        broker: Name of the broker, for the error.
        allow_gap: Go on where bytes are missing.

    Raises:
        ConfigError: There would be a gap.
    """
    if position is None:
        return Step(start_offset, end_offset, 0)
    if end_offset <= position:
        return Step(position, position, 0)
    gap = max(0, start_offset - position)
    if gap and not allow_gap:
        raise ConfigError(
            f"the archive is at {position} of {broker}, this snapshot begins at {start_offset}: "
            f"{gap:,} bytes are missing; --allow-gap goes on without them"
        )
    return Step(max(position, start_offset), end_offset, gap)


def chain_to(begun: list[Ingest], position: int) -> list[Ingest]:
    """Returns the steps that led to a position, without those that were begun and given up."""
    by_end: dict[int, Ingest] = {}
    for one in begun:
        # Of several with one end, begun at the same time, the longest shows the gap.
        known = by_end.get(one.to_offset)
        if known is None or one.from_offset < known.from_offset:
            by_end[one.to_offset] = one
    chain: list[Ingest] = []
    while (step := by_end.get(position)) is not None:
        chain.append(step)
        position = step.from_offset - step.gap_before
        if step.from_offset >= step.to_offset:
            break
    return chain[::-1]

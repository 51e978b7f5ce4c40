"""C8 and C10 to C12: what is promised about the system rather than about single messages. Pure."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from harness.history import History, Place

_METRICS: Final = ("rss_bytes", "descriptors", "threads", "disk_bytes")


def lookups_equal_a_scan(history: History) -> Iterable[str]:
    """C8: lookups whose answer is not what the log says."""
    if not history.lookups:
        return
    scan: dict[tuple[str, str], set[Place]] = defaultdict(set)
    for one in history.stored:
        scan["id", one.message_id].add(one.place)
        for key in one.keys:
            scan["key", key].add(one.place)
    for lookup in history.lookups:
        what = f"{lookup.kind} {lookup.value}"
        there = scan.get((lookup.kind, lookup.value), set())
        found = set(lookup.places)
        if len(found) != len(lookup.places):
            yield f"{what} was found twice at one place"
        if found - there:
            yield f"{what} was found at {min(found - there)}, where it is not"
        if len(found) < min(len(there), lookup.limit):
            yield f"{what} is at {len(there)} places and was found at {len(found)}"


def resources_return(history: History) -> Iterable[str]:
    """C10: metrics that did not come back."""
    for one in history.returns:
        for metric in _METRICS:
            before, after = getattr(one.before, metric), getattr(one.after, metric)
            most = before + getattr(one.growth, metric)
            if after > most:
                yield f"{one.after.name}: {metric} went from {before} to {after}, over {most}"


def served_again(history: History) -> Iterable[str]:
    """C11: times without service that were too long."""
    for one in history.outages:
        if one.lasted_ms is None:
            yield f"{one.what}: not served again"
        elif one.lasted_ms > one.bound_ms:
            yield f"{one.what}: served after {one.lasted_ms:.0f} ms, over {one.bound_ms:.0f}"


def nothing_silent(history: History) -> Iterable[str]:
    """C12: what was refused, cut or set aside without saying so in all three ways."""
    for one in history.degradations:
        if one.happened == 0:
            continue
        if one.error_codes is not None and one.error_codes < one.happened:
            yield f"{one.kind}: {one.happened} times, but {one.error_codes} error codes"
        if one.log_lines == 0:
            yield f"{one.kind}: {one.happened} times, and no line in the log"
        if one.counted < one.happened:
            yield f"{one.kind}: {one.happened} times, but counted {one.counted} times"

"""Actions on dead letters: resend, export, purge."""

import csv
import io
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal

import msgspec

from mqmesh.aio import DeadLetterClient
from mqmesh.console.page import ActionPlan, ActionResult, ActionTable, Visit
from mqmesh.console.queries.dead_letters import (
    LetterChoice,
    letter_filter,
    newest_letters,
)
from mqmesh.console.queries.groups import GroupArguments
from mqmesh.console.rendering import segment
from mqmesh.errors import InvalidArgument
from mqmesh.protocol.retries import ResendResult, ResendStatus, ResendTarget
from mqmesh.sdk.admin.dead_letters import DeadLetter
from mqmesh.sdk.admin.views.messages import (
    DeadLetterView,
    UndecodableView,
    dead_letter_view,
)

MAX_CHOSEN: Final = 10_000
MAX_SHOWN: Final = 100
"""Dead letters of a plan or result that a table names."""
_TARGETS = {
    "the group alone": ResendTarget.RETRY,
    "all groups of the topic": ResendTarget.TOPIC,
}
COLUMNS: Final = (
    "message_id",
    "topic",
    "tag",
    "keys",
    "reason",
    "reconsume_times",
    "born_timestamp",
    "store_timestamp",
    "resent_timestamp",
    "broker_name",
    "dlq_offset",
    "properties",
    "body",
    "body_base64",
)
"""Columns of the CSV: fields of ``DeadLetterView``."""


class ResendForm(LetterChoice, frozen=True, kw_only=True):
    """Dead letters to resend: those chosen, or all that fit the filter."""

    chosen: Annotated[
        str,
        msgspec.Meta(
            max_length=500_000,
            title="Dead letters",
            description="BROKER@OFFSET in the queue of dead letters, separated by commas.",
        ),
    ] = ""
    found: Annotated[bool, msgspec.Meta(title="All that fit the filter")] = False
    target: Annotated[
        Literal["the group alone", "all groups of the topic"],
        msgspec.Meta(title="Resend to"),
    ] = "the group alone"
    force: Annotated[bool, msgspec.Meta(title="Also those that were resent before")] = False


async def plan_resend(visit: Visit, form: ResendForm) -> ActionPlan:
    """Say which ones would be resent, and which were before."""
    outcomes = await _resend(visit, form, dry_run=True)
    counts = _counts(outcomes)
    resent = counts[ResendStatus.RESENT]
    details = ["Each has all its retries again."]
    if counts[ResendStatus.ALREADY_RESENT]:
        details.append(f"{counts[ResendStatus.ALREADY_RESENT]:,} were resent before, and stay.")
    if counts[ResendStatus.GONE] or counts[ResendStatus.REFUSED]:
        missing = counts[ResendStatus.GONE] + counts[ResendStatus.REFUSED]
        details.append(f"{missing:,} cannot be resent.")
    warning = ""
    if form.target != "the group alone":
        warning = "Other groups that consumed them already get them once more."
    elif form.force:
        warning = "Those that were resent before come to the group once more."
    return ActionPlan(
        summary=f"{resent:,} dead letters of group {form.group} are resent to {form.target}."
        if resent
        else "None of them can be resent.",
        details=tuple(details),
        table=_others(outcomes),
        warning=warning if resent else "",
        possible=bool(resent),
    )


async def resend(visit: Visit, form: ResendForm) -> ActionResult:
    """Resend dead letters."""
    outcomes = await _resend(visit, form, dry_run=False)
    counts = _counts(outcomes)
    parts = [f"{counts[ResendStatus.RESENT]:,} resent"]
    if counts[ResendStatus.ALREADY_RESENT]:
        parts.append(f"{counts[ResendStatus.ALREADY_RESENT]:,} were before")
    if counts[ResendStatus.GONE]:
        parts.append(f"{counts[ResendStatus.GONE]:,} gone meanwhile")
    if counts[ResendStatus.REFUSED]:
        parts.append(f"{counts[ResendStatus.REFUSED]:,} refused")
    return ActionResult(
        summary=", ".join(parts),
        table=_others(outcomes),
        ok=not counts[ResendStatus.REFUSED],
        next=f"/dead-letters/{segment(form.group)}",
    )


async def plan_purge(visit: Visit, form: GroupArguments) -> ActionPlan:
    """Say how many are lost."""
    async with visit.client(DeadLetterClient) as client:
        found = (await client.overview()).get(form.group)
    if found is None:
        return ActionPlan(summary=f"Group {form.group} has no dead letters.", possible=False)
    return ActionPlan(
        summary=f"All dead letters of group {form.group} are deleted on every broker.",
        details=("Export them first if anybody may need them.",),
        warning=f"{found.count:,} messages are lost.",
        typed=form.group,
    )


async def purge(visit: Visit, form: GroupArguments) -> ActionResult:
    """Delete all dead letters of a group."""
    async with visit.client(DeadLetterClient) as client:
        count = await client.purge(form.group)
    return ActionResult(
        summary=f"{count:,} dead letters of group {form.group} are deleted.",
        next="/dead-letters",
    )


async def json_lines(visit: Visit, form: LetterChoice) -> AsyncIterator[bytes]:
    """Yield dead letters as `mqmesh dlq export` writes them: a line of JSON each."""
    async for view in _views(visit, form):
        yield msgspec.json.encode(view) + b"\n"


async def csv_rows(visit: Visit, form: LetterChoice) -> AsyncIterator[bytes]:
    """Yield dead letters as CSV with a heading; a body that is no text is in ``body_base64``."""
    heading = _csv(COLUMNS)
    async for view in _views(visit, form):
        yield heading + _csv(_cells(view))
        heading = b""
    yield heading  # of none


# ---- Helpers ---------------------------------------------------------------------------


_Outcome = tuple[DeadLetter, ResendResult]


async def _resend(visit: Visit, form: ResendForm, *, dry_run: bool) -> list[_Outcome]:
    if form.found:
        places = [one.place for one in (await newest_letters(visit, form))[0]]
    else:
        places = form.chosen.split(",") if form.chosen else []
    if not 1 <= len(places) <= MAX_CHOSEN:
        raise InvalidArgument(f"choose 1 to {MAX_CHOSEN:,} dead letters, not {len(places):,}")
    letters = [_letter(one) for one in dict.fromkeys(places)]
    async with visit.client(DeadLetterClient) as client:
        return [
            one
            async for one in client.resend(
                form.group,
                letters,
                target=_TARGETS[form.target],
                force=form.force,
                dry_run=dry_run,
            )
        ]


def _letter(place: str) -> DeadLetter:
    broker_name, _, offset = place.strip().rpartition("@")
    if not broker_name or not offset.isdecimal() or len(offset) > 18:
        raise InvalidArgument(f"{place[:80]!r} is no place of a dead letter: BROKER@OFFSET")
    return DeadLetter(broker_name, int(offset), None)


def _counts(outcomes: list[_Outcome]) -> Counter[ResendStatus]:
    return Counter(ResendStatus(result.status) for _, result in outcomes)


def _others(outcomes: list[_Outcome]) -> ActionTable | None:
    """Return those that are not resent, and why; None if there are none."""
    why = {
        ResendStatus.ALREADY_RESENT: "resent before",
        ResendStatus.GONE: "gone",
        ResendStatus.REFUSED: "refused",
    }
    rows = [
        (
            f"{letter.broker_name}@{letter.queue_offset}",
            why[ResendStatus(result.status)] + (f": {result.remark}" if result.remark else ""),
            _utc(result.resent_ms),
        )
        for letter, result in outcomes
        if result.status != ResendStatus.RESENT
    ]
    if not rows:
        return None
    return ActionTable(columns=("Dead letter", "Outcome", "Resent at"), rows=rows[:MAX_SHOWN])


def _utc(at_ms: int) -> str:
    if not at_ms:
        return ""
    return f"{datetime.fromtimestamp(at_ms / 1_000, UTC):%Y-%m-%d %H:%M:%S} UTC"


async def _views(
    visit: Visit, form: LetterChoice
) -> AsyncIterator[DeadLetterView | UndecodableView]:
    async with visit.client(DeadLetterClient) as client:
        async for letter in client.scan(form.group, letter_filter(visit, form)):
            view = dead_letter_view(letter)
            yield view if visit.config.allow_body_view else _without_body(view)


def _without_body(view: DeadLetterView | UndecodableView) -> DeadLetterView | UndecodableView:
    if isinstance(view, UndecodableView):
        return msgspec.structs.replace(view, batch_base64="")
    return msgspec.structs.replace(view, body=None, body_base64=None)


def _cells(view: DeadLetterView | UndecodableView) -> Iterator[Any]:
    fields = msgspec.structs.asdict(view)
    for name in COLUMNS:
        value = fields.get(name)
        if name == "keys":
            value = " ".join(value or ())
        elif name == "properties":
            value = msgspec.json.encode(value).decode() if value else ""
        elif name == "body_base64" and isinstance(view, UndecodableView):
            value = view.batch_base64
        yield "" if value is None else value


def _csv(cells: Any) -> bytes:
    line = io.StringIO()
    csv.writer(line).writerow(cells)
    return line.getvalue().encode("utf-8", "surrogatepass")

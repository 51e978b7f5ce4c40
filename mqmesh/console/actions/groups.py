"""Actions on consumer groups: create, change, delete; reset, skip and clone of offsets."""

from typing import Annotated, Any, Literal

import msgspec

from mqmesh.aio import GroupAdmin
from mqmesh.console.forms import Choices
from mqmesh.console.page import ActionPlan, ActionResult, ActionTable, Name, Text, Visit
from mqmesh.errors import GroupNotFound, InvalidArgument
from mqmesh.message import MAX_GROUP_LENGTH, check_consumer_group
from mqmesh.protocol.groups import GroupConfig, ResetWhere
from mqmesh.protocol.policies import FOREVER_MS, KEEP, check_group_policies, paused
from mqmesh.sdk.admin.group_admin import OffsetMoves
from mqmesh.user_times import parse_time

Retries = Annotated[
    int,
    msgspec.Meta(
        ge=-1,
        le=1_000_000,
        title="Retries",
        description="A message that failed so often becomes a dead letter; -1: as consumers say.",
    ),
]
Delays = Annotated[
    Text,
    msgspec.Meta(
        title="Retry delays",
        description="As 10s 30s 1m 5m, or exp 1s x2 max 2h jitter 20%; empty: the broker's levels.",
    ),
]
DeadLetter = Annotated[
    Text,
    msgspec.Meta(title="Dead letters", description="keep, drop, or the topic that they go to."),
]
Rate = Annotated[
    int,
    msgspec.Meta(
        ge=0,
        le=1_000_000_000,
        title="Most messages a second",
        description="At each broker; 0: no limit.",
    ),
]
Enabled = Annotated[bool, msgspec.Meta(title="Members may consume")]
Broadcast = Annotated[bool, msgspec.Meta(title="Members may broadcast")]
Target = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_GROUP_LENGTH, title="New group")]
_WHERE = {
    "a time": ResetWhere.TIMESTAMP,
    "the first message": ResetWhere.FIRST,
    "the end": ResetWhere.LAST,
    "an offset": ResetWhere.OFFSET,
}


class NewGroupForm(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a new group."""

    group: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_GROUP_LENGTH, title="Name")]
    retry_max_times: Retries = -1
    retry_delays: Delays = ""
    dead_letter: DeadLetter = KEEP
    max_messages_per_s: Rate = 0
    consume_enable: Enabled = True
    consume_broadcast_enable: Broadcast = True


class GroupForm(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a group on all brokers."""

    group: Name
    retry_max_times: Retries = -1
    retry_delays: Delays = ""
    dead_letter: DeadLetter = KEEP
    max_messages_per_s: Rate = 0
    consume_enable: Enabled = True
    consume_broadcast_enable: Broadcast = True


class DeleteGroupForm(msgspec.Struct, frozen=True, kw_only=True):
    """Deletion of a group."""

    group: Name
    remove_topics: Annotated[
        bool, msgspec.Meta(title="Delete its retry and dead letter topics, too")
    ] = False


class ResetForm(msgspec.Struct, frozen=True, kw_only=True):
    """Move of a group's offsets in a topic."""

    group: Name
    topic: Annotated[Name, msgspec.Meta(title="Topic")]
    to: Annotated[
        Literal["a time", "the first message", "the end", "an offset"],
        msgspec.Meta(title="Go on at"),
    ] = "a time"
    time: Annotated[
        Text,
        msgspec.Meta(
            title="Time",
            description="An age such as 30m, 1h or 2d, or a moment: 2026-03-01T12:00 (UTC).",
        ),
    ] = "1h"
    broker_name: Annotated[
        Text, msgspec.Meta(title="Broker", description="Only there; empty for all brokers.")
    ] = ""
    queue_id: Annotated[
        int, msgspec.Meta(ge=-1, le=65_535, title="Queue", description="-1 for all queues.")
    ] = -1
    offset: Annotated[
        int,
        msgspec.Meta(ge=0, le=(1 << 53) - 1, title="Offset", description="Of that queue."),
    ] = 0


class PauseForm(msgspec.Struct, frozen=True, kw_only=True):
    """Pause of a group."""

    group: Name
    topic: Annotated[Text, msgspec.Meta(title="Topic", description="Empty for all topics.")] = ""
    minutes: Annotated[
        int,
        msgspec.Meta(
            ge=0, le=525_600, title="Minutes", description="0: until somebody resumes it."
        ),
    ] = 60


class ResumeForm(msgspec.Struct, frozen=True, kw_only=True):
    """End of the pauses of a group."""

    group: Name
    topic: Annotated[Text, msgspec.Meta(title="Topic", description="Empty for all pauses.")] = ""


class SkipForm(msgspec.Struct, frozen=True, kw_only=True):
    """Skip of a group's backlog."""

    group: Name
    topic: Annotated[Text, msgspec.Meta(title="Topic", description="Empty for all topics.")] = ""


class CloneForm(msgspec.Struct, frozen=True, kw_only=True):
    """Clone of a group's offsets."""

    group: Name
    target: Annotated[
        Target, msgspec.Meta(description="Made if it is not there; it goes on where this one is.")
    ]
    topic: Annotated[Text, msgspec.Meta(title="Topic", description="Empty for all topics.")] = ""


async def plan_create(visit: Visit, form: NewGroupForm) -> ActionPlan:
    """Describe the new group."""
    check_consumer_group(form.group)
    check_group_policies(_config(form))
    if await _configs(visit, form.group):
        raise InvalidArgument(f"there is a group {form.group!r} already")
    return ActionPlan(
        summary=f"Group {form.group} is made on all brokers.", details=_settings(form)
    )


async def create(visit: Visit, form: NewGroupForm) -> ActionResult:
    """Create a group."""
    async with visit.client(GroupAdmin) as admin:
        made = await admin.create_group(_config(form))
    return ActionResult(
        summary=f"Group {form.group} is there, on {', '.join(sorted(made))}.", next="/groups"
    )


async def initial_settings(visit: Visit, fixed: dict[str, str]) -> dict[str, Any]:
    """Return the settings that a group has."""
    now = next(iter((await _known(visit, fixed["group"])).values()))
    return msgspec.structs.asdict(now)


async def plan_settings(visit: Visit, form: GroupForm) -> ActionPlan:
    """Describe the changes, broker by broker."""
    wanted = msgspec.structs.asdict(form)
    check_group_policies(_config(form))
    changes = [
        (name, field.replace("_", " "), str(before), str(wanted[field]))
        for name, now in sorted((await _known(visit, form.group)).items())
        for field, before in msgspec.structs.asdict(now).items()
        if field in wanted and before != wanted[field]
    ]
    if not changes:
        return ActionPlan(summary="Nothing changes.", possible=False)
    return ActionPlan(
        summary=f"Group {form.group} changes.",
        table=ActionTable(columns=("Broker", "Setting", "Now", "Then"), rows=list(changes)),
        warning="" if form.consume_enable else "Its members get no more messages.",
    )


async def put_settings(visit: Visit, form: GroupForm) -> ActionResult:
    """Change the settings of a group."""
    wanted = msgspec.structs.asdict(form)
    changed = {
        name: msgspec.structs.replace(now, **wanted)
        for name, now in (await _known(visit, form.group)).items()
    }
    async with visit.client(GroupAdmin) as admin:
        await admin.put_group(changed)
    return ActionResult(summary=f"Group {form.group} has its new settings.")


async def plan_delete(visit: Visit, form: DeleteGroupForm) -> ActionPlan:
    """Describe the loss."""
    async with visit.client(GroupAdmin) as admin:
        progress = await admin.progress(form.group)
    if progress.members:
        return ActionPlan(
            summary=f"Group {form.group} has {progress.members} members: stop them first.",
            possible=False,
        )
    lost = f"It forgets where it is: {progress.lag:,} messages are not done."
    if form.remove_topics:
        lost += f" Its {progress.dead:,} dead letters are lost."
    return ActionPlan(summary=f"Group {form.group} is deleted.", warning=lost, typed=form.group)


async def delete(visit: Visit, form: DeleteGroupForm) -> ActionResult:
    """Delete a group."""
    async with visit.client(GroupAdmin) as admin:
        where = await admin.delete_group(form.group, remove_topics=form.remove_topics)
    return ActionResult(
        summary=f"Group {form.group} is deleted from {', '.join(sorted(where))}.",
        next="/groups",
    )


async def initial_topic(visit: Visit, fixed: dict[str, str]) -> dict[str, Any]:
    """Return the topics that a group reads, to choose one."""
    async with visit.client(GroupAdmin) as admin:
        found = await admin.groups(fixed["group"])
    topics = sorted({topic for (one,) in found.values() for topic in one.topics})
    return {"topic": Choices(topics[0] if topics else "", tuple(topics))}


async def plan_reset(visit: Visit, form: ResetForm) -> ActionPlan:
    """Say which messages come again, and which never come."""
    moves = await _reset(visit, form, dry_run=True)
    return _plan_of(moves, f"Group {form.group} goes on at {_place(form)} in {form.topic}")


async def reset(visit: Visit, form: ResetForm) -> ActionResult:
    """Move offsets."""
    return _result_of(await _reset(visit, form, dry_run=False), form.group)


async def plan_pause(visit: Visit, form: PauseForm) -> ActionPlan:
    """Describe the effect of a pause."""
    await _known(visit, form.group)
    span = f"for {form.minutes:,} minutes" if form.minutes else "until somebody resumes it"
    of = f"of {form.topic} " if form.topic else ""
    return ActionPlan(
        summary=f"Group {form.group} gets no messages {of}{span}.",
        details=("Members keep running, and do what they have got already.",),
    )


async def pause(visit: Visit, form: PauseForm) -> ActionResult:
    """Pause a group."""
    until_ms = visit.clock.wall_ms() + form.minutes * 60_000 if form.minutes else FOREVER_MS
    async with visit.client(GroupAdmin) as admin:
        await admin.pause_group(form.group, form.topic, until_ms=until_ms)
    return ActionResult(summary=f"Group {form.group} is paused.")


async def plan_resume(visit: Visit, form: ResumeForm) -> ActionPlan:
    """Say which pauses end."""
    now_ms = visit.clock.wall_ms()
    known = await _known(visit, form.group)
    if not any(paused(one, 0, form.topic, now_ms) != one for one in known.values()):
        return ActionPlan(summary="Nothing of that is paused.", possible=False)
    return ActionPlan(summary=f"Group {form.group} goes on{_of(form.topic)} at once.")


async def resume(visit: Visit, form: ResumeForm) -> ActionResult:
    """Let a paused group go on."""
    async with visit.client(GroupAdmin) as admin:
        await admin.resume_group(form.group, form.topic)
    return ActionResult(summary=f"Group {form.group} goes on{_of(form.topic)}.")


def _of(topic: str) -> str:
    return f" with {topic}" if topic else ""


async def plan_skip(visit: Visit, form: SkipForm) -> ActionPlan:
    """Describe the messages that are skipped."""
    async with visit.client(GroupAdmin) as admin:
        moves = await admin.skip_backlog(form.group, form.topic, dry_run=True)
    plan = _plan_of(moves, f"Group {form.group} goes on behind the last message")
    return msgspec.structs.replace(plan, typed=form.group) if plan.possible else plan


async def skip(visit: Visit, form: SkipForm) -> ActionResult:
    """Skip the backlog of a group."""
    async with visit.client(GroupAdmin) as admin:
        moves = await admin.skip_backlog(form.group, form.topic)
    return _result_of(moves, form.group)


async def plan_clone(visit: Visit, form: CloneForm) -> ActionPlan:
    """Say where the other group goes on."""
    async with visit.client(GroupAdmin) as admin:
        moves = await admin.clone_offset(form.group, form.target, form.topic, dry_run=True)
    return _plan_of(moves, f"Group {form.target} goes on where {form.group} is")


async def clone(visit: Visit, form: CloneForm) -> ActionResult:
    """Let another group go on where this one is."""
    async with visit.client(GroupAdmin) as admin:
        moves = await admin.clone_offset(form.group, form.target, form.topic)
    return _result_of(moves, form.target)


async def _reset(visit: Visit, form: ResetForm, *, dry_run: bool) -> OffsetMoves:
    where = _WHERE[form.to]
    at_ms = 0
    if where is ResetWhere.TIMESTAMP:
        at_ms = parse_time(form.time, visit.clock.wall_ms(), "time")
    async with visit.client(GroupAdmin) as admin:
        return await admin.reset_offset(
            form.group,
            form.topic,
            where,
            timestamp_ms=at_ms,
            queue_offset=form.offset if where is ResetWhere.OFFSET else -1,
            queue_id=form.queue_id,
            broker_name=form.broker_name,
            dry_run=dry_run,
        )


def _place(form: ResetForm) -> str:
    if form.to == "a time":
        return f"{form.time} ago" if form.time[-1:].isalpha() else form.time
    return f"offset {form.offset:,}" if form.to == "an offset" else form.to


def _plan_of(moves: OffsetMoves, sentence: str) -> ActionPlan:
    changed = [one for one in moves.queues if one.change.old_offset != one.change.new_offset]
    if not changed:
        return ActionPlan(summary="No offset changes.", possible=False)
    return ActionPlan(
        summary=f"{sentence}: {moves.reread:,} messages are read again, {moves.skipped:,} skipped.",
        details=(
            f"Members that give up what they hold, and go on there: {moves.members_notified}.",
        )
        if moves.members_notified
        else (),
        table=_table(moves),
        warning=f"{moves.skipped:,} messages never come to the group." if moves.skipped else "",
    )


def _result_of(moves: OffsetMoves, group: str) -> ActionResult:
    return ActionResult(
        summary=f"Group {group} goes on there: {moves.reread:,} messages are read again, "
        f"{moves.skipped:,} skipped.",
        table=_table(moves),
    )


def _table(moves: OffsetMoves) -> ActionTable:
    return ActionTable(
        columns=("Topic", "Broker", "Queue", "Now", "Then", "Read again", "Skipped"),
        rows=[
            (
                one.change.topic,
                one.broker_name,
                one.change.queue_id,
                "–" if one.change.old_offset < 0 else one.change.old_offset,
                one.change.new_offset,
                one.reread,
                one.skipped,
            )
            for one in moves.queues
        ],
    )


def _config(form: NewGroupForm | GroupForm) -> GroupConfig:
    return GroupConfig(**msgspec.structs.asdict(form))


def _settings(form: NewGroupForm) -> tuple[str, ...]:
    retries = "as consumers say" if form.retry_max_times < 0 else str(form.retry_max_times)
    return (f"Retries: {retries}.",)


async def _configs(visit: Visit, group: str) -> dict[str, GroupConfig]:
    """Return settings that were made, by broker; none of a group that no broker knows."""
    async with visit.client(GroupAdmin) as admin:
        try:
            found = await admin.groups(group)
        except GroupNotFound:
            return {}
    return {name: one.config for name, (one,) in found.items() if one.is_configured}


async def _known(visit: Visit, group: str) -> dict[str, GroupConfig]:
    async with visit.client(GroupAdmin) as admin:
        found = await admin.groups(group)
    return {name: one.config for name, (one,) in found.items()}

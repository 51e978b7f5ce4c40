"""Actions on the cluster: drain, hand the lead over, settings, key/value, import, probe."""

from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec

from mqmesh.aio import BrokerAdmin, ClusterAdmin, HaAdmin, NamesrvAdmin, ProbeClient
from mqmesh.console.forms import Choices
from mqmesh.console.page import (
    ActionPlan,
    ActionResult,
    ActionTable,
    Name,
    NoArguments,
    Text,
    Visit,
)
from mqmesh.console.queries.cluster import (
    BrokerArguments,
    BrokerGroupRow,
    broker_config,
    group_row,
    namesrv_config,
)
from mqmesh.errors import InvalidArgument
from mqmesh.protocol.admin import ConfigChange, ConfigEntry
from mqmesh.protocol.messaging import SendStatus
from mqmesh.sdk.admin.cluster_plan import (
    ClusterSetup,
    ImportAction,
    ImportStep,
    read_setup,
    write_setup,
)
from mqmesh.sdk.admin.namesrv_admin import NamesrvChange

ANYBODY: Final = "the one with most of the log"
MAX_DOCUMENT: Final = 900_000
"""Characters of a document; a request has 1 MiB at most."""
SHOWN_STEPS: Final = 500

Key = Annotated[Name, msgspec.Meta(title="Setting")]
Value = Annotated[
    Text,
    msgspec.Meta(title="Value", description="As in the configuration file: 72, true, 0.75, INFO."),
]
Unset = Annotated[bool, msgspec.Meta(title="As the configuration file has it, instead")]


class SwitchOverForm(msgspec.Struct, frozen=True, kw_only=True):
    """Hand-over of the lead of a broker group."""

    broker_name: Name
    replica: Annotated[
        str,
        msgspec.Meta(
            max_length=64, title="New master", description="Id of a replica that is in sync."
        ),
    ] = ANYBODY


class BrokerSettingForm(msgspec.Struct, frozen=True, kw_only=True):
    """Change of a setting of a broker group."""

    broker_name: Name
    key: Key
    value: Value = ""
    unset: Unset = False


class NamesrvSettingForm(msgspec.Struct, frozen=True, kw_only=True):
    """Change of a setting of name servers."""

    key: Key
    value: Value = ""
    unset: Unset = False


class PutKvForm(msgspec.Struct, frozen=True, kw_only=True):
    """A text of the key/value configuration."""

    namespace: Annotated[Name, msgspec.Meta(title="Namespace")]
    key: Annotated[Name, msgspec.Meta(title="Key")]
    value: Annotated[
        str,
        msgspec.Meta(max_length=65_536, title="Value", extra_json_schema={"format": "long"}),
    ] = ""


class DeleteKvForm(msgspec.Struct, frozen=True, kw_only=True):
    """Deletion of a text of the key/value configuration."""

    namespace: Annotated[Name, msgspec.Meta(title="Namespace")]
    key: Annotated[Name, msgspec.Meta(title="Key")]


class ImportForm(msgspec.Struct, frozen=True, kw_only=True):
    """A document that the cluster is to be set up by."""

    document: Annotated[
        str,
        msgspec.Meta(
            min_length=2,
            max_length=MAX_DOCUMENT,
            title="Document",
            description="JSON, as Export and `mqmesh cluster export` write it.",
            extra_json_schema={"format": "long"},
        ),
    ]
    prune: Annotated[bool, msgspec.Meta(title="Delete what it does not have")] = False
    force: Annotated[bool, msgspec.Meta(title="Do also what loses messages")] = False


class ProbeForm(msgspec.Struct, frozen=True, kw_only=True):
    """Test messages to all brokers."""

    count: Annotated[
        int, msgspec.Meta(ge=1, le=20, title="Messages", description="To each broker, 1 to 20.")
    ] = 3


# ---- Draining ----------------------------------------------------------------------------


async def plan_drain(visit: Visit, form: BrokerArguments) -> ActionPlan:
    """Describe the effect of a drain."""
    async with visit.client(HaAdmin) as admin:
        others = {one.broker_name for one in (await admin.cluster()).brokers} - {form.broker_name}
    where = f"to {', '.join(sorted(others))}" if others else "nowhere: there is no other broker"
    return ActionPlan(
        summary=f"Producers leave {form.broker_name}, and go {where}.",
        details=(
            "Consumers go on reading it; when they are done it can be stopped.",
            "It lasts, also over restarts, until Undrain.",
        ),
        warning="" if others else "Producers wait, and fail when their time is over.",
    )


async def drain(visit: Visit, form: BrokerArguments) -> ActionResult:
    """Take a broker out of the routes of producers."""
    async with visit.client(NamesrvAdmin) as admin:
        done = await admin.drain(form.broker_name)
    return _result_of(
        f"Producers leave {form.broker_name}: the routes of {done.topic_count} topics changed.",
        done,
    )


async def plan_undrain(visit: Visit, form: BrokerArguments) -> ActionPlan:
    """Describe the effect of the end of a drain."""
    return ActionPlan(summary=f"Producers come back to {form.broker_name}.")


async def undrain(visit: Visit, form: BrokerArguments) -> ActionResult:
    """Give a drained broker back to producers."""
    async with visit.client(NamesrvAdmin) as admin:
        done = await admin.undrain(form.broker_name)
    return _result_of(
        f"Producers come back to {form.broker_name}: the routes of {done.topic_count} topics "
        "changed.",
        done,
    )


def _result_of(sentence: str, done: NamesrvChange) -> ActionResult:
    silent = tuple(
        f"Name server {one} does not answer: repeat it once it is back."
        for one in done.silent_namesrvs
    )
    return ActionResult(summary=sentence, details=silent, ok=not silent)


# ---- Masters -----------------------------------------------------------------------------


async def initial_replica(visit: Visit, fixed: dict[str, str]) -> dict[str, Any]:
    """Return the replicas that could lead."""
    group = await _group(visit, fixed["broker_name"])
    able = (str(one) for one in group.in_sync if one != group.master)
    return {"replica": Choices(ANYBODY, (ANYBODY, *able))}


async def plan_switch_over(visit: Visit, form: SwitchOverForm) -> ActionPlan:
    """Say who leads then."""
    group = await _group(visit, form.broker_name)
    others = [one for one in group.in_sync if one != group.master]
    replica = _replica(form)
    if not others:
        return ActionPlan(summary="No other replica is in sync.", possible=False)
    if replica and replica not in others:
        return ActionPlan(summary=f"Replica {replica} is not in sync.", possible=False)
    target = f"replica {replica}" if replica else "the replica with most of the log"
    return ActionPlan(
        summary=f"Replica {group.master} hands the lead of {form.broker_name} over to {target}.",
        details=("Nothing is lost; clients wait a moment, and see no error.",),
    )


async def switch_over(visit: Visit, form: SwitchOverForm) -> ActionResult:
    """Hand the lead over."""
    async with visit.client(HaAdmin) as admin:
        done = await admin.switch_over(form.broker_name, _replica(form))
    return ActionResult(
        summary=f"Replica {done.replica_id} leads {form.broker_name} in epoch {done.epoch}."
    )


def _replica(form: SwitchOverForm) -> int:
    if form.replica == ANYBODY:
        return 0
    if not form.replica.isdecimal():
        raise InvalidArgument(f"replica: {form.replica!r} is no id")
    return int(form.replica)


async def plan_pause(visit: Visit, form: BrokerArguments) -> ActionPlan:
    """Describe the effect of a pause of failovers."""
    return ActionPlan(
        summary=f"No replica of {form.broker_name} takes over when its master is missed.",
        details=("Handing over goes on to work; a master that comes back leads again.",),
        warning="While the master is down nobody can send to this broker group.",
    )


async def pause(visit: Visit, form: BrokerArguments) -> ActionResult:
    """Pause failovers."""
    async with visit.client(HaAdmin) as admin:
        await admin.pause_failover(form.broker_name)
    return ActionResult(summary=f"Failovers of {form.broker_name} are paused.")


async def plan_resume(visit: Visit, form: BrokerArguments) -> ActionPlan:
    """Describe the effect of the end of a pause."""
    return ActionPlan(
        summary=f"A replica of {form.broker_name} takes over again when its master is missed."
    )


async def resume(visit: Visit, form: BrokerArguments) -> ActionResult:
    """Let failovers go on."""
    async with visit.client(HaAdmin) as admin:
        await admin.pause_failover(form.broker_name, paused=False)
    return ActionResult(summary=f"Failovers of {form.broker_name} work again.")


async def _group(visit: Visit, broker_name: str) -> BrokerGroupRow:
    async with visit.client(HaAdmin) as admin:
        reports = await admin.ha_status(broker_name)
    return group_row(broker_name, reports, is_drained=False)


# ---- Settings ----------------------------------------------------------------------------


async def initial_broker_setting(visit: Visit, fixed: dict[str, str]) -> dict[str, Any]:
    """Return the settings that may change."""
    replicas = await broker_config(visit, fixed["broker_name"])
    return _changeable(next(iter(replicas.values())))


async def initial_namesrv_setting(visit: Visit, fixed: dict[str, str]) -> dict[str, Any]:
    """Return the settings that may change."""
    return _changeable(await namesrv_config(visit, visit.namesrv_addr[0]))


def _changeable(entries: Sequence[ConfigEntry]) -> dict[str, Any]:
    keys = tuple(sorted(one.key for one in entries if one.is_changeable))
    return {"key": Choices(keys[0] if keys else "", keys)}


async def plan_broker_setting(visit: Visit, form: BrokerSettingForm) -> ActionPlan:
    """Say what the setting is, and will be."""
    replicas = await broker_config(visit, form.broker_name)
    found = {f"replica {number}": _entry(one, form.key) for number, one in replicas.items()}
    return _plan_of(form.broker_name, form, found)


async def put_broker_setting(visit: Visit, form: BrokerSettingForm) -> ActionResult:
    """Change a setting of all replicas of a broker group."""
    async with visit.client(BrokerAdmin) as admin:
        done = await admin.set_config(form.broker_name, *_change(form))
    return _changed({f"replica {number}": one for number, one in done.items()})


async def plan_namesrv_setting(visit: Visit, form: NamesrvSettingForm) -> ActionPlan:
    """Say what the setting is, and will be."""
    found = {
        address: _entry(await namesrv_config(visit, address), form.key)
        for address in visit.namesrv_addr
    }
    return _plan_of("Name servers", form, found)


async def put_namesrv_setting(visit: Visit, form: NamesrvSettingForm) -> ActionResult:
    """Change a setting of all name servers."""
    async with visit.client(NamesrvAdmin) as admin:
        done = await admin.set_config(*_change(form))
    return msgspec.structs.replace(
        _changed(done.changes),
        details=tuple(f"Name server {one} does not answer." for one in done.silent_namesrvs),
        ok=not done.silent_namesrvs,
    )


def _entry(entries: Sequence[ConfigEntry], key: str) -> ConfigEntry:
    found = next((one for one in entries if one.key == key), None)
    if found is None:
        raise InvalidArgument(f"there is no setting {key!r}")
    if not found.is_changeable:
        raise InvalidArgument(
            f"{key} changes only with a restart: write it into the configuration file"
        )
    return found


def _plan_of(
    whose: str,
    form: BrokerSettingForm | NamesrvSettingForm,
    found: Mapping[str, ConfigEntry],
) -> ActionPlan:
    if not form.value and not form.unset:
        raise InvalidArgument("value: write one, or tick the box below it")
    then = "as in the file" if form.unset else form.value
    return ActionPlan(
        summary=f"{whose}: {form.key} changes from now on, and over restarts.",
        table=ActionTable(
            columns=("Where", "Now", "Default", "Then"),
            rows=[(where, one.value, one.default, then) for where, one in found.items()],
        ),
    )


def _change(form: BrokerSettingForm | NamesrvSettingForm) -> tuple[dict[str, str], list[str]]:
    return ({}, [form.key]) if form.unset else ({form.key: form.value}, [])


def _changed(done: Mapping[str, Sequence[ConfigChange]]) -> ActionResult:
    rows: list[tuple[Any, ...]] = [
        (where, one.key, one.before, one.after) for where, found in done.items() for one in found
    ]
    return ActionResult(
        summary="It is in force." if rows else "It was so before.",
        table=ActionTable(columns=("Where", "Setting", "Before", "Now"), rows=rows)
        if rows
        else None,
    )


# ---- Key/value configuration -------------------------------------------------------------


async def plan_put_kv(visit: Visit, form: PutKvForm) -> ActionPlan:
    """Describe the present text and the new one."""
    async with visit.client(NamesrvAdmin) as admin:
        is_there = await admin.has_kv(form.namespace, form.key)
        before = await admin.get_kv(form.namespace, form.key) if is_there else ""
    verb = "changes" if is_there else "is new"
    return ActionPlan(
        summary=f"{form.key} in {form.namespace} {verb}.",
        table=ActionTable(columns=("Now", "Then"), rows=[(before or "–", form.value)]),
    )


async def put_kv(visit: Visit, form: PutKvForm) -> ActionResult:
    """Write a text."""
    async with visit.client(NamesrvAdmin) as admin:
        done = await admin.put_kv(form.namespace, form.key, form.value)
    return _result_of(f"{form.key} is at {', '.join(done.namesrvs)}.", done)


async def plan_delete_kv(visit: Visit, form: DeleteKvForm) -> ActionPlan:
    """Describe the loss."""
    async with visit.client(NamesrvAdmin) as admin:
        if not await admin.has_kv(form.namespace, form.key):
            return ActionPlan(summary=f"{form.namespace} has no {form.key}.", possible=False)
        before = await admin.get_kv(form.namespace, form.key)
    return ActionPlan(
        summary=f"{form.key} of {form.namespace} is deleted.",
        details=(f"It is: {before}",),
    )


async def delete_kv(visit: Visit, form: DeleteKvForm) -> ActionResult:
    """Delete a text."""
    async with visit.client(NamesrvAdmin) as admin:
        done = await admin.delete_kv(form.namespace, form.key)
    return _result_of(f"{form.key} is deleted at {', '.join(done.namesrvs)}.", done)


# ---- Export, import, probe ---------------------------------------------------------------


async def export(visit: Visit, form: NoArguments) -> AsyncIterator[bytes]:
    """Yield the setup of the cluster as a document."""
    async with visit.client(ClusterAdmin) as admin:
        yield write_setup(await admin.export())


async def plan_import(visit: Visit, form: ImportForm) -> ActionPlan:
    """Say which steps set the cluster up as the document says."""
    _, steps = await _steps(visit, form)
    counts = Counter(one.action for one in steps)
    shown = [one for one in steps if one.action is not ImportAction.LEAVE]
    changes = sum(counts[one] for one in ImportAction) - counts[ImportAction.LEAVE]
    changes -= counts[ImportAction.CONFLICT]
    steps_text = ", ".join(f"{counts[one]} × {one.value}" for one in ImportAction if counts[one])
    rest = len(shown) - SHOWN_STEPS
    loses = form.force or counts[ImportAction.DELETE]
    return ActionPlan(
        summary=f"Steps: {steps_text}."
        if changes
        else f"Nothing changes: {steps_text or 'it is empty'}.",
        details=(f"{rest} further steps are not shown.",) if rest > 0 else (),
        table=_steps_table(shown[:SHOWN_STEPS]) if shown else None,
        warning="Conflicts are left as they are." if counts[ImportAction.CONFLICT] else "",
        typed="import" if changes and loses else "",
        possible=changes > 0,
    )


async def carry_out(visit: Visit, form: ImportForm) -> ActionResult:
    """Set the cluster up as the document says."""
    setup, steps = await _steps(visit, form)
    async with visit.client(ClusterAdmin) as admin:
        done = await admin.carry_out(setup, steps)
    left = [one for one in steps if one.action is ImportAction.CONFLICT]
    return ActionResult(
        summary=f"{done} steps are done, {len(left)} conflicts were left.",
        table=_steps_table(left[:SHOWN_STEPS]) if left else None,
        ok=not left,
    )


async def _steps(visit: Visit, form: ImportForm) -> tuple[ClusterSetup, list[ImportStep]]:
    setup = read_setup(form.document.encode(), "the document")
    async with visit.client(ClusterAdmin) as admin:
        return setup, await admin.plan_import(setup, prune=form.prune, force=form.force)


def _steps_table(steps: Sequence[ImportStep]) -> ActionTable:
    return ActionTable(
        columns=("Step", "What", "Broker", "Name", "Detail"),
        rows=[
            (one.action.value, one.thing.value, one.broker_name, one.name, one.detail)
            for one in steps
        ],
    )


async def plan_probe(visit: Visit, form: ProbeForm) -> ActionPlan:
    """Say where test messages go."""
    async with visit.client(HaAdmin) as admin:
        names = sorted(one.broker_name for one in (await admin.cluster()).brokers)
    return ActionPlan(
        summary=f"{form.count} test messages go to each of {len(names)} broker groups: "
        f"{', '.join(names)}.",
        details=("They go to the topic SELF_TEST_TOPIC, which is made where it is missing.",),
    )


async def probe(visit: Visit, form: ProbeForm) -> ActionResult:
    """Send test messages, and measure them."""
    async with visit.client(ProbeClient) as client:
        found = [one async for one in client.probe_brokers(form.count)]
    failed = sum(one.status is not SendStatus.SEND_OK for one in found)
    rows = [
        (
            one.message_queue.broker_name,
            "" if one.status is None else one.status.name,
            f"{one.took_ms:.1f} ms",
            one.problem,
        )
        for one in found
    ]
    return ActionResult(
        summary=f"{len(found) - failed} of {len(found)} test messages are stored.",
        table=ActionTable(columns=("Broker", "Status", "Took", "Problem"), rows=list(rows)),
        ok=not failed,
    )

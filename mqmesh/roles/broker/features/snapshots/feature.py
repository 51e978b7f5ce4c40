"""Snapshots of the store, made while it is in use."""

from typing import Final

from mqmesh.figures import counter
from mqmesh.protocol.codes import RequestCode
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.feature import Beginning, Feature
from mqmesh.roles.broker.features.snapshots import snapshots
from mqmesh.roles.broker.features.snapshots.snapshot_desk import SnapshotDesk


def make_snapshots(begins: Beginning) -> SnapshotDesk:
    """The desk where snapshots are made: none is."""
    return SnapshotDesk(begins.run_aside, begins.root.absolute())


def _give_up(context: BrokerContext) -> None:
    context.snapshots.give_up()


SNAPSHOTS: Final = Feature(
    commands={
        RequestCode.CREATE_SNAPSHOT: snapshots.create_snapshot,
    },
    tick=snapshots.tick_snapshot,
    stopping=_give_up,
    figures=(
        counter(
            "snapshots_made_total",
            "snapshots that became whole",
            lambda broker: broker.snapshots.made,
        ),
        counter(
            "snapshots_failed_total",
            "snapshots that did not",
            lambda broker: broker.snapshots.failed,
        ),
    ),
)

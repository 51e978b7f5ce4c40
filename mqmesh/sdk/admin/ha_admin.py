"""Administration of replicas: their state, and the hand-over to a follower."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from mqmesh.errors import InvalidArgument, MessageIllegal, MQMeshError, NoRoute
from mqmesh.metrics import MetricReading
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.replication import (
    ChangeVotersRequest,
    ChangeVotersResponse,
    ElectReplicaRequest,
    HaSetting,
    HaSettings,
    HaSettingsRequest,
    HaStatus,
    HaStatusRequest,
    InitGroupRequest,
    LogEpochs,
    PauseFailoverRequest,
    PauseFailoverResponse,
    PromoteReplicaRequest,
    PromoteReplicaResponse,
    PutHaSettingsRequest,
    SwitchOverRequest,
    SwitchOverResponse,
)
from mqmesh.protocol.route import BrokerData
from mqmesh.sdk.admin.admin import MASTER_ID, AdminClient
from mqmesh.sdk.admin.log_comparison import LogComparison, compare_logs, read_epochs
from mqmesh.transport.endpoints import endpoint_of
from mqmesh.units import MIB

OUTSIDE: Final = "OUTSIDE"
"""Role of a replica that does not belong to its group."""
HA_METRICS: Final = "ha_"
"""Prefix of the names of replication metrics."""


class ReplicaReport(msgspec.Struct, frozen=True):
    """Report of a replica about itself.

    Attributes:
        broker_name: Broker group.
        broker_id: 0 for the master, as the name servers know it.
        endpoint: Endpoint where it listens.
        status: Its answer; None if there was none.
        problem: Why there was none.
        metrics: Metrics of replication, whose names begin with ``ha_``.
    """

    broker_name: str
    broker_id: int
    endpoint: str
    status: HaStatus | None
    problem: str = ""
    metrics: tuple[MetricReading, ...] = ()


class HaAdmin(AdminClient):
    """Administration of replicas; arguments as for ``AdminClient``."""

    def ha_status(self, broker_name: str = "") -> list[ReplicaReport]:
        """Return the state of the replicas of broker groups, by group and id.

        Args:
            broker_name: Only of this group.

        Raises:
            NoRoute: No broker is known, or none of that group.
            TransportError: No name server answers.
        """
        reports = []
        for group in self._groups(broker_name):
            for broker_id, address in sorted(group.addresses.items()):
                endpoint = endpoint_of(address.tcp)
                try:
                    answer = self._request(
                        endpoint, RequestCode.GET_HA_STATUS, encode_header(HaStatusRequest())
                    )
                    status, problem = decode_header(HaStatus, answer.header), ""
                    metrics = tuple(
                        one
                        for one in self.role_info(endpoint)
                        if one.metric.name.startswith(HA_METRICS)
                    )
                except MQMeshError as error:
                    status, problem, metrics = None, str(error), ()
                report = ReplicaReport(
                    group.broker_name, broker_id, address.tcp, status, problem, metrics
                )
                reports.append(report)
        return reports

    def promote(
        self, broker_name: str, broker_id: int, *, epoch: int = 0
    ) -> PromoteReplicaResponse:
        """Makes a follower the master of its group; messages that it lacks are lost to the group.

        Args:
            broker_name: Broker group.
            broker_id: Of the follower.
            epoch: Newest epoch that the caller saw; it is an error if another one is the newest. 0:
                without this check.

        Raises:
            NoRoute: The name servers know no such follower.
            InvalidArgument: It is the master; or the master is there.
            BrokerError, TransportError: The follower refuses, or does not answer.
        """
        (group,) = self._groups(broker_name)
        if broker_id == MASTER_ID:
            raise InvalidArgument(f"replica 0 of {broker_name!r} is the master already")
        if MASTER_ID in group.addresses:
            raise InvalidArgument(
                f"the master of {broker_name!r} is there, at {group.addresses[MASTER_ID].tcp}, and "
                "both would take messages: stop it first"
            )
        answer = self._request(
            self._follower(broker_name, broker_id),
            RequestCode.PROMOTE_REPLICA,
            encode_header(PromoteReplicaRequest(epoch)),
        )
        return decode_header(PromoteReplicaResponse, answer.header)

    def switch_over(
        self, broker_name: str, broker_id: int = 0, *, epoch: int = 0
    ) -> SwitchOverResponse:
        """Switches the master of a group over, without loss and without errors at clients.

        Args:
            broker_name: Broker group, of replicas that elect their master.
            broker_id: Replica that is to lead, 1 to 64; 0 for the one with most of the log.
            epoch: Newest epoch that the caller saw; it is an error if another one is the newest. 0:
                without this check.

        Raises:
            NoRoute: The name servers know no master of the group.
            MessageIllegal: No replica can take over, or the named one cannot; the old master goes
                on.
            BrokerError, TransportError: The master refuses, or does not answer.
        """
        answer = self._request(
            self._master(broker_name),
            RequestCode.SWITCH_OVER,
            encode_header(SwitchOverRequest(broker_id, epoch)),
        )
        return decode_header(SwitchOverResponse, answer.header)

    def elect_unclean(self, broker_name: str, broker_id: int, *, epoch: int = 0) -> None:
        """Elects a replica that may lack acknowledged messages: those that it lacks are lost.

        For a group whose replicas in sync are gone for good. It leads soon after this returns.

        Args:
            broker_name: Broker group, of replicas that elect their master.
            broker_id: Of the replica, 1 to 64.
            epoch: Newest epoch that the caller saw; it is an error if another one is the newest. 0:
                without this check.

        Raises:
            NoRoute: The name servers know no such follower.
            MessageIllegal: The group has a master, or its record is lost.
            BrokerError, TransportError: The replica refuses, or does not answer.
        """
        header = encode_header(ElectReplicaRequest(epoch))
        self._request(self._follower(broker_name, broker_id), RequestCode.ELECT_REPLICA, header)

    def init_group(self, broker_name: str, replica_ids: Sequence[int] = ()) -> None:
        """Makes the record of a group again that its coordinator has lost.

        Args:
            broker_name: Broker group, of replicas that elect their master. All of them have to be
                there. The one with most of the log leads soon after this returns.
            replica_ids: Ids of its members; 1 to ``ha.total_replicas`` by default.

        Raises:
            NoRoute: The name servers know no replica of it.
            MessageIllegal: The coordinator knows the group, or a replica is missing.
            BrokerError, TransportError: The replica refuses, or does not answer.
        """
        (group,) = self._groups(broker_name)
        self._request(
            endpoint_of(min(group.addresses.items())[1].tcp),
            RequestCode.INIT_GROUP,
            encode_header(InitGroupRequest(list(replica_ids))),
        )

    def add_replica(
        self, broker_name: str, broker_id: int, *, epoch: int = 0
    ) -> ChangeVotersResponse:
        """Adds a replica to a group. It copies the log once it is there, and comes in sync.

        If it belongs to the group already, nothing changes: the call may be repeated when no answer
        came.

        Args:
            broker_name: Broker group, of replicas that elect their master.
            broker_id: Of the replica, 1 to 64.
            epoch: Newest epoch that the caller saw; it is an error if another one is the newest. 0:
                without this check.

        Raises:
            NoRoute: The name servers know no master of the group.
            MessageIllegal: Another one comes or goes just now.
            BrokerNotAvailable: Nothing was changed, or the outcome is not known yet.
            BrokerError, TransportError: The master refuses, or does not answer.
        """
        return self._change_voters(broker_name, ChangeVotersRequest(broker_id, True, epoch))

    def remove_replica(
        self, broker_name: str, broker_id: int, *, epoch: int = 0
    ) -> ChangeVotersResponse:
        """Removes a replica from a group: sends do not wait for it, and it may not follow.

        Args:
            broker_name: Broker group, of replicas that elect their master.
            broker_id: Of the replica, 1 to 64.
            epoch: Newest epoch that the caller saw; it is an error if another one is the newest. 0:
                without this check.

        Raises:
            NoRoute: The name servers know no master of the group.
            MessageIllegal: It is the master, or too few would be left.
            BrokerNotAvailable: Nothing was changed, or the outcome is not known yet.
            BrokerError, TransportError: The master refuses, or does not answer.
        """
        return self._change_voters(broker_name, ChangeVotersRequest(broker_id, False, epoch))

    def pause_failover(
        self, broker_name: str, *, paused: bool = True, epoch: int = 0
    ) -> PauseFailoverResponse:
        """Pauses or resumes the automatic failover of a group.

        Handing over goes on to work, and a master that comes back leads again. Any replica serves
        the request, so that it works without a master, too.

        Args:
            broker_name: Broker group, of replicas that elect their master.
            paused: No replica is to stand; False ends that.
            epoch: Newest epoch that the caller saw; it is an error if another one is the newest. 0:
                without this check.

        Raises:
            NoRoute: The name servers know no replica of it.
            MessageIllegal: The coordinator does not know the group; or no master is elected there.
            BrokerError, TransportError: No replica can do it; the error of the last one.
        """
        (group,) = self._groups(broker_name)
        header = encode_header(PauseFailoverRequest(paused, epoch))
        answer = self._any_replica(group, RequestCode.PAUSE_FAILOVER, header)
        return decode_header(PauseFailoverResponse, answer.header)

    def epochs(self, broker_name: str) -> dict[int, LogEpochs]:
        """Return the epochs of the log and their starts, by replica; of those that answer.

        Args:
            broker_name: Broker group.

        Raises:
            NoRoute: No such group is known.
            TransportError: No name server answers.
        """
        (group,) = self._groups(broker_name)
        found = {}
        for _, address in sorted(group.addresses.items()):
            with suppress(MQMeshError):
                one = read_epochs(self._request, endpoint_of(address.tcp))
                found[one.broker_id] = one
        return found

    def compare_logs(
        self, broker_name: str, *, bytes_per_s: int = 64 * MIB
    ) -> Iterator[LogComparison]:
        """Compares the logs of a group's replicas, as far as they must be the same.

        Replicas that do not belong to the group, and those that no name server knows, are left out:
        see ``broker_ids``.

        Args:
            broker_name: Broker group.
            bytes_per_s: Most bytes that each replica reads in a second, 1 or more.

        Yields:
            Once for each MiB, and for each difference.

        Raises:
            NoRoute: No such group is known.
            InvalidArgument: There are fewer than two replicas, or their logs have no common part.
            BrokerError, TransportError: A replica refuses, or does not answer for 10 s.
        """
        reports = self.ha_status(broker_name)
        inside = [one for one in reports if one.status is None or one.status.role != OUTSIDE]
        endpoints = {str(one.broker_id): endpoint_of(one.endpoint) for one in inside}
        yield from compare_logs(
            self._request, endpoints, self._transport.pause, bytes_per_s=max(bytes_per_s, 1)
        )

    def cluster_settings(self, broker_name: str = "") -> HaSettings:
        """Return the settings of replication that a cluster has for all of its replicas.

        Args:
            broker_name: Group whose replica answers; one that elects its master by default.

        Raises:
            NoRoute: No broker is known, or none of that group.
            MessageIllegal: No master is elected there.
            BrokerError, TransportError: No replica can answer; the error of the last one.
        """
        return self._settings_of(broker_name)[1]

    def change_cluster_settings(
        self, changes: Mapping[str, str | None], broker_name: str = "", *, version: int = 0
    ) -> HaSettings:
        """Changes the settings of a cluster; replicas use them in place of their own in seconds.

        Args:
            changes: New values by name, as they are written in a broker's settings; None for
                settings that shall be each replica's own again.
            broker_name: As for ``cluster_settings``.
            version: Version that the caller saw; it is an error if they have another one. 0:
                without this check.

        Returns:
            All settings of the cluster.

        Raises:
            NoRoute: No broker is known, or none of that group.
            MessageIllegal: A name or a value cannot be; or they have another version by now.
            BrokerError, TransportError: No replica can do it; the error of the last one.
        """
        group, before = self._settings_of(broker_name)
        settings = {one.name: one.value for one in before.settings}
        for name, value in changes.items():
            if value is not None:
                settings[name] = value
            else:
                settings.pop(name, None)
        wanted = [HaSetting(name, value) for name, value in sorted(settings.items())]
        header = encode_header(PutHaSettingsRequest(version or before.version, wanted))
        answer = self._any_replica(group, RequestCode.PUT_HA_SETTINGS, header)
        return decode_header(HaSettings, answer.header)

    def _settings_of(self, broker_name: str) -> tuple[BrokerData, HaSettings]:
        refusal: MessageIllegal | None = None
        header = encode_header(HaSettingsRequest())
        for group in self._groups(broker_name):
            try:
                answer = self._any_replica(group, RequestCode.GET_HA_SETTINGS, header)
                return group, decode_header(HaSettings, answer.header)
            except MessageIllegal as error:
                refusal = error
        raise refusal or NoRoute("no broker group is known")

    def _change_voters(
        self, broker_name: str, request: ChangeVotersRequest
    ) -> ChangeVotersResponse:
        header = encode_header(request)
        answer = self._request(self._master(broker_name), RequestCode.CHANGE_VOTERS, header)
        return decode_header(ChangeVotersResponse, answer.header)

    def _any_replica(self, group: BrokerData, code: RequestCode, header: bytes) -> Command:
        """Asks one replica after the other, the master first, until one can do it."""
        failure: MQMeshError | None = None
        for _, address in sorted(group.addresses.items()):
            try:
                return self._request(endpoint_of(address.tcp), code, header)
            except MessageIllegal:
                raise
            except MQMeshError as error:
                failure = error
        raise failure or NoRoute(f"the name servers know no replica of {group.broker_name!r}")

    def _master(self, broker_name: str) -> str:
        (group,) = self._groups(broker_name)
        if MASTER_ID not in group.addresses:
            raise NoRoute(f"the name servers know no master of {broker_name!r}")
        return endpoint_of(group.addresses[MASTER_ID].tcp)

    def _follower(self, broker_name: str, broker_id: int) -> str:
        (group,) = self._groups(broker_name)
        if broker_id not in group.addresses:
            known = ", ".join(str(one) for one in sorted(group.addresses)) or "none"
            raise NoRoute(
                f"the name servers know no replica {broker_id} of {broker_name!r}: {known}"
            )
        return endpoint_of(group.addresses[broker_id].tcp)

    def _groups(self, broker_name: str) -> list[BrokerData]:
        groups = sorted(self.cluster().brokers, key=lambda one: one.broker_name)
        found = [one for one in groups if broker_name in ("", one.broker_name)]
        if not found:
            known = ", ".join(one.broker_name for one in groups) or "there are none"
            raise NoRoute(f"no broker group {broker_name!r} is known ({known})")
        return found

"""One cluster that the console shows: its sampler, its clients, and the rights of its users."""

import datetime
import logging
from typing import Final

from mqmesh.aio import AccessClient
from mqmesh.clock import Clock
from mqmesh.console.cluster_view import ClusterView
from mqmesh.console.config import ClusterSource, ConsoleConfig
from mqmesh.console.page import Lender, Visit
from mqmesh.console.rights import RightsAnswer, UserRights
from mqmesh.console.sampler import ClusterSampler
from mqmesh.console.shared_answers import SharedAnswers
from mqmesh.console.tails import Tails
from mqmesh.console.users import ConsoleUser
from mqmesh.errors import NoPermission, TransportError, UnsupportedCommand
from mqmesh.sdk.client.options import find_credentials
from mqmesh.security.access_list import AccessList, read_access_list

RIGHTS_MS: Final = 10_000
"""Rights of a user are read again after this."""
NOT_FOR_YOU: Final = "your user may not see the whole cluster: it needs the role view"

_log = logging.getLogger(__name__)


class WatchedCluster:
    """A cluster.

    Args:
        source: Its name and name servers.
        sampler: Looks at it by the console's own credentials.
        lender: Lends clients of its users.
        tails: Live tails of its topics.
        clock: Source of time.
    """

    def __init__(
        self,
        source: ClusterSource,
        sampler: ClusterSampler,
        lender: Lender,
        tails: Tails,
        clock: Clock,
    ) -> None:
        self.source = source
        self.sampler = sampler
        self.lender = lender
        self.tails = tails
        self._clock = clock
        self._answers = SharedAnswers(clock, RIGHTS_MS)
        self._last: dict[str, RightsAnswer] = {}

    async def visit(self, user: ConsoleUser, config: ConsoleConfig, today: datetime.date) -> Visit:
        """Return the means of one request.

        Args:
            user: User who sent the request.
            config: Settings of the console.
            today: By UTC.

        Raises:
            MQMeshError: No name server answers, and never did, or the credentials are bad.
        """
        self.sampler.watch()

        async def ask() -> RightsAnswer:
            return await self._ask_rights(user.credentials, today)

        answer: RightsAnswer = await self._answers.get(user.credentials, ask)
        return Visit(
            user=user,
            rights=answer.rights,
            sees_all=answer.has_view,
            view=self.sampler.view if answer.has_view else ClusterView(problem=NOT_FOR_YOU),
            readings=self.sampler.readings if answer.has_view else None,
            series=self.sampler.series if answer.has_view else None,
            lender=self.lender,
            tails=self.tails,
            config=config,
            clock=self._clock,
            cluster=self.source.name,
            namesrv_addr=self.source.namesrv_addr,
        )

    async def _ask_rights(self, credentials: str, today: datetime.date) -> RightsAnswer:
        found = find_credentials(credentials)
        name = found.user if found is not None else ""
        try:
            access_list = await self._access_list(credentials, today)
            answer = RightsAnswer(UserRights(name, access_list, today), True)
        except UnsupportedCommand:
            answer = RightsAnswer(UserRights("", None, today), True)  # security is off
        except NoPermission:
            answer = RightsAnswer(UserRights(name, await self._own_list(today), today), False)
        except TransportError:
            # Pages of a cluster that is gone for a while show the last readings.
            if credentials not in self._last:
                raise
            return self._last[credentials]
        self._last[credentials] = answer
        return answer

    async def _own_list(self, today: datetime.date) -> AccessList | None:
        try:
            return await self._access_list(self.source.credentials, today)
        except NoPermission:
            _log.warning("the console's own user needs the role view; nothing is greyed out")
            return None

    async def _access_list(self, credentials: str, today: datetime.date) -> AccessList:
        async with self.lender.lend(credentials, AccessClient) as client:
            response = await client.access_list()
        return read_access_list(response.text, "the access list", today)

"""Messages looked up by key and by id."""

from typing import Final

from mqmesh.protocol.codes import RequestCode
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.features.queries import query

QUERIES: Final = Feature(
    commands={
        RequestCode.QUERY_MESSAGE: query.query_message,
        RequestCode.QUERY_MESSAGE_BY_ID: query.query_message_by_id,
    },
)

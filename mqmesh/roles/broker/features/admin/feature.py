"""Topics, for administrators, and figures of the broker."""

from typing import Final

from mqmesh.protocol.codes import RequestCode
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.features.admin import admin

ADMIN: Final = Feature(
    commands={
        RequestCode.UPDATE_AND_CREATE_TOPIC: admin.update_and_create_topic,
        RequestCode.GET_TOPIC_CONFIG: admin.get_topic_config,
        RequestCode.DELETE_TOPIC_IN_BROKER: admin.delete_topic,
        RequestCode.GET_TOPIC_STATS_INFO: admin.get_topic_stats,
        RequestCode.GET_BROKER_RUNTIME_INFO: admin.get_broker_runtime_info,
        RequestCode.VIEW_MESSAGE: admin.view_message,
    },
)

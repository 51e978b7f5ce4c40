"""Messages that failed: tried again later, or dead letters."""

from typing import Final

from mqmesh.protocol.codes import RequestCode
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.features.retries import dead_letters, send_back

RETRIES: Final = Feature(
    commands={
        RequestCode.CONSUMER_SEND_MSG_BACK: send_back.send_back,
        RequestCode.RESEND_DEAD_LETTERS: dead_letters.resend,
    },
    sample=dead_letters.forget_marks,
)

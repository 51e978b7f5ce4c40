"""Messages that failed: tried again later, or dead letters."""

from typing import Final

from mqmesh.figures import counter
from mqmesh.protocol.codes import RequestCode
from mqmesh.roles.broker.context import Retries
from mqmesh.roles.broker.feature import Beginning, Feature
from mqmesh.roles.broker.features.retries import dead_letters, send_back
from mqmesh.roles.broker.features.retries.dead_letter_marks import DeadLetterMarks


def make_retries(begins: Beginning) -> Retries:
    """What is remembered of failed messages: nothing."""
    return Retries(marks=DeadLetterMarks(begins.chance))


RETRIES: Final = Feature(
    commands={
        RequestCode.CONSUMER_SEND_MSG_BACK: send_back.send_back,
        RequestCode.RESEND_DEAD_LETTERS: dead_letters.resend,
    },
    sample=dead_letters.forget_marks,
    figures=(
        counter(
            "sent_back_messages_total",
            "messages that consumers sent back",
            lambda broker: broker.stats.total.sent_back_messages,
            unit="messages",
        ),
        counter(
            "dead_letters_total",
            "of them, messages that became dead letters",
            lambda broker: broker.stats.total.dead_letters,
            unit="messages",
        ),
        counter(
            "resent_dead_letters_total",
            "dead letters that were sent once more",
            lambda broker: broker.stats.total.resent_dead_letters,
            unit="messages",
        ),
    ),
)

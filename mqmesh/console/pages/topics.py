"""Topics: list, one of them, and their actions."""

from typing import Final

from mqmesh.console.actions import topics as actions
from mqmesh.console.page import ConsoleAction, ConsolePage, Route
from mqmesh.console.queries import topics as queries
from mqmesh.protocol.commands import Right

ROUTES: Final[tuple[Route, ...]] = (
    ConsolePage(
        path="/topics",
        nav="Topics",
        title="Topics",
        right=Right.VIEW,
        template="topics.html",
        arguments=queries.TopicsArguments,
        query=queries.topics,
        about="Topics with their queues and rates.",
    ),
    ConsolePage(
        path="/topics/{topic}",
        title="Topic {topic}",
        right=Right.VIEW,
        template="topic.html",
        arguments=queries.TopicArguments,
        query=queries.topic,
        about="One topic: settings, queues, and the groups that read it.",
    ),
    ConsolePage(
        path="/topics/{topic}/tail",
        title="Tail of {topic}",
        right=Right.SUB,
        template="tail.html",
        arguments=queries.TailArguments,
        query=queries.tail,
        about="Messages that came since the tail began: 60 s and 1,000 messages at most.",
    ),
    ConsoleAction(
        path="/topics/{topic}/send",
        title="Send to {topic}",
        verb="Send",
        right=Right.PUB,
        arguments=actions.SendForm,
        plan=actions.plan_send,
        do=actions.send,
    ),
    ConsoleAction(
        path="/new/topic",
        title="New topic",
        verb="Create",
        right=Right.ADMIN,
        arguments=actions.NewTopicForm,
        plan=actions.plan_create,
        do=actions.create,
    ),
    ConsoleAction(
        path="/topics/{topic}/settings",
        title="Settings of topic {topic}",
        verb="Apply",
        right=Right.ADMIN,
        arguments=actions.TopicForm,
        initial=actions.initial_settings,
        plan=actions.plan_settings,
        do=actions.put_settings,
    ),
    ConsoleAction(
        path="/topics/{topic}/delete",
        title="Delete topic {topic}",
        verb="Delete",
        right=Right.ADMIN,
        danger=True,
        arguments=queries.TopicArguments,
        plan=actions.plan_delete,
        do=actions.delete,
    ),
)

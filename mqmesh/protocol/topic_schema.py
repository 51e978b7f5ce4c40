"""Structs of schemas of topics: a document that people and tools read, and brokers keep."""

from typing import Annotated, Final

import msgspec

from mqmesh.protocol.names import TopicName

MAX_SCHEMA_CHARACTERS: Final = 65_536

SchemaText = Annotated[str, msgspec.Meta(max_length=MAX_SCHEMA_CHARACTERS)]


class PutTopicSchemaRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """PUT_TOPIC_SCHEMA: keeps a document about the bodies of a topic; answered once that is safe.

    Brokers do not look into it, and check no message by it.

    Attributes:
        topic: Topic.
        schema: The document; empty to remove it.

    Errors:
        TOPIC_NOT_EXIST: The broker does not have the topic.
        NO_PERMISSION: The name is reserved.
        SYSTEM_BUSY: There are schemas of 1,000 topics.
    """

    topic: TopicName
    schema: SchemaText


class TopicSchemaRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """GET_TOPIC_SCHEMA: the document about the bodies of a topic.

    Attributes:
        topic: Topic.

    Errors:
        TOPIC_NOT_EXIST: The broker does not have the topic.
    """

    topic: TopicName


class TopicSchema(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to GET_TOPIC_SCHEMA.

    Attributes:
        schema: The document; empty for none.
    """

    schema: SchemaText = ""

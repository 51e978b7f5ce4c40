"""Bodies of messages as text and as JSON, in data frames and in SQL."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


def text(body: "Column | str" = "body") -> "Column":
    """Returns a body as text; null where it is no UTF-8.

    Args:
        body: A binary column, or its name.
    """
    from pyspark.sql.functions import col, try_validate_utf8

    column = col(body) if isinstance(body, str) else body
    return try_validate_utf8(column.cast("string"))


def json(path: str, body: "Column | str" = "body") -> "Column":
    """Returns the value at a path of a JSON body, as text; null where there is none.

    Args:
        path: JSON path, such as ``$.price`` or ``$.lines[0].sku``.
        body: A binary column, or its name.
    """
    from pyspark.sql.functions import get_json_object

    return get_json_object(text(body), path)


def with_values(frame: "DataFrame", topics: Sequence[str] = ("*",)) -> "DataFrame":
    """Adds the column ``value``: bodies as parsed JSON, of the type VARIANT.

    It is null where a body is no UTF-8 or no JSON, or has a name twice in an object, and in other
    topics. ``try_variant_get(value, '$.price', 'double')`` is null, too, where a value is missing
    or of another type; ``variant_get`` is an error for the latter.

    Args:
        frame: Messages, with the columns ``topic`` and ``body``.
        topics: Topics whose bodies are parsed: names, or beginnings with ``*`` behind.
    """
    from pyspark.sql.functions import col, lit, try_parse_json, when

    wanted = lit(False)
    for name in topics:
        topic = col("topic")
        wanted |= topic.startswith(name[:-1]) if name.endswith("*") else topic == name
    return frame.withColumn("value", when(wanted, try_parse_json(text())))


def register_functions(spark: "SparkSession") -> None:
    """Makes ``text(body)`` and ``json(body, '$.price')`` known to the SQL of a session."""
    as_text = "try_validate_utf8(CAST(body AS STRING))"
    spark.sql(
        "CREATE OR REPLACE TEMPORARY FUNCTION text(body BINARY) RETURNS STRING RETURN " + as_text
    )
    spark.sql(
        "CREATE OR REPLACE TEMPORARY FUNCTION json(body BINARY, path STRING) RETURNS STRING "
        f"RETURN get_json_object({as_text}, path)"
    )

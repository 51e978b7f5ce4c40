"""Bodies of messages as text and as JSON, in data frames and in SQL."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession


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

"""Where Spark looks for the data source ``mqmesh``: it finds modules of this kind by their name."""

from mqmesh.spark.data_source import MqmeshDataSource as DefaultSource

__all__ = ["DefaultSource"]

"""Metrics, as Prometheus has them: families of series with labels. Pure."""

from collections.abc import Iterable, Iterator

import msgspec

from mqmesh.metrics import Distribution, MetricKind


class ExportedMetric(msgspec.Struct, frozen=True):
    """Description that all series of a family have in common.

    Attributes:
        name: As it is exposed; of a histogram without ``_bucket``, ``_sum`` and ``_count``.
        kind: ``COUNTER``, ``GAUGE`` or ``HISTOGRAM``.
        help: One line.
        labels: Their names.
    """

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...]


class Series(msgspec.Struct, frozen=True):
    """One value of an exported metric.

    Attributes:
        exported: Which one.
        labels: Values of its labels, in their order.
        value: A distribution for a histogram, else a number.
    """

    exported: ExportedMetric
    labels: tuple[str, ...]
    value: float | Distribution


class Families:
    """Series by exported metric, in the order in which metrics came; of equal ones the first stays.

    Args:
        series: All of them.
    """

    def __init__(self, series: Iterable[Series]) -> None:
        self._by_name: dict[
            str, tuple[ExportedMetric, dict[tuple[str, ...], float | Distribution]]
        ] = {}
        for one in series:
            exported, values = self._by_name.setdefault(one.exported.name, (one.exported, {}))
            if (exported.labels, exported.kind) == (one.exported.labels, one.exported.kind):
                values.setdefault(one.labels, one.value)

    def __len__(self) -> int:
        return sum(len(values) for _, values in self._by_name.values())

    def __iter__(
        self,
    ) -> Iterator[tuple[ExportedMetric, dict[tuple[str, ...], float | Distribution]]]:
        """Yield each exported metric, and its values by labels."""
        return iter(self._by_name.values())

    def sums(self, name: str, by: tuple[str, ...], **where: str) -> dict[tuple[str, ...], float]:
        """Adds up the series of a counter or gauge that have some labels in common.

        Args:
            name: Name of the exported metric.
            by: Labels by whose values it sums; one that the exported metric has not is "".
            where: Only series with these values of labels.

        Returns:
            Sums by the values of ``by``; none if there is no such exported.
        """
        found: dict[tuple[str, ...], float] = {}
        exported, values = self._by_name.get(name, (None, {}))
        for labels, value in values.items():
            assert exported is not None
            pairs = dict(zip(exported.labels, labels, strict=True))
            if isinstance(value, Distribution) or not where.items() <= pairs.items():
                continue
            key = tuple(pairs.get(label, "") for label in by)
            found[key] = found.get(key, 0.0) + value
        return found

"""Metrics for Prometheus: a file that the node exporter's textfile collector reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptstore.errors import UsageError, translate_os_errors

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Metric:
    """A measured value.

    Attributes:
        name: Without the prefix ``ckptstore_``; times end in ``_timestamp_seconds``.
        help: What it is.
        values: The value for each set of labels, as ``((name, value), …)``.
    """

    name: str
    help: str
    values: Mapping[Labels, float]


def write_metrics(path: Path, metrics: Iterable[Metric]) -> None:
    """Replace the file in one step, so that a half of it is never read.

    Raises:
        UsageError: the package prometheus_client is missing.
        CkptError: the file cannot be written.
    """
    try:
        from prometheus_client import CollectorRegistry, Gauge, write_to_textfile
    except ImportError:
        raise UsageError(
            "metrics for Prometheus need the package prometheus_client",
            hint="pip install 'ckptstore[backup]'",
        ) from None
    registry = CollectorRegistry()
    for metric in metrics:
        names = list(dict.fromkeys(name for labels in metric.values for name, _ in labels))
        gauge = Gauge(f"ckptstore_{metric.name}", metric.help, names, registry=registry)
        for labels, value in metric.values.items():
            known = dict(labels)
            (gauge.labels(*(known.get(n, "") for n in names)) if names else gauge).set(value)
    with translate_os_errors(str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_to_textfile(str(path), registry)

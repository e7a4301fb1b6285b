"""A store's status as metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable

from ckptstore.backup.metrics import Labels, Metric
from ckptstore.errors import printable
from ckptstore.maintenance.mirrorstatus import MirrorStatus, RunMirror
from ckptstore.maintenance.status import RunStatus, StoreStatus
from ckptstore.records import moment

Value = float | None


def metrics_of(status: StoreStatus) -> list[Metric]:
    """The metrics; what is not known is left out, and so is a metric without any value."""
    store = (("store", printable(status.uri)),)
    found = [
        _Gathered("status_timestamp_seconds", "When the status was found out", status.at, store),
        _Gathered("free_bytes", "Bytes that can still be stored", status.free, store),
        _Gathered(
            "full_in_seconds",
            "Until the store is full at this growth if nothing is deleted",
            status.full_in,
            store,
        ),
    ]
    for run in status.runs:
        found += _of_run(run, store)
    for mirror in status.mirrors:
        found += _of_mirror(mirror, store)
    return _by_name(found)


class _Gathered:
    def __init__(self, name: str, about: str, value: Value, labels: Labels) -> None:
        self.name = name
        self.about = about
        self.value = value
        self.labels = labels


def _of_run(run: RunStatus, store: Labels) -> Iterable[_Gathered]:
    newest = run.newest
    verified = moment(run.verified.at) if run.verified is not None else None
    saved = moment(newest.created) if newest is not None else None
    values: list[tuple[str, str, Value]] = [
        ("checkpoints", "Checkpoints of the run", run.checkpoints),
        ("damaged_checkpoints", "Those that are known to be damaged", len(run.damaged)),
        ("newest_step", "Step of the newest intact one", newest.step if newest else None),
        ("newest_timestamp_seconds", "When that was saved, by its writer's clock", saved),
        ("checkpoints_bytes", "Sum of the sizes of the run's checkpoints", run.bytes),
        ("growth_bytes_per_second", "Growth of the run if nothing is deleted", run.growth),
        ("verified_timestamp_seconds", "When a checkpoint was last found right", verified),
        ("trash_bytes", "What the trash holds", run.trash.bytes),
        ("unfinished_bytes", "What is being written", run.unfinished.bytes),
        ("orphans_bytes", "What dead saves left", run.orphans.bytes),
        ("loss_is_everything", "Whether no mirror holds any of it", float(run.loss.everything)),
        ("loss_checkpoints", "Checkpoints lost if the store died now", run.loss.checkpoints),
        ("loss_steps", "Steps lost if the store died now", run.loss.steps),
        ("loss_seconds", "Time between the saves lost if it died now", run.loss.seconds),
    ]
    labels = (*store, ("run", run.run))
    yield from (_Gathered(name, about, value, labels) for name, about, value in values)
    for reached in run.mirrors:
        yield from _of_pair(reached, labels)


def _of_pair(reached: RunMirror, run: Labels) -> Iterable[_Gathered]:
    labels = (*run, ("mirror", printable(reached.mirror)))
    behind = reached.behind
    values: list[tuple[str, str, Value]] = [
        ("mirror_lag_checkpoints", "Checkpoints that the mirror lacks", behind.checkpoints),
        ("mirror_lag_bytes", "Bytes in them", behind.bytes),
        ("mirror_lag_seconds", "Age of the oldest of them", behind.seconds),
        (
            "mirror_newest_step",
            "Step of the newest one there",
            reached.newest.step if reached.newest is not None else None,
        ),
    ]
    return (_Gathered(name, about, value, labels) for name, about, value in values)


def _of_mirror(mirror: MirrorStatus, store: Labels) -> Iterable[_Gathered]:
    labels = (*store, ("mirror", printable(mirror.uri)))
    up = float(mirror.answered) if mirror.asked else None
    reached = moment(mirror.reached) if mirror.reached is not None else None
    about = "When the mirror last held all that it was owed"
    return (
        _Gathered("mirror_up", "Whether the mirror answered", up, labels),
        _Gathered("mirror_reached_timestamp_seconds", about, reached, labels),
    )


def _by_name(found: Iterable[_Gathered]) -> list[Metric]:
    values: dict[tuple[str, str], dict[Labels, float]] = {}
    for one in found:
        if one.value is not None:
            values.setdefault((one.name, one.about), {})[one.labels] = one.value
    return [Metric(name, about, of) for (name, about), of in values.items()]

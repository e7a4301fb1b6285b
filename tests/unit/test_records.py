from __future__ import annotations

import builtins
import math
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from ckptstore import document, records
from ckptstore.errors import CkptError, IntegrityError, NotFoundError, UsageError
from ckptstore.layout import MARKER, Name, RunKeys
from ckptstore.maintenance import gc, verify
from ckptstore.records import (
    BestRule,
    Commit,
    Mark,
    Process,
    Void,
    decode_lease,
    decode_mark,
    decode_record,
    decode_trash,
    finite,
    is_gone,
    process_here,
    timestamp,
    writer_here,
)
from ckptstore.store import Store
from tests.unit.support import (
    RUN,
    Clock,
    again,
    examples,
    failed_save,
    file_store,
    flipped,
    killed_save,
    memory_store,
    objects,
    requiring,
    rewrite_marker,
    rewrite_record,
    save,
)

KEYS = RunKeys(RUN)


def record_data(store: Store, name: Name) -> bytes:
    return store.backend.read(KEYS.record(name), 2**30)


def test_a_commit_says_what_a_listing_needs() -> None:
    store = memory_store()
    first = save(store, 5)
    second = save(store, 3, metrics={"reward": 0.5}, tags=["good"], best=BestRule("reward", "max"))
    commit = second.commit
    assert (commit.run, commit.step, commit.seq) == (RUN, 3, 2)
    assert commit.name == str(second.name)
    assert commit.parent == str(first.name)
    assert commit.store == store.id
    assert (commit.size, commit.files) == (405, 3)
    assert commit.metrics == {"reward": 0.5}
    assert commit.tags == ("good",)
    assert str(commit.best) == "reward:max"
    manifest = store.backend.read(KEYS.manifest(second.name), 2**30)
    assert commit.manifest.size == len(manifest)
    assert commit.manifest.digest == blake3(manifest).hexdigest()
    assert commit.content == second.manifest.content


def test_a_record_is_read_back_from_its_document() -> None:
    store = memory_store()
    checkpoint = save(store)
    data = record_data(store, checkpoint.name)
    assert decode_record(data, RUN, checkpoint.name, "it") == checkpoint.commit
    assert document.encode(checkpoint.commit) == data


def test_any_single_flipped_bit_of_a_record_is_detected() -> None:
    store = memory_store()
    checkpoint = save(store)
    data = record_data(store, checkpoint.name)
    for bit in range(len(data) * 8):
        with pytest.raises(IntegrityError):
            decode_record(flipped(data, bit), RUN, checkpoint.name, "it")


def unknown_kind(data: bytes) -> bytes:
    body = document.body_of(data, "it").replace(b'"commit"', b'"comet"')
    return document.encode(msgspec.Raw(body))  # type: ignore[arg-type]


REPLACED: dict[str, Callable[[bytes], bytes]] = {
    "cut short": lambda data: data[:-10],
    "empty": lambda _: b"",
    "flipped bit": lambda data: flipped(data, 900),
    "unknown kind": unknown_kind,
    "too long": lambda _: bytes(document.SIZE_LIMIT + 1),
}

REWRITTEN: dict[str, dict[str, Any]] = {
    "newer format": {"format": 2},
    "unknown feature": {"requires": ("zstd",)},
    "negative size": {"size": -1},
    "no digest": {"content": "x"},
}


def unreadable(store: Store, how: str) -> Name:
    """A checkpoint whose record cannot be read, beside one that can."""
    save(store, 1)
    checkpoint = save(store, 2)
    key = KEYS.record(checkpoint.name)
    data = store.backend.read(key, 2**30)
    if how in REPLACED:
        store.backend.put(key, REPLACED[how](data))
    elif how == "moved to another key":
        store.backend.put(key, record_data(store, store.list(RUN)[0].name))
    elif how == "a directory":
        store.backend.delete([key])
        store.backend.put(f"{key}/x", b"x")
    else:
        rewrite_record(checkpoint, **REWRITTEN[how])
    return checkpoint.name


HOW = [*REPLACED, *REWRITTEN, "moved to another key", "a directory"]


def store_for(how: str, root: Path) -> Store:
    """In memory, except for what only a file system can have at a key."""
    return file_store(root) if how == "a directory" else memory_store()


@pytest.mark.parametrize("how", HOW)
def test_a_record_that_cannot_be_read_protects_its_directory_from_gc(
    how: str, tmp_path: Path
) -> None:
    store = store_for(how, tmp_path)
    name = unreadable(store, how)
    before = objects(store)
    for dry_run in (True, False):
        result = gc(store, grace=0, dry_run=dry_run)
        assert not [a for a in result.removed if str(name) in a.key]
    assert objects(store) == before


@pytest.mark.parametrize("how", HOW)
def test_a_record_that_cannot_be_read_is_listed_as_damaged_and_hides_no_other(
    how: str, tmp_path: Path
) -> None:
    store = store_for(how, tmp_path)
    name = unreadable(store, how)
    rows = {row.name: row for row in store.rows(RUN)}
    assert len(rows) == 2
    assert rows[str(name)].state == "damaged"
    assert rows[str(name)].note
    assert rows[str(name)].digest is None
    assert [c.step for c in store.list(RUN)] == [1]


@pytest.mark.parametrize("how", HOW)
def test_a_checkpoint_without_a_readable_record_is_an_integrity_error_to_whoever_wants_it(
    how: str, tmp_path: Path
) -> None:
    store = store_for(how, tmp_path)
    name = unreadable(store, how)
    with pytest.raises(IntegrityError):
        store.get(RUN, name=str(name))
    with pytest.raises(IntegrityError):
        store.get(RUN, step=2)
    with pytest.raises(IntegrityError):
        store.latest(RUN)
    assert store.get(RUN, step=1).step == 1


@pytest.mark.parametrize("how", HOW)
def test_a_save_goes_on_after_a_record_that_cannot_be_read(how: str, tmp_path: Path) -> None:
    store = store_for(how, tmp_path)
    name = unreadable(store, how)
    new = save(store, 3)
    assert new.seq == name.seq + 1
    assert store.latest(RUN) is not None


def test_the_hint_for_a_newer_format_or_feature_is_to_update() -> None:
    for how in ("newer format", "unknown feature"):
        store = memory_store()
        checkpoint = save(store)
        rewrite_record(checkpoint, **REWRITTEN[how])
        with pytest.raises(IntegrityError) as caught:
            store.get(RUN, step=1)
        assert caught.value.hint == "update ckptstore"


def test_a_void_is_no_checkpoint() -> None:
    store = memory_store()
    save(store, 1)
    name = failed_save(store, 2)
    record = decode_record(record_data(store, name), RUN, name, "it")
    assert isinstance(record, Void)
    with pytest.raises(NotFoundError):
        store.get(RUN, step=2)
    with pytest.raises(NotFoundError):
        store.get(RUN, name=str(name))


def test_a_name_that_was_given_up_is_never_used_again() -> None:
    store = memory_store()
    voided = failed_save(store)
    assert save(store).seq == voided.seq + 1


# The marker


def refused_everywhere(store: Store) -> None:
    before = objects(store)
    with pytest.raises(IntegrityError):
        again(store)
    assert objects(store) == before


def test_a_marker_of_a_newer_format_is_refused_and_nothing_is_touched() -> None:
    store = memory_store()
    save(store)
    rewrite_marker(store, format=2)
    refused_everywhere(store)


def test_a_marker_that_needs_an_unknown_feature_for_reading_is_refused() -> None:
    store = memory_store()
    save(store)
    rewrite_marker(store, requires=requiring(read=("encryption",)))
    refused_everywhere(store)


def test_a_store_that_cannot_be_read_is_refused_at_each_call_and_not_only_at_the_first() -> None:
    opened_before = memory_store()
    other = Store(opened_before.backend)
    save(other)
    rewrite_marker(other, requires=requiring(read=("encryption",)))
    for _ in range(3):
        with pytest.raises(IntegrityError):
            opened_before.list(RUN)


@pytest.mark.parametrize("how", ["cut", "flip", "empty", "not ours"])
def test_a_damaged_marker_is_refused_and_not_replaced(how: str) -> None:
    store = memory_store()
    save(store)
    data = store.backend.read(MARKER, 2**20)
    bad = {"cut": data[:-3], "flip": flipped(data, 800), "empty": b"", "not ours": b"{}\n"}[how]
    store.backend.put(MARKER, bad)
    refused_everywhere(store)


def test_an_unknown_feature_for_writing_leaves_reading_and_refuses_every_change() -> None:
    clock = Clock()
    store = memory_store(clock)
    checkpoint = save(store)
    save(store, 2)
    killed_save(store, 3)
    rewrite_marker(store, requires=requiring(write=("chunks",)))
    store = again(store)
    before = objects(store)
    clock.advance(10 * 86400)
    calls: list[Any] = [
        lambda: save(store, 9),
        lambda: store.pin(checkpoint),
        lambda: store.unpin(checkpoint),
        lambda: store.tag(checkpoint, "good"),
        lambda: store.untag(checkpoint, "good"),
        lambda: store.add_metrics(checkpoint, {"x": 1.0}),
        lambda: store.delete(checkpoint, force=True),
        lambda: gc(store, force=True),
    ]
    for call in calls:
        with pytest.raises(IntegrityError, match="chunks"):
            call()
        assert objects(store) == before
    assert store.get(RUN, step=1).read_bytes("a.txt") == b"alpha"
    assert len(store.rows(RUN, everything=True)) == 3


@pytest.mark.parametrize("damage", [False, True])
def test_verification_of_a_store_that_may_not_be_written_leaves_no_mark(damage: bool) -> None:
    store = memory_store()
    checkpoint = save(store)
    if damage:
        store.backend.put(checkpoint.key("a.txt"), b"alphb")
    rewrite_marker(store, requires=requiring(write=("chunks",)))
    store = again(store)
    before = objects(store)
    assert verify(store.get(RUN, step=1), deep=True).ok is not damage
    assert objects(store) == before


def test_reading_damage_from_a_store_that_may_not_be_written_says_so_and_leaves_no_mark() -> None:
    store = memory_store()
    checkpoint = save(store)
    store.backend.put(checkpoint.key("a.txt"), b"alphb")
    rewrite_marker(store, requires=requiring(write=("chunks",)))
    store = again(store)
    before = objects(store)
    with pytest.raises(IntegrityError, match=r"a\.txt"):
        store.get(RUN, step=1).read_bytes("a.txt")
    assert objects(store) == before


def test_an_unknown_feature_for_deleting_leaves_saving_and_refuses_every_deletion() -> None:
    clock = Clock()
    store = memory_store(clock)
    checkpoint = save(store)
    killed_save(store, 3)
    rewrite_marker(store, requires=requiring(delete=("holds",)))
    store = again(store)
    save(store, 2)
    store.pin(checkpoint)
    store.unpin(checkpoint)
    before = objects(store)
    clock.advance(10 * 86400)
    with pytest.raises(IntegrityError, match="holds"):
        store.delete(checkpoint, force=True)
    with pytest.raises(IntegrityError, match="holds"):
        gc(store)
    assert objects(store) == before


def test_what_a_newer_version_added_to_a_marker_does_no_harm() -> None:
    store = memory_store()
    save(store)
    body = document.body_of(store.backend.read(MARKER, 2**20), "it")
    more = body[:-1] + b',"later":{"x":1}}'
    store.backend.put(MARKER, document.encode(msgspec.Raw(more)))  # type: ignore[arg-type]
    assert again(store).get(RUN, step=1).step == 1


# The other documents


def test_marks_trash_and_leases_that_were_moved_to_another_name_are_refused() -> None:
    store = memory_store()
    one, two = save(store, 1), save(store, 2)
    store.tag(one, "good")
    store.delete(one)
    killed = killed_save(store, 3)
    listed = {
        e.key: store.backend.read(e.key, 2**30) for e in store.backend.list(RUN, recursive=True)
    }
    mark = next(d for k, d in listed.items() if "/marks/" in k)
    trash = next(d for k, d in listed.items() if "/trash/" in k)
    lease = next(d for k, d in listed.items() if "/leases/" in k)
    decode_mark(mark, RUN, one.name, "it")
    decode_trash(trash, RUN, one.name, "it")
    decode_lease(lease, RUN, killed, "it")
    for call, data in ((decode_mark, mark), (decode_trash, trash), (decode_lease, lease)):
        for run, name in ((RUN, two.name), ("other", one.name), ("other", killed)):
            with pytest.raises(IntegrityError, match="another checkpoint"):
                call(data, run, name, "it")


@examples(100)
@given(st.dictionaries(st.text(max_size=5), st.floats()))
def test_only_finite_metrics_are_kept(metrics: dict[str, float]) -> None:
    kept = finite(metrics.items())
    assert kept == {k: v for k, v in metrics.items() if v - v == 0}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_is_left_out_of_the_record_with_a_warning(
    bad: float, caplog: pytest.LogCaptureFixture
) -> None:
    store = memory_store()
    checkpoint = save(store, metrics={"loss": bad, "reward": 1.0})
    assert checkpoint.commit.metrics == {"reward": 1.0}
    assert store.get(RUN, step=1).metrics == {"reward": 1.0}
    assert "loss" in caplog.text


def test_metrics_survive_exactly() -> None:
    values = {"a": 0.1 + 0.2, "b": 5e-324, "c": -1.7976931348623157e308, "d": 3}
    store = memory_store()
    save(store, metrics=values)
    assert store.get(RUN, step=1).metrics == values


def test_an_integer_metric_too_large_for_a_float_is_refused_or_left_out_like_an_infinity() -> None:
    try:
        checkpoint = save(memory_store(), metrics={"x": 10**400})
    except UsageError:
        return
    assert checkpoint.metrics == {}


def test_a_best_rule_compares_in_its_direction() -> None:
    assert BestRule("m", "max").better(2, 1)
    assert not BestRule("m", "max").better(1, 1)
    assert BestRule("m", "min").better(1, 2)
    assert not BestRule("m", "min").better(1, 1)


def test_timestamps_are_utc_with_milliseconds() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", timestamp())


def test_the_writer_is_this_process() -> None:
    writer = writer_here("abc")
    assert (writer.id, writer.host) == ("abc", socket.gethostname())


def test_this_process_is_not_gone() -> None:
    assert not is_gone(process_here())


def test_a_process_that_ended_is_gone_and_its_reused_pid_does_not_change_that() -> None:
    code = (
        "import msgspec\nfrom ckptstore.records import process_here\n"
        "print(msgspec.json.encode(process_here()).decode())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    child = msgspec.json.decode(done.stdout, type=Process)
    assert is_gone(child)
    assert is_gone(msgspec.structs.replace(process_here(), started=1))


@pytest.mark.parametrize("field", ["host", "boot", "namespace"])
def test_nothing_is_said_of_a_process_of_another_host_boot_or_namespace(field: str) -> None:
    process = msgspec.structs.replace(process_here(), started=1)
    other: Any = 7 if field == "namespace" else "another"
    assert not is_gone(msgspec.structs.replace(process, **{field: other}))


def test_where_the_boot_is_unknown_no_process_is_taken_for_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ckptstore.records._boot_id", lambda: "")
    assert not is_gone(msgspec.structs.replace(process_here(), started=1))


KINDS: list[Any] = [Commit, Void, Mark]


@pytest.mark.parametrize("kind", KINDS)
def test_documents_cannot_be_changed_in_memory(kind: Any) -> None:
    assert kind.__struct_config__.frozen


def test_errors_of_documents_are_ours() -> None:
    assert issubclass(IntegrityError, CkptError)


def test_a_process_of_another_user_is_not_taken_for_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    process = msgspec.structs.replace(process_here(), started=1)
    assert is_gone(process)

    def denied(pid: int, signal: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "kill", denied)
    assert not is_gone(process)


def test_a_process_is_not_taken_for_gone_where_proc_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = msgspec.structs.replace(process_here(), started=1)
    assert is_gone(process)
    real: Any = builtins.open

    def hidden(file: Any, *args: Any, **how: Any) -> Any:
        if str(file).startswith("/proc/"):
            raise PermissionError(13, "Permission denied")
        return real(file, *args, **how)

    monkeypatch.setattr(builtins, "open", hidden)
    assert not is_gone(process)


def test_a_pid_that_does_not_exist_or_was_given_to_another_process_is_gone() -> None:
    here = process_here()
    with subprocess.Popen(["sleep", "60"]) as child:
        started = records._started(child.pid)
        assert started is not None
        process = msgspec.structs.replace(here, pid=child.pid, started=started)
        assert not is_gone(process)
        assert is_gone(msgspec.structs.replace(process, started=started - 1))
        child.kill()
    assert is_gone(process)


def test_a_zombie_is_gone() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        process = msgspec.structs.replace(
            process_here(), pid=child.pid, started=records._started(child.pid) or 0
        )
        assert not is_gone(process)
        child.kill()
        stat = Path(f"/proc/{child.pid}/stat")
        deadline = time.monotonic() + 5
        while b") Z " not in stat.read_bytes() and time.monotonic() < deadline:
            time.sleep(0.002)
        os.kill(child.pid, 0)  # it is still there
        assert is_gone(process)

"""The examination of a place: each fault is found, and nothing is left behind."""

from __future__ import annotations

import os
import threading
import time
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptstore.backends import localfacts
from ckptstore.backends.base import Backend, CopyKind, Entries, Entry, Writer
from ckptstore.backends.local import LocalBackend
from ckptstore.backends.localfacts import mount_of
from ckptstore.backends.memory import MemoryBackend, Space
from ckptstore.durations import spell_moment
from ckptstore.errors import (
    AccessDeniedError,
    CkptError,
    PlaceNotFoundError,
    TemporaryError,
    UsageError,
)
from ckptstore.layout import is_temporary
from ckptstore.maintenance import gc
from ckptstore.maintenance.doctor import Finding, bench, data, examine, times, verdict_code
from ckptstore.store import Store
from ckptstore.testing.hooks import HookedBackend
from tests.unit.support import Clock, memory_store, objects, save

SIZE = 1_000_000
BLOCK = 64 * 1024


@pytest.fixture(autouse=True)
def _any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found is the same with small blocks, and however busy the machine is."""
    for module in (bench, data, times):
        monkeypatch.setattr(module, "BLOCK_SIZE", BLOCK)
    monkeypatch.setattr(times, "SLOW_BYTES", 0.0)
    monkeypatch.setattr(times, "SLOW_REQUEST", 1e9)


@pytest.fixture
def space() -> Space:
    return Space()


def findings(make: Callable[[], Backend], **how: Any) -> dict[str, Finding]:
    """What is found, by check."""
    found = list(examine(make, **{"size": SIZE, "patience": 0.2, **how}))
    assert len({f.check for f in found}) == len(found)
    return {f.check: f for f in found}


def only(found: dict[str, Finding], check: str, verdict: str) -> Finding:
    """The finding of ``check``, which is the only one that is not well."""
    bad = {f.check: f.verdict for f in found.values() if f.verdict != "ok" and f.check != "place"}
    assert bad == {check: verdict}, found
    return found[check]


# A healthy place


def test_a_healthy_place_passes_and_is_left_as_it_was(space: Space) -> None:
    found = findings(lambda: MemoryBackend(space))
    assert {f.verdict for f in found.values() if f.check != "place"} == {"ok"}
    assert verdict_code(found.values()) == 0
    assert list(found)[-1] == "clean-up"
    assert not space.objects
    assert not space.directories


def test_a_store_that_is_there_is_neither_listed_nor_touched() -> None:
    store = memory_store()
    save(store)
    before = objects(store)
    asked: list[tuple[str, str]] = []
    inner = store.backend
    found = findings(lambda: HookedBackend(inner, lambda what, key, _: asked.append((what, key))))
    assert store.id in found["store"].detail
    assert objects(store) == before
    outside = {(w, k) for w, k in asked if not is_temporary(k.partition("/")[0])}
    assert outside <= {("stat", ""), ("read", "CKPTSTORE.json"), ("clock", "")}


def test_a_dry_run_writes_nothing(space: Space) -> None:
    asked: list[str] = []

    def make() -> Backend:
        return HookedBackend(MemoryBackend(space), lambda what, *_: asked.append(what))

    found = findings(make, dry_run=True)
    assert set(asked) == {"stat", "read"}
    assert found["store"].verdict == "ok"
    assert found["exclusive-create"].verdict == found["upload"].verdict == "skipped"


def test_whoever_stops_it_leaves_nothing(space: Space) -> None:
    running = examine(lambda: MemoryBackend(space), size=SIZE)
    assert any(f.check == "names" for f in running)
    assert space.objects
    running.close()
    assert not space.objects


def test_an_interrupted_one_leaves_nothing(space: Space) -> None:
    def hook(what: str, key: str, phase: str) -> None:
        if what == "copy" and phase == "after":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        findings(lambda: HookedBackend(MemoryBackend(space), hook))
    assert not space.objects


def test_what_a_killed_one_left_is_collected() -> None:
    clock = Clock()
    store = memory_store(clock)
    save(store)
    store.backend.put(".ckpt-tmp-doctor-abcdefgh/begun", b"x")
    store.backend.put(".ckpt-tmp-doctor-abcdefgh/names/a/b", b"x")
    gc(store, grace=0)
    assert ".ckpt-tmp-doctor-abcdefgh/begun" in objects(store)  # it may be running
    clock.advance(3600)
    assert gc(store, grace=0, dry_run=True).removed[-1].key == ".ckpt-tmp-doctor-abcdefgh"
    assert ".ckpt-tmp-doctor-abcdefgh/begun" in objects(store)
    gc(store, grace=0)
    assert not any(key.startswith(".ckpt-tmp-") for key in objects(store))
    assert len(store.list("run")) == 1


def test_directories_that_did_not_exist_are_removed_again(tmp_path: Path) -> None:
    root = tmp_path / "not" / "there" / "yet"
    found = findings(lambda: LocalBackend(str(root)))
    assert verdict_code(found.values()) == 0
    assert found["place"].verdict == "warning"  # perhaps nothing is mounted
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_somebody_has_begun_to_use_stays(tmp_path: Path) -> None:
    root = tmp_path / "store"
    running = examine(lambda: LocalBackend(str(root)), size=SIZE)
    assert any(f.check == "write" for f in running)
    store = Store(LocalBackend(str(root)))
    checkpoint = save(store)
    list(running)
    assert [c.name for c in store.list("run")] == [checkpoint.name]
    assert sorted(p.name for p in root.iterdir()) == ["CKPTSTORE.json", "run"]


# Faults


class Odd(MemoryBackend):
    """A place with a fault; each test gives it one."""


def test_creation_that_is_known_not_to_be_exclusive_is_a_warning(space: Space) -> None:
    class Known(Odd):
        def is_exclusive(self) -> bool:
            return False

    found = findings(lambda: Known(space))
    assert "gc --force" in (only(found, "exclusive-create", "warning").hint or "")
    assert verdict_code(found.values()) == 0


def test_creation_that_turns_out_not_to_be_exclusive_is_a_failure(space: Space) -> None:
    class Lying(Odd):
        def create_exclusive(self, key: str, data: bytes) -> bool:
            if "/race/" not in key:
                return super().create_exclusive(key, data)
            self.put(key, data)
            return True

    found = findings(lambda: Lying(space))
    bad = only(found, "exclusive-create", "failed")
    assert bad.numbers["most_winners"] == bad.numbers["racers"] == 16
    assert "were told that they had" in bad.detail
    assert verdict_code(found.values()) == 1


def test_a_loser_that_replaces_the_winner_is_found(space: Space) -> None:
    class Replacing(Odd):
        def create_exclusive(self, key: str, data: bytes) -> bool:
            with self.space.lock:
                free = key not in self.space.objects
                if free or "/race/" in key:
                    self.put(key, data)
                return free

    bad = only(findings(lambda: Replacing(space)), "exclusive-create", "failed")
    assert "object of the winner" in bad.detail


def test_an_error_of_a_creator_is_settled_by_reading(space: Space) -> None:
    lost = threading.local()

    class Losing(Odd):
        def create_exclusive(self, key: str, data: bytes) -> bool:
            won = super().create_exclusive(key, data)
            if won and "/race/" in key and not getattr(lost, "once", False):
                lost.once = True
                raise TemporaryError("the answer was lost")
            return won

    assert findings(lambda: Losing(space))["exclusive-create"].verdict == "ok"


def test_a_removal_that_ignores_its_condition_is_found(space: Space) -> None:
    class Careless(Odd):
        def remove_if(self, key: str, data: bytes) -> bool:
            self.delete([key])
            return True

    only(findings(lambda: Careless(space)), "remove-if", "failed")


class _Mangled(Writer):
    """A writer that stores something else than it was given."""

    def __init__(self, backend: MemoryBackend, key: str, mangle: Callable[[bytes], bytes]) -> None:
        self._backend, self._key, self._mangle = backend, key, mangle
        self._data = bytearray()
        self.crc64nvme = "0123456789abcdef"

    def write(self, offset: int, data: memoryview) -> None:
        self._data[offset : offset + len(data)] = data

    def skip_zeros(self, offset: int, length: int) -> bool:
        return False

    def finish(self, size: int) -> None:
        self._backend.put(self._key, self._mangle(bytes(self._data)))

    def abort(self) -> None:
        pass


def _mangling(space: Space, mangle: Callable[[bytes], bytes], crc: str | None) -> MemoryBackend:
    class Mangling(Odd):
        def open_writer(
            self, key: str, *, size: int | None = None, executable: bool = False, **more: bool
        ) -> Writer:
            if not key.endswith("two-parts"):
                return super().open_writer(key, size=size, executable=executable, **more)
            return _Mangled(self, key, mangle)

        def checksum(self, key: str) -> str | None:
            return crc

    backend = Mangling(space)
    backend.capabilities = replace(backend.capabilities, keeps_checksums=crc is not None)
    return backend


@pytest.mark.parametrize(
    ("mangle", "says"),
    [
        (lambda data: data[BLOCK:] + data[:BLOCK], "wrong order"),
        (lambda data: data + b"0;chunk-signature=", "are stored"),
        (lambda data: data[:-1], "are stored"),
        (lambda data: data[:1000] + b"\0" * 9 + data[1009:], "differs from byte 100"),
    ],
    ids=["swapped", "trailer", "short", "changed"],
)
def test_a_large_object_that_is_not_what_was_sent_is_found(
    space: Space, mangle: Callable[[bytes], bytes], says: str
) -> None:
    found = findings(lambda: _mangling(space, mangle, "0123456789abcdef"))
    bad = only(found, "two-parts", "failed")
    assert says in bad.detail
    assert "checksums=md5" in (bad.hint or "")
    bad = only(findings(lambda: _mangling(space, mangle, None)), "two-parts", "failed")
    assert "checksums=md5" not in (bad.hint or "")  # a setting that a disk has not


def test_a_stored_checksum_that_is_wrong_is_found(space: Space) -> None:
    assert findings(lambda: _mangling(space, bytes, "0123456789abcdef"))["two-parts"].verdict == (
        "ok"
    )
    bad = only(findings(lambda: _mangling(space, bytes, "ff" * 8)), "two-parts", "failed")
    assert "checksum" in bad.detail


def test_what_is_left_of_a_write_that_was_given_up_is_found(space: Space) -> None:
    class Half(_Mangled):
        def abort(self) -> None:
            self._backend.put(self._key + ".part", bytes(self._data))

    class Leaving(Odd):
        def open_writer(
            self, key: str, *, size: int | None = None, executable: bool = False, **more: bool
        ) -> Writer:
            if "/given-up/" in key:
                return Half(self, key, bytes)
            return super().open_writer(key, size=size, executable=executable, **more)

    only(findings(lambda: Leaving(space)), "abort", "failed")
    assert not space.objects


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("replaces", "replaced what was there"),
        ("alias", "did not outlive"),
        ("empty", "is not the same"),
    ],
)
def test_a_copy_that_is_none_is_found(space: Space, fault: str, says: str) -> None:
    aliases: dict[str, str] = {}

    class Copying(Odd):
        def copy(self, source: str, target: str, *, executable: bool = False) -> CopyKind | None:
            if fault == "replaces":
                self.delete([target])
            if fault == "empty":
                self.put(target, b"")
                return "server"
            aliases[source] = target
            return super().copy(source, target, executable=executable)

        def delete(self, keys: Iterable[str]) -> None:
            for key in keys:
                super().delete([key])
                if fault == "alias" and key in aliases:
                    super().delete([aliases[key]])

    assert says in only(findings(lambda: Copying(space)), "copy", "failed").detail


def test_a_place_without_cheap_copies_is_safe(space: Space) -> None:
    class Plain(Odd):
        def copy(self, source: str, target: str, *, executable: bool = False) -> CopyKind | None:
            return None

    found = findings(lambda: Plain(space))
    assert found["copy"].verdict == "ok"
    assert "all its files" in found["copy"].detail


def _renaming(space: Space, rename: Callable[[str], str]) -> MemoryBackend:
    class Renaming(Odd):
        def put(self, key: str, data: bytes) -> None:
            super().put(rename(key) if "/names/" in key else key, data)

        def read(self, key: str, limit: int) -> bytes:
            return super().read(rename(key) if "/names/" in key else key, limit)

    return Renaming(space)


@pytest.mark.parametrize(
    ("rename", "says"),
    [
        (lambda key: key.replace("\\", "/"), "'back\\slash' (a backslash) becomes 'back/slash'"),
        (str.lower, "(capital letters)"),
        (lambda key: unicodedata.normalize("NFC", key), "(a letter and its accent apart)"),
        (lambda key: key.replace("#", "_"), "'a#b' (#) becomes 'a_b'"),
    ],
    ids=["backslash", "case", "normalised", "hash"],
)
def test_names_that_become_others_are_named(
    space: Space, rename: Callable[[str], str], says: str
) -> None:
    found = findings(lambda: _renaming(space, rename))
    assert says in only(found, "names", "warning").detail
    assert verdict_code(found.values()) == 0


def test_a_name_that_is_refused_is_named(space: Space) -> None:
    def refuse(key: str) -> str:
        if ":" in key:
            raise UsageError("no colon")
        return key

    assert only(findings(lambda: _renaming(space, refuse)), "names", "warning").detail == (
        "'a:b' (:) is refused"
    )


def test_a_name_that_listings_hide_is_named(space: Space) -> None:
    class Hiding(Odd):
        def list(self, prefix: str, *, recursive: bool = False) -> Entries:
            found = super().list(prefix, recursive=recursive)
            return [e for e in found if not e.key.endswith("/.hidden")]

    detail = only(findings(lambda: Hiding(space)), "names", "warning").detail
    assert detail == "'.hidden' (a dot in front) is not in a listing"


def test_names_that_are_known_to_be_impossible_are_not_tried(space: Space) -> None:
    def make() -> Backend:
        backend = MemoryBackend(space)
        backend.capabilities = replace(backend.capabilities, forbidden="\\:")
        return backend

    found = findings(make)["names"]
    assert found.verdict == "ok"
    assert "cannot be in one: : \\" in found.detail


class _Stale(Odd):
    """Listings show what was there some listings ago."""

    def __init__(self, space: Space, remembered: dict[str, list[Entries]], lag: int) -> None:
        super().__init__(space)
        self._remembered, self._lag = remembered, lag

    def list(self, prefix: str, *, recursive: bool = False) -> Entries:
        now = super().list(prefix, recursive=recursive)
        if not prefix.endswith("/listed"):
            return now
        before = self._remembered.setdefault(prefix, [])
        before.append(now)
        return before[max(0, len(before) - 1 - self._lag)]


def test_a_listing_that_lags_is_a_warning_and_one_that_never_comes_a_failure(space: Space) -> None:
    late: dict[str, list[Entries]] = {}
    bad = only(findings(lambda: _Stale(space, late, 1)), "list", "warning")
    assert bad.numbers["behind_seconds"] > 0
    never: dict[str, list[Entries]] = {}
    only(findings(lambda: _Stale(space, never, 1000)), "list", "failed")


@pytest.mark.parametrize(
    ("ahead", "verdict"), [(20.0, "warning"), (-20.0, "warning"), (1200.0, "failed")]
)
def test_a_clock_that_is_wrong_is_found(space: Space, ahead: float, verdict: str) -> None:
    found = findings(lambda: MemoryBackend(space, clock=lambda: time.time() + ahead))
    bad = only(found, "clock", verdict)
    assert ("ahead" if ahead > 0 else "behind") in bad.detail
    assert bad.numbers["skew_seconds"] == pytest.approx(ahead, abs=1)


def test_clocks_of_one_storage_that_differ_are_found(space: Space) -> None:
    looks = iter([0.0, 1200.0, 0.0])

    class Nodes(Odd):
        def clock(self) -> float:
            return time.time() + next(looks)

    assert "jumps" in only(findings(lambda: Nodes(space)), "clock", "failed").detail


def test_a_write_that_is_lost_ends_the_examination(space: Space) -> None:
    class Losing(Odd):
        def put(self, key: str, data: bytes) -> None:
            pass

    found = findings(lambda: Losing(space))
    assert found["write"].verdict == "failed"
    assert "not found" in found["write"].detail


def test_slowness_is_told_and_is_no_failure(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "SLOW_BYTES", 1e18)
    monkeypatch.setattr(times, "SLOW_REQUEST", 0.0)
    found = findings(lambda: MemoryBackend(space))
    assert {c for c, f in found.items() if f.verdict == "slow"} == {"latency", "upload", "download"}
    assert found["upload"].numbers["bytes"] == SIZE
    assert verdict_code(found.values()) == 0


@pytest.mark.parametrize(
    ("seconds", "spelt"),
    [(6e-6, "6 µs"), (9.99e-4, "999 µs"), (0.0034, "3.4 ms"), (0.25, "250 ms"), (2.0, "2000 ms")],
)
def test_short_times_are_spelt_in_their_unit(seconds: float, spelt: str) -> None:
    assert spell_moment(seconds) == spelt


# Errors


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PlaceNotFoundError("no bucket"), 4),
        (AccessDeniedError("no"), 7),
        (TemporaryError("away"), 8),
        (CkptError("broken"), 1),
    ],
)
def test_what_cannot_be_reached_is_one_finding_with_its_code(
    space: Space, error: CkptError, code: int
) -> None:
    class Away(Odd):
        def stat(self, key: str) -> Entry | None:
            raise error

    found = findings(lambda: Away(space))
    assert list(found) == ["place"]
    assert found["place"].detail == str(error)
    assert verdict_code(found.values()) == code


def test_who_may_not_write_is_told_so(space: Space) -> None:
    class ReadOnly(Odd):
        def put(self, key: str, data: bytes) -> None:
            raise AccessDeniedError("may not write", hint="ask")

    found = findings(lambda: ReadOnly(space))
    assert (found["write"].verdict, found["write"].hint) == ("failed", "ask")
    assert "exclusive-create" not in found
    assert verdict_code(found.values()) == 7


def test_who_may_not_delete_is_told_what_is_left(space: Space) -> None:
    class Keeping(Odd):
        def delete(self, keys: Iterable[str]) -> None:
            raise AccessDeniedError("may not delete")

        def remove_tree(self, prefix: str) -> None:
            raise AccessDeniedError("may not delete")

    found = findings(lambda: Keeping(space))
    assert found["clean-up"].verdict == "failed"
    assert ".ckpt-tmp-doctor-" in found["clean-up"].detail
    assert verdict_code(found.values()) == 7


def test_a_server_that_stumbles_over_a_removal_is_asked_again(space: Space) -> None:
    stumbled: list[str] = []

    class Stumbling(Odd):
        def remove_tree(self, prefix: str) -> None:
            super().remove_tree(prefix)
            if not stumbled:
                stumbled.append(prefix)
                raise TemporaryError("internal error")

    assert findings(lambda: Stumbling(space))["clean-up"].verdict == "ok"
    assert stumbled


def test_storage_that_goes_away_ends_the_examination(space: Space) -> None:
    def hook(what: str, key: str, phase: str) -> None:
        if what == "remove_if":
            raise TemporaryError("away")

    found = findings(lambda: HookedBackend(MemoryBackend(space), hook))
    assert found["remove-if"].verdict == "failed"
    assert "two-parts" not in found
    assert verdict_code(found.values()) == 8
    assert not space.objects


# File systems


_TABLE = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
40 22 0:44 / /mnt/a\\040b rw,nosuid shared:2 master:7 - nfs4 srv:/x\\040y rw,vers=4.2,soft
41 22 0:45 / /mnt rw - tmpfs tmpfs rw
42 22 0:46 / /mnt rw - xfs /dev/vdb rw
broken line
"""


@pytest.mark.parametrize(
    ("path", "point", "kind"),
    [
        ("/", "/", "ext4"),
        ("/mntx/y", "/", "ext4"),
        ("/mnt", "/mnt", "xfs"),
        ("/mnt/a b/deep", "/mnt/a b", "nfs4"),
        ("/mnt/a bc", "/mnt", "xfs"),
    ],
)
def test_the_mount_of_a_path(path: str, point: str, kind: str) -> None:
    found = mount_of(path, _TABLE)
    assert found is not None
    assert (found.point, found.kind) == (point, kind)
    if kind == "nfs4":
        assert found.source == "srv:/x y"
        assert {"soft", "nosuid", "vers=4.2"} <= found.options
    assert mount_of(path, "") is None


@pytest.mark.parametrize(
    ("kind", "options", "verdict", "says"),
    [
        ("xfs", "rw", "ok", "xfs at /, from dev"),
        ("tmpfs", "rw", "warning", "memory"),
        ("overlay", "rw", "warning", "overlay"),
        ("nfs4", "rw,hard", "ok", "network"),
        ("nfs4", "rw,soft", "warning", "soft"),
        ("fuse.s3fs", "rw", "ok", "user space"),
    ],
)
def test_what_a_file_system_is(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    options: str,
    verdict: str,
    says: str,
) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(f"22 1 254:0 / / rw shared:1 - {kind} dev {options}\n")
    monkeypatch.setattr(localfacts, "_MOUNTS", str(table))
    found = {f.check: f for f in LocalBackend(str(tmp_path / "new")).describe()}
    assert found["place"].verdict == verdict
    assert says in found["place"].detail
    monkeypatch.setattr(localfacts, "_MOUNTS", str(tmp_path / "no such table"))
    found = {f.check: f for f in LocalBackend(str(tmp_path / "new")).describe()}
    assert "unknown type" in found["place"].detail


@pytest.mark.parametrize(
    ("size", "free", "inodes", "free_inodes", "verdict"),
    [
        (500, 200, 10**6, 10**5, "ok"),
        (500, 9, 10**6, 10**5, "warning"),
        (500, 24, 10**6, 10**5, "warning"),  # under 5 %
        (100_000, 200, 10**6, 10**5, "ok"),
        (500, 200, 10**6, 900, "warning"),
        (500, 200, 0, 0, "ok"),  # made as they are needed
    ],
)
def test_the_room_that_is_left(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    free: int,
    inodes: int,
    free_inodes: int,
    verdict: str,
) -> None:
    unit = 10**6
    told = (unit, unit, size * 1000, free * 1000, free * 1000, inodes, free_inodes, free_inodes)
    monkeypatch.setattr("os.statvfs", lambda _: os.statvfs_result((*told, 0, 255)))
    found = {f.check: f for f in LocalBackend(str(tmp_path)).describe()}["space"]
    assert found.verdict == verdict
    assert found.numbers["free_bytes"] == free * 10**9


def test_a_backend_that_tells_nothing_of_itself_has_a_place(space: Space) -> None:
    class Silent(MemoryBackend):
        def describe(self) -> Iterable[Finding]:
            return ()

    found = findings(lambda: Silent(space, "silent"))
    assert found["place"] == Finding.ok("place", "memory://silent")


def test_a_file_system_without_links_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_link(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", no_link)
    found = findings(lambda: LocalBackend(str(tmp_path), dedupe="link"))
    assert found["links"].verdict == "warning"
    assert "all its files" in found["copy"].detail
    assert list(tmp_path.iterdir()) == []


def test_a_link_that_replaces_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def replacing(source: str, target: str, **how: Any) -> None:
        if target.endswith("/link-itself") and os.path.exists(target):
            os.unlink(target)
        link(source, target, **how)

    monkeypatch.setattr("os.link", replacing)
    assert findings(lambda: LocalBackend(str(tmp_path)))["links"].verdict == "failed"


def test_a_sync_that_fails_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_sync(path: str) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("ckptstore.backends.localfacts.sync_directory", no_sync)
    found = findings(lambda: LocalBackend(str(tmp_path)))
    assert found["fsync"].verdict == "failed"
    assert verdict_code(found.values()) == 1

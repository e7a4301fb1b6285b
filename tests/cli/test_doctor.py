"""``ckpt doctor``: on disks, in memory, and on real servers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ckptstore.testing.hooks import HookedBackend
from tests.cli.support import Ran, ckpt, ckpt_on_terminal, contents
from tests.servers.rclone import Rclone
from tests.servers.s3 import Bucket, client
from tests.servers.seaweed import SeaweedFS

SMALL = ("--size", "1MB")

EVERYWHERE = (
    "place",
    "store",
    "write",
    "list",
    "exclusive-create",
    "remove-if",
    "two-parts",
    "abort",
    "copy",
    "names",
    "clock",
    "latency",
    "upload",
    "download",
    "clean-up",
)
DISK = ("space", "links", "rename", "fsync")
S3 = ("versions", "lifecycle", "object-lock", "conditional-delete", "unfinished")

# A machine that runs tests may be slow or nearly full, and that is told.
MACHINE = ("latency", "upload", "download", "space", "place")


def checks(ran: Ran) -> dict[str, dict[str, Any]]:
    """The rows of ``--json``, by check."""
    return {row["check"]: row for row in ran.json}


def unwell(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The verdicts that are not ok, but for those that depend on the machine."""
    return {c: r["verdict"] for c, r in found.items() if r["verdict"] != "ok" and c not in MACHINE}


# Disks


def test_a_directory_that_is_not_there_yet(place: Path) -> None:
    found = checks(ckpt("doctor", "new", "--json", *SMALL).ok())
    assert set(found) == {*EVERYWHERE, *DISK}
    assert unwell(found) == {}
    assert "yet" in found["store"]["detail"]
    assert found["upload"]["bytes"] == 1_000_000
    assert found["upload"]["bytes_per_second"] > 0
    assert found["exclusive-create"]["most_winners"] == 1
    assert list(place.iterdir()) == []


def test_a_store_is_left_as_it_is(store: Path) -> None:
    before = contents(store)
    found = checks(ckpt("doctor", store, "--json", *SMALL).ok())
    assert unwell(found) == {}
    assert "format 1" in found["store"]["detail"]
    assert contents(store) == before
    assert not [p for p in store.rglob("*") if ".ckpt-tmp-" in p.name]


def test_the_configured_store(store: Path) -> None:
    assert checks(ckpt("doctor", "--json", *SMALL, env={"CKPT_STORE": str(store)}).ok())
    assert checks(ckpt("doctor", "--store", store, "--json", *SMALL).ok())


def test_a_place_that_holds_something_else(place: Path) -> None:
    (place / "old.bin").write_bytes(b"x")
    found = checks(ckpt("doctor", place, "--json", *SMALL).ok())
    assert unwell(found) == {"store": "warning"}
    assert "ckpt init" in found["store"]["hint"]
    assert contents(place) == {"old.bin": b"x"}


def test_a_path_whose_parent_is_missing(place: Path) -> None:
    found = checks(ckpt("doctor", "mnt/data/ckpts", "--json", *SMALL).ok())
    assert found["place"]["verdict"] == "warning"
    assert "mounted" in found["place"]["hint"]
    assert list(place.iterdir()) == []


def test_a_damaged_marker(store: Path) -> None:
    marker = store / "CKPTSTORE.json"
    marker.chmod(0o644)
    marker.write_bytes(b"{")
    ran = ckpt("doctor", store, *SMALL).failed(1, "store", "CKPTSTORE.json")
    assert "store\tfailed" in ran.out


def test_a_file_is_no_place(place: Path) -> None:
    (place / "file").write_bytes(b"x")
    ckpt("doctor", "file").failed(6, "is a file")
    ckpt("doctor", "file/below").failed(1, "file")
    assert contents(place) == {"file": b"x"}


def test_a_dry_run_writes_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("ckptstore.backends.local.LocalBackend.put", refuse)
    ran = ckpt("doctor", "new", "--dry-run", "--json").ok()
    assert {r["verdict"] for r in ran.json if r["check"] not in MACHINE} == {"ok", "skipped"}
    assert list(place.iterdir()) == []


def test_memory_is_no_place_to_keep_anything() -> None:
    found = checks(ckpt("doctor", "memory://doctor", "--json", *SMALL).ok())
    assert set(found) == set(EVERYWHERE)
    assert found["place"]["verdict"] == "warning"
    assert unwell(found) == {}


# What it prints


def test_a_pipe_gets_five_columns(place: Path) -> None:
    ran = ckpt("doctor", "new", *SMALL).ok()
    rows = [line.split("\t") for line in ran.out.splitlines()]
    assert {len(row) for row in rows} == {5}
    assert {row[0] for row in rows} == {*EVERYWHERE, *DISK}
    assert "is safe for checkpoints" in ran.err
    quiet = ckpt("doctor", "new", "--quiet", *SMALL).ok()
    assert (quiet.out, quiet.err) == ("", "")


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_gets_a_table_that_fits(place: Path, width: int) -> None:
    (place / "x").write_bytes(b"x")
    shown = ckpt_on_terminal("doctor", place, *SMALL, env={"COLUMNS": str(width)})
    assert shown.code == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown.out).splitlines()
    assert all(len(line) <= width for line in lines)
    assert lines[0].split() == ["CHECK", "VERDICT", "DETAILS"]
    words = {line.split()[0]: line.split()[1] for line in lines[1:] if not line.startswith(" ")}
    assert set(words) == {*EVERYWHERE, *DISK}
    assert words["exclusive-create"] == "ok"
    assert words["store"] == "warning"
    assert "hint: take another place" in " ".join(shown.out.split())
    assert "is safe for checkpoints, with " in shown.err


def test_what_is_unsafe_is_an_error_with_its_hint(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptstore.backends import open_backend

    class Lying(HookedBackend):
        def create_exclusive(self, key: str, data: bytes) -> bool:
            self.put(key, data)
            return True

    monkeypatch.setattr(
        "ckptstore.backends.open_backend", lambda uri: Lying(open_backend(uri), lambda *_: None)
    )
    ran = ckpt("doctor", "new", *SMALL).failed(1, "is not safe: exclusive-create", "hint: ")
    assert "exclusive-create\tfailed\t" in ran.out
    assert "is safe for checkpoints" not in ran.err
    ran = ckpt("doctor", "new", "--quiet", *SMALL).failed(1, "exclusive-create")
    assert ran.out == ""
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    "size", ["0", "-1", "1", "x", "1TB", "999999999999GB", "1 MB MB", "64.5MB"]
)
def test_a_size_that_cannot_be(size: str) -> None:
    ckpt("doctor", "new", "--size", size).failed(2, "--size")


@pytest.mark.parametrize("size", ["1MB", "2m", "1MiB", "2000 kB", "1500000"])
def test_a_size_that_can_be(size: str) -> None:
    ckpt("doctor", "memory://sizes", "--dry-run", "--size", size).ok()


def test_wrong_calls(place: Path) -> None:
    ckpt("doctor").failed(2, "no store given")
    ckpt("doctor", "a", "--store", "b").failed(2, "twice")
    ckpt("doctor", "gopher://x").failed(2, "unknown storage scheme")
    assert list(place.iterdir()) == []


# Buckets


def left_in(bucket: Bucket) -> list[Any]:
    """Objects and unfinished uploads in a test's place."""
    there = client(bucket.server)
    found = there.call_s3("list_objects_v2", Bucket=bucket.name, Prefix=bucket.prefix)
    uploads = there.call_s3("list_multipart_uploads", Bucket=bucket.name).get("Uploads") or []
    own = [u["Key"] for u in uploads if u["Key"].startswith(bucket.prefix)]
    return [*(entry["Key"] for entry in found.get("Contents", ())), *own]


def test_a_bucket_of_seaweedfs(seaweed: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket.make(seaweed, monkeypatch)
    found = checks(ckpt("doctor", bucket.uri(), "--json", *SMALL).ok())
    assert set(found) == {*EVERYWHERE, *S3}
    assert unwell(found) == {"lifecycle": "warning", "names": "warning"}
    assert "'back\\slash'" in found["names"]["detail"]
    assert bucket.name in found["place"]["detail"]
    assert seaweed.endpoint in found["place"]["detail"]
    assert bucket.name in found["lifecycle"]["command"]
    assert "checksum" in found["two-parts"]["detail"]
    assert "no bytes move" in found["copy"]["detail"]
    assert left_in(bucket) == []


def test_a_server_without_conditions(rclone: Rclone, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket.make(rclone, monkeypatch)
    ran = ckpt("doctor", bucket.uri(), *SMALL).ok()
    rows = {line.split("\t")[0]: line.split("\t") for line in ran.out.splitlines()}
    assert rows["exclusive-create"][1] == rows["conditional-delete"][1] == "warning"
    assert "gc --force" in rows["exclusive-create"][3]
    assert rows["lifecycle"][1] == "skipped"
    assert left_in(bucket) == []


def test_a_bucket_with_versions(seaweed: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket.make(seaweed, monkeypatch)
    there = client(seaweed)
    name = f"{bucket.name}-versions"
    there.call_s3("create_bucket", Bucket=name)
    there.call_s3(
        "put_bucket_versioning", Bucket=name, VersioningConfiguration={"Status": "Enabled"}
    )
    uri = f"s3://{name}/x?endpoint_url={seaweed.endpoint}"
    found = checks(ckpt("doctor", uri, "--json", "--dry-run").ok())
    assert found["versions"]["verdict"] == "warning"
    assert "NoncurrentVersionExpiration" in found["lifecycle"]["command"]


def test_places_that_cannot_be_reached_keep_their_codes(
    seaweed: SeaweedFS, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Bucket.make(seaweed, monkeypatch)
    missing = f"s3://no-such-bucket-here/x?endpoint_url={seaweed.endpoint}"
    ran = ckpt("doctor", missing, "--json").failed(4, "no bucket")
    assert [r["check"] for r in ran.json] == ["place"]
    assert "no-such-bucket-here" not in str(client(seaweed).call_s3("list_buckets")["Buckets"])
    nobody = "s3://bucket/x?endpoint_url=http://127.0.0.1:9&timeout=1"
    ckpt("doctor", nobody, *SMALL).failed(8, "no connection", "cannot be used")
    wrong = {"AWS_SECRET_ACCESS_KEY": "wrong-secret-of-no-value"}
    ran = ckpt("doctor", bucket.uri(), env=wrong).failed(7)
    assert "wrong-secret" not in ran.out + ran.err

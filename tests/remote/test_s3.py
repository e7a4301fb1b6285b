"""What is particular to buckets."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore.backends.s3 import S3Backend, checksums, copying, writing
from ckptstore.backends.s3.checksums import Body
from ckptstore.errors import ConflictError, IntegrityError, TemporaryError, UsageError
from ckptstore.hashing import BLOCK_SIZE
from ckptstore.maintenance import gc
from ckptstore.saveoptions import SaveOptions
from ckptstore.uri import StoreURI
from tests.cli.support import ckpt, contents, fill
from tests.conftest import FULL
from tests.crash.helpers import check_pull, check_store, make_tree
from tests.remote.conftest import S3_SERVERS
from tests.remote.test_faults import _ref as ref
from tests.servers.ceph import Ceph
from tests.servers.proxy import FaultyProxy
from tests.servers.rclone import Rclone
from tests.servers.s3 import Bucket, S3Server, client
from tests.servers.seaweed import ACCESS_KEY, PUBLIC_BUCKET, SECRET_KEY, SeaweedFS

NAMES = ("with space", "a[1].pt", "st*r", "q?x", "hash#tag", "100%", "a+b", "ünïcödé-日本語")


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    return Bucket.make(s3_server, monkeypatch)


def keeps_checksums(bucket: Bucket) -> bool:
    """Whether the server knows the checksum that is sent first: Ceph ignores it."""
    return not isinstance(bucket.server, Ceph)


def test_push_list_pull_verify_delete_by_command(tmp_path: Path, bucket: Bucket) -> None:
    tree = fill(tmp_path / "tree", {f"sub/{name}": name.encode() for name in NAMES})
    uri = bucket.uri()
    pushed = ckpt("push", tree, ref(uri, "run@1"), "--json").ok().json
    assert pushed["sent_bytes"] == pushed["bytes"]
    assert [row["ref"] for row in ckpt("list", uri, "--json").ok().json] == ["run@1"]
    ckpt("pull", ref(uri, "run@latest"), tmp_path / "back").ok()
    assert contents(tmp_path / "back") == contents(tree)
    ckpt("verify", uri, "--deep").ok()
    ckpt("resume-info", ref(uri, "run@latest")).ok()
    # Any S3 tool finds the files under their names.
    name = f"{bucket.prefix}/run/{pushed['name']}/sub/{NAMES[0]}"
    assert client(bucket.server).cat_file(f"{bucket.name}/{name}") == NAMES[0].encode()
    ckpt("push", tree, ref(uri, "run@2"), "--tag", "x").ok()
    ckpt("delete", ref(uri, "run@1"), "--yes", "--force").ok()
    ckpt("undelete", ref(uri, "run@1")).ok()
    assert check_store(uri) == ["run@1", "run@2"]


def test_the_same_directory_again_sends_no_data(tmp_path: Path, bucket: Bucket) -> None:
    tree = make_tree(tmp_path / "tree", 1, {f"shard-{i}": 5_000_000 for i in range(4)})
    with FaultyProxy(bucket.server.port("s3")) as proxy:
        uri = bucket.uri(endpoint_url=proxy.endpoint)
        ckpt("push", tree, ref(uri, "run@1")).ok()
        proxy.seen.clear()
        again = ckpt("push", tree, ref(uri, "run@1"), "--json").ok().json
        assert again["sent_bytes"] == 0
        assert {method for method, _ in proxy.seen} == {"GET", "HEAD"}
        assert not [t for m, t in proxy.seen if m == "GET" and "shard" in t]
        # Another step: copied by the server, after its stored checksum was compared.
        proxy.seen.clear()
        other = ckpt("push", tree, ref(uri, "run@2"), "--json").ok().json
        if not keeps_checksums(bucket):
            assert other["sent_bytes"] == other["bytes"]  # and nothing unsure is copied on
            return
        assert other["sent_bytes"] == 0
        assert not [t for m, t in proxy.seen if m == "GET" and "shard" in t]
        copies = [h for h in proxy.heads if b"\r\nx-amz-copy-source: " in h.lower()]
        assert len(copies) == 4
    assert check_store(bucket.uri()) == ["run@1", "run@2"]


def test_a_stored_file_that_was_changed_is_not_copied_on(tmp_path: Path, bucket: Bucket) -> None:
    tree = make_tree(tmp_path / "tree", 1, {"shard": 5_000_000})
    uri = bucket.uri()
    name = ckpt("push", tree, ref(uri, "run@1"), "--json").ok().json["name"]
    bucket.write(f"run/{name}/shard", bytes(5_000_000))
    assert ckpt("push", tree, ref(uri, "run@2"), "--json").ok().json["sent_bytes"] == 5_000_000
    ckpt("verify", ref(uri, "run@2"), "--deep").ok()
    ckpt("verify", ref(uri, "run@1"), "--deep").failed(5, "shard")


def test_a_long_lived_reader_sees_what_another_client_pushes(
    tmp_path: Path, bucket: Bucket
) -> None:
    tree = make_tree(tmp_path / "tree", 1)
    a, b = ckptstore.open_store(bucket.uri()), ckptstore.open_store(bucket.uri())
    for step in range(3):
        a.push(tree, "r", step)
        assert [c.step for c in b.list("r")] == list(range(step + 1))
        latest = b.latest("r")
        assert latest is not None
        assert latest.step == step


@pytest.mark.parametrize("variable", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_a_wrong_key_or_secret_is_denied(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "wrong-and-secret")
    ran = ckpt("list", bucket.uri()).failed(7)
    assert "wrong-and-secret" not in ran.err or variable == "AWS_ACCESS_KEY_ID"


def test_without_credentials_it_says_how_to_give_them(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    ckpt("list", bucket.uri()).failed(7, "no credentials", "AWS_ACCESS_KEY_ID")
    ckpt("list", bucket.uri(profile="nobody")).failed(2, "nobody")


def test_a_profile_of_the_aws_configuration_gives_key_and_endpoint(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = ckptstore.open_store(bucket.uri())
    store.create()
    key, secret = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    config = tmp_path / "config"
    config.write_text(
        f"[profile lab]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n"
        f"endpoint_url = {bucket.server.endpoint}\nregion = eu-west-9\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    found = ckptstore.open_store(f"s3://{bucket.name}/{bucket.prefix}?profile=lab")
    assert found.id == store.id


def test_a_public_bucket_is_read_without_credentials(
    seaweed: SeaweedFS, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bucket = Bucket.make(seaweed, monkeypatch)
    s3 = client(bucket.server)
    if PUBLIC_BUCKET not in s3.ls(""):
        s3.call_s3("create_bucket", Bucket=PUBLIC_BUCKET)
    place = f"s3://{PUBLIC_BUCKET}/{bucket.prefix}?endpoint_url={bucket.server.endpoint}"
    tree = make_tree(tmp_path / "tree", 1)
    ckpt("push", tree, ref(place, "r@1")).ok()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    ckpt("pull", ref(f"{place}&anon=true", "r@1"), tmp_path / "back").ok()
    ckpt("verify", ref(f"{place}&anon=true", "r@1"), "--deep").ok()
    ckpt("push", tree, ref(f"{place}&anon=true", "r@2")).failed(7)
    assert check_store(f"{place}&anon=true") == ["r@1"]


def test_credentials_that_expire_are_renewed(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As a role's do. These are over in a minute, so each request wants new ones."""
    asked = tmp_path / "asked"
    program = tmp_path / "credentials.py"
    program.write_text(
        "import datetime, json\n"
        f"open({str(asked)!r}, 'a').write('x')\n"
        "end = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=60)\n"
        "print(json.dumps({'Version': 1, 'Expiration': end.isoformat(),"
        f" 'AccessKeyId': {ACCESS_KEY!r}, 'SecretAccessKey': {SECRET_KEY!r}}}))\n"
    )
    config = tmp_path / "config"
    config.write_text(f"[profile role]\ncredential_process = {sys.executable} {program}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    store = ckptstore.open_store(bucket.uri(profile="role"))
    store.create()
    first = len(asked.read_text())
    assert store.runs() == []
    assert len(asked.read_text()) > first >= 1


def test_many_keys_are_deleted_a_thousand_at_a_time(bucket: Bucket) -> None:
    with FaultyProxy(bucket.server.port("s3")) as proxy:
        store = S3Backend.from_uri(StoreURI.parse(bucket.uri(endpoint_url=proxy.endpoint)))
        for i in range(5):
            bucket.write(f"d/{i}", b"x")
        proxy.seen.clear()
        store.delete([f"d/{i}" for i in range(2500)])
        assert len([t for m, t in proxy.seen if m == "POST" and "delete" in t]) == 3
        assert store.list("d", recursive=True) == []


@pytest.mark.parametrize("command", ["list", "push"])
def test_a_bucket_that_is_missing_is_not_made(tmp_path: Path, bucket: Bucket, command: str) -> None:
    uri = f"s3://no-such-bucket/p?endpoint_url={bucket.server.endpoint}"
    tree = make_tree(tmp_path / "tree", 1)
    words = ["list", uri] if command == "list" else ["push", str(tree), ref(uri, "r@1")]
    ckpt(*words).failed(4, "no-such-bucket")
    assert "no-such-bucket" not in client(bucket.server).ls("")


def test_a_name_that_the_server_changes_is_not_committed(
    tmp_path: Path, seaweed: SeaweedFS, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SeaweedFS takes a backslash for a slash."""
    bucket = Bucket.make(seaweed, monkeypatch)
    tree = fill(tmp_path / "tree", {"back\\slash": b"x"})
    ckpt("push", tree, ref(bucket.uri(), "r@1")).failed(5, "is not there although it was stored")
    assert check_store(bucket.uri()) == []


@pytest.mark.parametrize(
    "options",
    [
        {"nonsense": "1"},
        {"bucket": "x"},
        {"timeout": "never"},
        {"checksums": "crc32"},
        {"addressing_style": "sideways"},
        {"anon": "maybe"},
        {"endpoint_url": "ftp://x"},
        {"endpoint_url": "http://user:pw@host"},
        {"sse_kms_key_id": "k"},
    ],
)
def test_an_option_that_cannot_be_is_refused(options: dict[str, str]) -> None:
    query = "&".join(f"{name}={value}" for name, value in options.items())
    with pytest.raises(UsageError) as caught:
        ckptstore.open_store(f"s3://bucket/prefix?{query}")
    assert "pw" not in str(caught.value)


def test_storage_class_and_encryption_go_with_what_is_stored(
    tmp_path: Path, bucket: Bucket
) -> None:
    tree = make_tree(tmp_path / "tree", 1, {"big": 5_000_000, "small": 10})
    with FaultyProxy(bucket.server.port("s3")) as proxy:
        uri = bucket.uri(
            endpoint_url=proxy.endpoint,
            storage_class="STANDARD_IA",
            sse="AES256",
        )
        # This server has no keys to encrypt with; what is asked of it is what matters.
        ckpt("push", tree, ref(uri, "r@1"))
        heads = [h.lower() for h in proxy.heads if h.startswith((b"PUT ", b"POST "))]
    begun = [h for h in heads if b"partnumber" not in h and b"delete" not in h]
    assert begun
    assert all(b"x-amz-storage-class: standard_ia" in h for h in begun)
    assert all(b"x-amz-server-side-encryption: aes256" in h for h in begun)


def test_checksums_that_the_server_compares_go_with_every_body(
    tmp_path: Path, bucket: Bucket
) -> None:
    tree = make_tree(tmp_path / "tree", 1, {"big": 17_000_000, "small": 10})
    auto = b"x-amz-checksum-crc64nvme: " if keeps_checksums(bucket) else b"content-md5: "
    for chosen, header in (("auto", auto), ("md5", b"content-md5: ")):
        with FaultyProxy(bucket.server.port("s3")) as proxy:
            uri = bucket.uri(endpoint_url=proxy.endpoint, checksums=chosen)
            ckpt("push", tree, ref(uri, f"{chosen}@1")).ok()
            puts = [h.lower() for h in proxy.heads if h.startswith(b"PUT ")]
        if not keeps_checksums(bucket) and chosen == "auto":
            assert b"\r\nx-amz-checksum-crc64nvme: " in puts.pop(0)  # tried once, with no data
        assert puts
        assert all(b"\r\n" + header in h for h in puts)
        assert not any(b"x-amz-trailer" in h or b"aws-chunked" in h for h in puts)
    assert check_store(bucket.uri()) == ["auto@1", "md5@1"]
    entry = ckptstore.open_store(bucket.uri()).get("auto", step=1).entry("big")
    assert (entry.crc64nvme is not None) is keeps_checksums(bucket)


def test_abandoned_uploads_are_collected(
    tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ckptstore.open_store(bucket.uri())
    store.push(make_tree(tmp_path / "tree", 1), "r", 1)
    key = "r/00002-step-00000002-abcdefgh/w.bin"
    writer = store.backend.open_writer(key, size=5_000_000)
    writer.write(0, memoryview(bytes(5_000_000)))
    assert [u.key for u in store.backend.unfinished("r")] == [key]
    assert not [a for a in gc(store, grace=0).removed if a.key == key]  # it may be in use
    monkeypatch.setattr(sys.modules["ckptstore.maintenance.gc"], "STALE_SECONDS", -10)
    assert [a.key for a in gc(store, grace=0, dry_run=True).removed] == [key]
    assert [u.key for u in store.backend.unfinished("r")] == [key]
    assert [a.key for a in gc(store, grace=0).removed] == [key]
    assert list(store.backend.unfinished("r")) == []


def test_an_object_of_more_blocks_than_parts_is_sent_in_larger_parts(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10,000 parts of one block are 160 GiB; here the limit is two parts."""
    monkeypatch.setattr(writing, "MAX_PARTS", 2)
    data = os.urandom(4 * BLOCK_SIZE + 5)
    store = S3Backend.from_uri(StoreURI.parse(bucket.uri()))
    writer = store.open_writer("d/x", size=len(data))
    for offset in range(0, len(data), BLOCK_SIZE):
        writer.write(offset, memoryview(data)[offset : offset + BLOCK_SIZE])
    writer.finish(len(data))
    assert bucket.read("d/x") == data
    assert store.checksum("d/x") == writer.crc64nvme


def test_a_stream_of_unknown_length_grows_its_parts(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_GROWTH", 1)
    data = os.urandom(4 * BLOCK_SIZE + 5)
    store = ckptstore.open_store(bucket.uri())
    with store.save("r", 1) as save, save.open("x") as f:
        f.write(data)
    assert store.get("r", step=1).read_bytes("x") == data


def test_500_gb_fit_into_one_object() -> None:
    blocks = -(-500 * 10**9 // BLOCK_SIZE)
    per_part = -(-500 * 10**9 // (writing.MAX_PARTS * BLOCK_SIZE))
    assert -(-blocks // per_part) <= writing.MAX_PARTS
    grown = sum(1 + part // writing._GROWTH for part in range(writing.MAX_PARTS))
    assert grown * BLOCK_SIZE > 500 * 10**9


def test_a_large_object_is_copied_in_parts(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "COPY_PART", 8_000_000)
    data = os.urandom(2 * BLOCK_SIZE + 5)
    store = S3Backend.from_uri(StoreURI.parse(bucket.uri()))
    writer = store.open_writer("d/x", size=len(data))
    for offset in range(0, len(data), BLOCK_SIZE):
        writer.write(offset, memoryview(data)[offset : offset + BLOCK_SIZE])
    writer.finish(len(data))
    assert store.copy("d/x", "e/x") == "server"
    assert bucket.read("e/x") == data
    assert store.checksum("e/x") == writer.crc64nvme
    assert list(store.unfinished("")) == []


def test_a_server_without_conditions_still_holds_saves(
    tmp_path: Path, rclone: Rclone, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Bucket.make(rclone, monkeypatch)
    tree = make_tree(tmp_path / "tree", 1)
    store = ckptstore.open_store(bucket.uri())
    for step in (1, 2):
        store.push(tree, "r", step)
    check_pull(store, "r", 2, tree, tmp_path / "pulled")
    ckpt("gc", bucket.uri()).failed(6, "exclusively", "--force")
    ckpt("gc", bucket.uri(), "--force").ok()
    assert check_store(bucket.uri()) == ["r@1", "r@2"]


def test_a_record_replaced_after_the_look_is_not_removed(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ceph ignores the condition on the ETag; it compares seconds."""
    store = S3Backend.from_uri(StoreURI.parse(bucket.uri()))
    bucket.write("commits/x", b"ours")
    look = store._get

    def slowly(key: str, limit: int) -> Any:
        seen = look(key, limit)
        time.sleep(1.1)
        bucket.write("commits/x", b"theirs")
        return seen

    monkeypatch.setattr(store, "_get", slowly)
    assert store.remove_if("commits/x", b"ours") is False
    assert bucket.read("commits/x") == b"theirs"


def test_a_file_of_several_parts_never_replaces(bucket: Bucket) -> None:
    store = S3Backend.from_uri(StoreURI.parse(bucket.uri()))
    writer = store.open_writer("d/x", size=5_000_000)
    writer.write(0, memoryview(bytes(5_000_000)))
    bucket.write("d/x", b"first")
    with pytest.raises(ConflictError):
        writer.finish(5_000_000)
    writer.abort()
    assert bucket.read("d/x") == b"first"
    assert list(store.unfinished("")) == []


@pytest.mark.parametrize("kind", ["rclone", *S3_SERVERS])
def test_a_body_damaged_on_its_way_is_not_stored(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a server that ignores the new checksums."""
    bucket = Bucket.make(request.getfixturevalue(kind), monkeypatch)
    store = S3Backend.from_uri(StoreURI.parse(bucket.uri()))
    writer = store.open_writer("d/x", size=3)
    monkeypatch.setattr(checksums, "Body", lambda data: Body(b"dam"))
    writer.write(0, memoryview(b"abc"))
    with pytest.raises(TemporaryError):
        writer.finish(3)
    assert bucket.read("d/x") is None


def test_an_object_replaced_while_it_is_read_is_not_mixed(bucket: Bucket) -> None:
    store = S3Backend.from_uri(StoreURI.parse(bucket.uri()))
    bucket.write("d/x", b"a" * 1000)
    reader = store.open_reader("d/x")
    bucket.write("d/x", b"b" * 1000)
    with pytest.raises(IntegrityError, match="replaced"):
        reader.read_into(0, memoryview(bytearray(1000)))


@pytest.mark.skipif(not FULL, reason="long: 20,000 keys and 6 GiB (make test-full)")
@pytest.mark.timeout(3000)
def test_many_keys_and_a_large_object(tmp_path: Path, bucket: Bucket) -> None:
    """20,000 files; and a sparse file over 5 GiB, pushed, and copied by the server."""
    store = ckptstore.open_store(bucket.uri())
    with store.save("many", 1, threads=16) as save:
        for i in range(20_000):
            save.add_bytes(f"{i % 100}/{i}", b"%d" % i)
    assert len(store.get("many", step=1).files) == 20_000
    assert store.get("many", step=1).quick_check() == ()
    big = tmp_path / "big"
    big.mkdir()
    with open(big / "sparse", "wb") as f:
        f.truncate(6 * 1024**3)
    assert store.push(big, "big", 1).sent == 6 * 1024**3
    assert store.push(big, "big", 2, SaveOptions()).sent == 0
    assert check_store(bucket.uri()) == ["big@1", "big@2", "many@1"]

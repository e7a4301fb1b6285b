"""Stores that were damaged, or made by someone who means harm: refused in a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ckptstore import document
from ckptstore.errors import IntegrityError
from ckptstore.hashing import content_digest
from ckptstore.layout import Name
from ckptstore.manifest import FORMAT
from ckptstore.records import BestRule, DamageNote, Features, Mark, Marker, decode_record
from tests.cli.support import (
    HAZARDS,
    WRITER,
    ckpt,
    contents,
    craft,
    directory_of,
    names_of,
    overwrite,
    record_of,
)

Damage = Callable[[bytes], bytes]

BIG = 100_000_000


def _big_json(_: bytes) -> bytes:
    return b'{"digest":"' + b"0" * BIG + b'"}'


DAMAGE: dict[str, Damage] = {
    "cut short": lambda data: data[:-7],
    "half of it": lambda data: data[: len(data) // 2],
    "empty": lambda _: b"",
    "one bit at the start": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "one bit in the digest": lambda data: data[:20] + bytes([data[20] ^ 1]) + data[21:],
    "one bit in the body": lambda data: data[:150] + bytes([data[150] ^ 4]) + data[151:],
    "one byte more": lambda data: data + b"\n",
    "zeros": lambda data: bytes(len(data)),
    "other json": lambda _: b"{}\n",
    "deep json": lambda _: b"[" * 100_000,
    "100 MB": _big_json,
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_record(place: Path, store: Path, what: str) -> None:
    record = record_of(store)
    overwrite(record, DAMAGE[what](record.read_bytes()))
    name, directory = names_of(store)[1], directory_of(store)
    files = contents(directory)

    rows = ckpt("list", store, "--json").ok().json
    assert [(r["step"], r["state"]) for r in rows] == [(400, "ok"), (500, "damaged")]
    assert rows[1]["name"] == name
    assert "damaged" in ckpt("list", store).ok().out
    for ref in ("gsm8k@500", "gsm8k@latest", f"gsm8k@{name}"):
        ckpt("show", f"{store}/{ref}").failed(5)
    ckpt("pull", f"{store}/gsm8k@500", place / "restored").failed(5)
    assert not (place / "restored").exists()
    ckpt("delete", f"{store}/gsm8k@500", "--force").failed(5)
    ran = ckpt("verify", store, "--json").failed(5)
    assert [c["ok"] for c in ran.json["checkpoints"]] == [True, False]
    assert "takes gsm8k@400" in ckpt("resume-info", f"{store}/gsm8k@latest").ok().out
    ckpt("resume-info", f"{store}/gsm8k@500").failed(5)
    ckpt("gc", store, "--grace", "0", "--force").ok()
    assert contents(directory) == files
    assert record.exists()


def test_a_new_save_goes_on_beside_a_damaged_record(store: Path, source: Path) -> None:
    overwrite(record_of(store), b"")
    for step in (500, 600):
        ckpt("push", source, f"{store}/gsm8k@{step}").ok()
        assert ckpt("show", f"{store}/gsm8k@latest", "--json").ok().json["step"] == step
    ckpt("verify", f"{store}/gsm8k@500", "--deep").ok()


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_manifest(place: Path, store: Path, what: str) -> None:
    manifest = directory_of(store) / "MANIFEST.json"
    overwrite(manifest, DAMAGE[what](manifest.read_bytes()))
    ckpt("show", f"{store}/gsm8k@500").failed(5, "manifest")
    ckpt("pull", f"{store}/gsm8k@500", place / "restored").failed(5, "manifest")
    assert not (place / "restored").exists()
    ckpt("diff", f"{store}/gsm8k@400", f"{store}/gsm8k@500").failed(5, "manifest")
    assert "takes gsm8k@400" in ckpt("resume-info", f"{store}/gsm8k@latest").ok().out
    ckpt("verify", store).failed(5, "gsm8k@500 is damaged: MANIFEST.json")
    assert [r["state"] for r in ckpt("list", store, "--json").ok().json] == ["ok", "damaged"]


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_marker(store: Path, source: Path, what: str) -> None:
    marker = store / "CKPTSTORE.json"
    overwrite(marker, DAMAGE[what](marker.read_bytes()))
    before = sorted(contents(store))
    for command in ("list", "gc", "init", "verify"):
        ckpt(command, store).failed(5, "CKPTSTORE.json")
    ckpt("push", source, f"{store}/gsm8k@600").failed(5)
    assert sorted(contents(store)) == before


def test_a_store_of_a_newer_format(store: Path, source: Path) -> None:
    _mark_store(store, format=FORMAT + 1)
    for command in (["list", store], ["show", f"{store}/gsm8k@500"], ["gc", store]):
        ckpt(*command).failed(5, f"format {FORMAT + 1}", "update ckptstore")
    ckpt("push", source, f"{store}/gsm8k@600").failed(5, "update ckptstore")


def test_a_store_with_features_that_are_not_known(place: Path, store: Path, source: Path) -> None:
    _mark_store(store, requires=Features(delete=("packs",)))
    ckpt("push", source, f"{store}/gsm8k@600").ok()
    ckpt("delete", f"{store}/gsm8k@400").failed(5, "packs")
    ckpt("gc", store).failed(5, "packs")
    _mark_store(store, requires=Features(write=("packs",)))
    ckpt("push", source, f"{store}/gsm8k@700").failed(5, "packs")
    ckpt("pin", f"{store}/gsm8k@400").failed(5, "packs")
    ckpt("pull", f"{store}/gsm8k@500", place / "restored").ok()
    _mark_store(store, requires=Features(read=("pa\x1b[31mcks",)))
    assert "\x1b" not in ckpt("list", store).failed(5, "update ckptstore").err


def _mark_store(store: Path, **fields: Any) -> None:
    good = Marker(format=FORMAT, store="abcdefghijklmnop", created="2026-01-01T00:00:00Z")
    body = msgspec.structs.replace(good, **fields)
    overwrite(store / "CKPTSTORE.json", document.encode(body))


# Manifests that name what they must not; every digest is right

PATHS: dict[str, list[str]] = {
    "up": ["../../etc/passwd"],
    "up from inside": ["a/../../../etc/passwd"],
    "absolute": ["/etc/passwd"],
    "a path twice": ["a.bin", "a.bin"],
    "unsorted": ["b.bin", "a.bin"],
    "the manifest": ["MANIFEST.json"],
    "below the manifest": ["manifest.json/a"],
    "here": ["./a.bin"],
    "two slashes": ["a//b"],
    "a slash at the end": ["a/"],
    "empty": [""],
    "NUL": ["a\0b"],
    "a file that is a directory": ["a", "a/b"],
    "an escape that goes up": ["../\x1b[31m"],
    "a long part": ["x" * 256],
    "a long path": ["/".join(["x" * 200] * 21)],
}


@pytest.mark.parametrize("what", PATHS)
def test_a_manifest_that_names_what_it_must_not(place: Path, what: str) -> None:
    root = place / "deep" / "hostile"
    name = Name(1, "hostilex", 500)
    writable = what in {"unsorted", "here"}
    _craft_unwritten(root, name, PATHS[what], write=writable)
    before = {p for p in contents(place) if "/marks/" not in p}
    dest = place / "dest" / "restored"
    for args in (
        ["show", f"{root}/gsm8k@500"],
        ["pull", f"{root}/gsm8k@500", dest],
        ["pull", f"{root}/gsm8k@500", dest, "--force"],
        ["verify", f"{root}/gsm8k@500", "--deep"],
        ["diff", f"{root}/gsm8k@500", place / "deep"],
        ["resume-info", f"{root}/gsm8k@latest"],
    ):
        ran = ckpt(*args).failed(5)
        assert not any(h in ran.out + ran.err for h in HAZARDS)
    assert {p for p in contents(place) if "/marks/" not in p} == before
    assert not dest.exists()


def _craft_unwritten(root: Path, name: Name, paths: list[str], *, write: bool) -> None:
    """Like :func:`craft`, and only the paths that are harmless become files."""
    if write:
        craft(root, paths, name=name)
        return
    craft(root, ["placeholder"], name=name)
    directory = root / "gsm8k" / str(name)
    (directory / "placeholder").unlink()
    manifest = json.loads((directory / "MANIFEST.json").read_bytes())
    entry = manifest["files"][0]
    manifest["files"] = [entry | {"path": path} for path in paths]
    (root / "gsm8k" / "commits" / f"{name}.json").unlink()
    (directory / "MANIFEST.json").unlink()
    directory.rmdir()
    content = content_digest(((p, entry["size"], entry["digest"], False) for p in paths), ())
    craft(
        root,
        [],
        name=name,
        manifest_bytes=json.dumps(manifest).encode(),
        record={"content": content, "size": entry["size"] * len(paths), "files": len(paths)},
    )


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 1},
        {"format": 2},
        {"format": -1},
        {"name": "00001-step-00000500-otherone"},
        {"run": "other"},
        {"step": 501},
        {"files": "none"},
        {"files": None},
        {"files": [{"path": "a", "size": -1, "digest": "0" * 64}]},
        {"files": [{"path": "a", "size": 10**30, "digest": "0" * 64}]},
        {"files": [{"path": "a", "size": 2**62, "digest": "0" * 64}]},
        {"files": [{"path": "a", "size": 0, "digest": "0" * 63}]},
        {"files": [{"path": 5, "size": 0, "digest": "0" * 64}]},
        {"metadata": []},
        {"empty_directories": ["../up"]},
        {"empty_directories": ["weights.bin"]},
    ],
    ids=str,
)
def test_a_manifest_that_cannot_be(place: Path, change: dict[str, Any]) -> None:
    good = place / "good"
    name = craft(good)
    ckpt("show", f"{good}/gsm8k@500").ok()
    manifest = json.loads((good / "gsm8k" / str(name) / "MANIFEST.json").read_bytes())
    craft(place / "bad", manifest_bytes=json.dumps(manifest | change).encode())
    for args in (
        ["show", f"{place}/bad/gsm8k@500"],
        ["pull", f"{place}/bad/gsm8k@500", place / "restored"],
        ["verify", f"{place}/bad/gsm8k@500"],
    ):
        ckpt(*args).failed(5)
    assert not (place / "restored").exists()


@pytest.mark.parametrize(
    "fields",
    [
        {"size": -1},
        {"files": -1},
        {"files": 2},
        {"size": 12},
        {"step": 501},
        {"seq": 2},
        {"run": "other"},
        {"name": "00001-step-00000500-otherone"},
        {"name": "../../../etc/passwd"},
        {"content": "0" * 63},
        {"content": "0" * 64},
        {"format": 2},
        {"requires": ("packs",)},
    ],
    ids=str,
)
def test_a_record_that_cannot_be(place: Path, fields: dict[str, Any]) -> None:
    craft(place / "bad", record=fields)
    ckpt("show", f"{place}/bad/gsm8k@500").failed(5)
    ckpt("pull", f"{place}/bad/gsm8k@500", place / "restored").failed(5)
    ckpt("resume-info", f"{place}/bad/gsm8k@latest").failed(5)
    ckpt("list", place / "bad").ok()
    ckpt("gc", place / "bad", "--grace", "0", "--force").ok()
    assert (directory_of(place / "bad") / "weights.bin").exists()


@pytest.mark.parametrize(
    "body",
    [
        b'{"kind":"\\u001b[31mcommit"}',
        b'{"kind":"\xc2\x9b31mcommit"}',
        b'{"kind":"commit","format":"\\u001b[31m"}',
        b'{"\\u001b[31m":1}',
        b"[]",
        b"null",
        b"5",
        b'{"kind":null}',
        b'{"kind":"commit","format":1e400}',
        b'{"kind":"commit","format":99999999999999999999999999}',
        b"\xff\xfe",
        b"[" * 50_000 + b"]" * 50_000,
    ],
)
def test_a_record_whose_digest_fits_nonsense(place: Path, body: bytes) -> None:
    root = place / "bad"
    name = craft(root)
    record = root / "gsm8k" / "commits" / f"{name}.json"
    overwrite(record, document.encode(_raw(body)))
    for args in (
        ["show", f"{root}/gsm8k@500"],
        ["verify", root],
        ["resume-info", f"{root}/gsm8k@latest"],
        ["delete", f"{root}/gsm8k@500", "--force"],
    ):
        ran = ckpt(*args).failed(5)
        assert not any(h in ran.out + ran.err for h in HAZARDS)
    assert ckpt("list", root, "--json").ok().json[0]["state"] == "damaged"


def _raw(body: bytes) -> Any:
    return msgspec.Raw(body)


EVIL = "a\x1b[31mb\x9bc\x07d\u202ee"


@pytest.mark.parametrize(
    "command",
    [
        ["list"],
        ["list", "--all"],
        ["show", "REF"],
        ["show", "BEST"],
        ["verify"],
        ["verify", "--deep"],
        ["diff", "REF", "OUT"],
        ["diff", "OUT", "REF"],
        ["pull", "REF", "DEST"],
        ["pull", "REF", "LINKED", "--force"],
        ["resume-info", "REF"],
        ["resume-info", "LATEST"],
        ["delete", "REF"],
        ["delete", "REF", "--dry-run"],
        ["gc", "--grace", "0"],
        ["pin", "REF"],
        ["show", "OTHER"],
        ["list", "--json"],
        ["show", "REF", "--json"],
        ["verify", "--json"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("damaged", [False, True], ids=["ok", "damaged"])
def test_nothing_that_a_store_says_moves_the_cursor(
    place: Path, source: Path, command: list[str], damaged: bool
) -> None:
    """Whatever text a hostile store can hold is printed escaped."""
    root = place / "hostile"
    name = _store_full_of_escapes(root)
    if damaged:
        mark = Mark(
            name=str(name),
            run="gsm8k",
            kind="damaged",
            created=EVIL,
            writer=msgspec.structs.replace(WRITER, id=EVIL, host=EVIL),
            damage=(DamageNote(path=EVIL, reason=EVIL, offset=5, length=2),),
            deep=True,
        )
        marks = root / "gsm8k" / "marks" / str(name)
        marks.mkdir(parents=True)
        (marks / "0000000000001-abcdefgh.json").write_bytes(document.encode(mark))
    linked = place / "linked"
    linked.mkdir()
    (linked / EVIL).symlink_to(place)
    words = {
        "REF": f"{root}/gsm8k@500",
        "BEST": f"{root}/gsm8k@best",
        "LATEST": f"{root}/gsm8k@latest",
        "OTHER": f"{root}/other@500",
        "OUT": str(source),
        "DEST": str(place / "restored"),
        "LINKED": str(linked),
    }
    args = [words.get(word, word) for word in command]
    if not any(word in words for word in command):
        args.insert(1, str(root))
    ran = ckpt(*args)
    for hazard in HAZARDS:
        assert hazard not in ran.out + ran.err, ran


def _store_full_of_escapes(root: Path) -> Name:
    name = craft(
        root,
        (f"{EVIL}.bin", f"{EVIL}/deep.bin"),
        metadata={EVIL: [EVIL, {EVIL: EVIL}]},
        record={
            "created": EVIL,
            "writer": msgspec.structs.replace(WRITER, host=EVIL, version=EVIL, id=EVIL),
            "tags": (EVIL,),
            "metrics": {EVIL: 0.5},
            "best": BestRule(metric=EVIL, mode="max"),
            "parent": EVIL,
            "store": EVIL,
        },
    )
    # A record that claims to be another's, a stray temporary, and a file beside a checkpoint.
    other = Name(1, "otherone", 500)
    craft(root, run="other", name=other)
    record = root / "other" / "commits" / f"{other}.json"
    record.unlink()
    craft(root / "spare", run="other", name=other)
    spare = (root / "spare" / "other" / "commits" / f"{other}.json").read_bytes()
    changed = document.body_of(spare, "spare").replace(
        b'"run":"other"', json.dumps({"run": EVIL})[1:-1].replace(": ", ":").encode()
    )
    record.write_bytes(document.encode(_raw(changed)))
    (root / "gsm8k" / f".ckpt-tmp-{EVIL}").write_bytes(b"stray")
    (root / "gsm8k" / str(name) / f"beside{EVIL}").write_bytes(b"beside")
    return name


def test_every_flipped_bit_and_every_cut_of_a_record_is_found(store: Path) -> None:
    record = record_of(store)
    name = Name.parse(record.name[:-5])
    assert name is not None
    good = record.read_bytes()
    decode_record(good, "gsm8k", name, "it")
    damaged = [good[:length] for length in range(len(good))]
    for offset in range(len(good)):
        for bit in range(8):
            changed = bytearray(good)
            changed[offset] ^= 1 << bit
            damaged.append(bytes(changed))
    for data in damaged:
        with pytest.raises(IntegrityError):
            decode_record(data, "gsm8k", name, "it")

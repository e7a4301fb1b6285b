from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import IntegrityError, UsageError
from ckptstore.hashing import BLOCK_SIZE, block_digest, content_digest
from ckptstore.layout import Name, RunKeys, path_problem
from ckptstore.manifest import FileEntry, Manifest, decode_manifest, is_digest
from tests.unit.support import examples, flipped, memory_store, rewrite_record, save

NAME = Name(3, "abcdefgh", 500)
DIGESTS = st.text("0123456789abcdef", min_size=64, max_size=64)
SEGMENTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)
PATHS = (
    st.lists(SEGMENTS, min_size=1, max_size=3)
    .map("/".join)
    .filter(lambda path: path_problem(path) is None)
)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@st.composite
def entries(draw: st.DrawFn, path: str) -> FileEntry:
    count = draw(st.integers(0, 3))
    blocks = draw(st.lists(DIGESTS, min_size=count, max_size=count))
    size = count * BLOCK_SIZE - draw(st.integers(0, BLOCK_SIZE - 1)) if count else 0
    return FileEntry.build(path, size, blocks, executable=draw(st.booleans()))


def can_stand_together(paths: list[str]) -> bool:
    """Whether no path is a directory of another, by the obvious comparison of each pair."""
    return not any(b.startswith(f"{a}/") for a in paths for b in paths)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    paths = draw(st.lists(PATHS, unique=True, max_size=6).filter(can_stand_together))
    split = draw(st.integers(0, len(paths)))
    files = [draw(entries(path)) for path in paths[:split]]
    metadata = draw(st.dictionaries(st.text(max_size=5), JSON, max_size=3))
    return Manifest.build("run", NAME, files, paths[split:], metadata)


def decode(data: bytes) -> Manifest:
    return decode_manifest(data, block_digest(data), "the manifest")


def entry(path: str = "a", **changes: Any) -> dict[str, Any]:
    made = json.loads(msgspec.json.encode(FileEntry.build(path, 1, ["0" * 64])))
    return {**made, **changes}


def manifest(*files: dict[str, Any], **changes: Any) -> bytes:
    body: dict[str, Any] = {
        "format": 1,
        "run": "run",
        "name": str(NAME),
        "step": 500,
        "block_size": BLOCK_SIZE,
        "files": list(files),
    }
    return json.dumps({**body, **changes}).encode()


@examples(100)
@given(manifests())
def test_what_was_encoded_is_decoded(made: Manifest) -> None:
    assert decode(made.encode()) == made


@examples(100)
@given(manifests())
def test_a_manifest_is_one_line_of_json_sorted_by_the_bytes_of_its_paths(made: Manifest) -> None:
    data = made.encode()
    assert data.count(b"\n") == 1
    loaded = json.loads(data)
    paths = [f["path"].encode() for f in loaded["files"]]
    assert paths == sorted(paths)
    empty = [p.encode() for p in loaded["empty_directories"]]
    assert empty == sorted(empty)


@examples(50)
@given(manifests(), st.randoms(use_true_random=False))
def test_the_order_in_which_files_were_added_makes_no_difference(made: Manifest, r: Any) -> None:
    files, empty = list(made.files), list(made.empty_directories)
    r.shuffle(files)
    r.shuffle(empty)
    assert Manifest.build("run", NAME, files, empty, made.metadata) == made


@examples(50)
@given(manifests())
def test_size_and_content_are_those_of_the_files(made: Manifest) -> None:
    assert made.size == sum(e.size for e in made.files)
    lines = [(e.path, e.size, e.digest, e.exec) for e in made.files]
    assert made.content == content_digest(lines, made.empty_directories)


@examples(10)
@given(manifests())
def test_any_single_flipped_bit_is_detected(made: Manifest) -> None:
    data = made.encode()
    digest = block_digest(data)
    for bit in range(len(data) * 8):
        with pytest.raises(IntegrityError):
            decode_manifest(flipped(data, bit), digest, "the manifest")


@examples(50)
@given(manifests(), st.data())
def test_a_manifest_cut_short_is_refused(made: Manifest, data: st.DataObject) -> None:
    whole = made.encode()
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(IntegrityError):
        decode_manifest(whole[:cut], block_digest(whole), "the manifest")
    with pytest.raises(IntegrityError):
        decode(whole[: min(cut, len(whole) - 2)])


@pytest.mark.parametrize(
    "path",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "a/../../../etc/passwd",
        "..",
        ".",
        "",
        "a//b",
        "a/",
        "./a",
        "a\0b",
        "MANIFEST.json",
        "manifest.json",
        "x" * 256,
    ],
)
def test_a_manifest_that_names_a_path_outside_is_refused_even_with_a_right_digest(
    path: str,
) -> None:
    with pytest.raises(IntegrityError, match="path"):
        decode(manifest(entry(path)))
    with pytest.raises(IntegrityError, match="path"):
        decode(manifest(empty_directories=[path]))


A, B = entry("a"), entry("b")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (manifest(A, A), "twice"),
        (manifest(B, A), "sorted"),
        (manifest(entry("a"), entry("a/b")), "a file and a directory"),
        (manifest(entry("a"), entry("a-b"), entry("a/b/c")), "a file and a directory"),
        (manifest(A, empty_directories=["a"]), "not empty or is named twice"),
        (manifest(A, empty_directories=["a/b"]), "a file and a directory"),
        (manifest(entry("a/b"), empty_directories=["a"]), "not empty or is named twice"),
        (manifest(empty_directories=["a", "a"]), "not empty or is named twice"),
        (manifest(empty_directories=["a", "a/b"]), "not empty or is named twice"),
        (manifest(empty_directories=["b", "a"]), "sorted"),
        (manifest(entry(size=-1)), "size"),
        (manifest(entry(size=0)), "block digests"),
        (manifest(entry(size=BLOCK_SIZE + 1)), "block digests"),
        (manifest(entry(blocks=[])), "block digests"),
        (manifest(entry(blocks=["0" * 64] * 2)), "block digests"),
        (manifest(entry(blocks=["0" * 63])), "hexadecimal"),
        (manifest(entry(blocks=["A" * 64])), "hexadecimal"),
        (manifest(entry(blocks=["1" * 64])), "does not follow"),
        (manifest(entry(digest="0" * 64)), "does not follow"),
        (manifest(entry(size=2)), "does not follow"),
        (manifest(entry(codec="zstd")), "codec"),
        (manifest(A, format=2), "format 2"),
        (manifest(A, format=0), "format 0"),
        (manifest(A, block_size=BLOCK_SIZE * 2), "blocks of"),
        (manifest(A, files=None), "understood"),
        (manifest(A, metadata=[]), "understood"),
        (manifest({**A, "path": 1}), "understood"),
        (manifest(entry(size=1.5)), "understood"),
        (manifest(entry(exec="yes")), "understood"),
        (b"", "understood"),
        (b"[]", "understood"),
        (b"\xff", "understood"),
        (b"[" * 100_000, "understood"),
    ],
)
def test_an_untrusted_manifest_is_refused_for_the_right_reason(data: bytes, reason: str) -> None:
    with pytest.raises(IntegrityError, match=reason):
        decode(data)


def test_the_hostile_manifests_above_differ_from_a_good_one_in_one_thing() -> None:
    assert [e.path for e in decode(manifest(A, B)).files] == ["a", "b"]
    assert decode(manifest(empty_directories=["a", "b"])).empty_directories == ("a", "b")


@examples(100)
@given(st.lists(PATHS, max_size=5), st.integers(0, 5))
def test_a_manifest_is_built_exactly_when_its_paths_can_lie_in_one_directory(
    paths: list[str], split: int
) -> None:
    files = [FileEntry.build(path, 0, []) for path in paths[:split]]
    possible = len(set(paths)) == len(paths) and can_stand_together(paths)
    if possible:
        Manifest.build("run", NAME, files, paths[split:])
    else:
        with pytest.raises(UsageError):
            Manifest.build("run", NAME, files, paths[split:])


@examples(100)
@given(st.one_of(DIGESTS, st.text(max_size=66)))
def test_a_digest_is_64_lower_case_hexadecimal_digits(text: str) -> None:
    valid = len(text) == 64 and all(c in "0123456789abcdef" for c in text)
    assert is_digest(text) is valid


def test_a_record_and_a_manifest_that_do_not_fit_are_refused() -> None:
    store = memory_store()
    cases: list[dict[str, Any]] = [{"content": "0" * 64}, {"size": 1}, {"files": 1}]
    for step, changes in enumerate(cases):
        checkpoint = save(store, step)
        rewrite_record(checkpoint, **changes)
        with pytest.raises(IntegrityError, match="does not fit"):
            _ = store.get("run", name=str(checkpoint.name)).files


def test_a_manifest_copied_from_another_checkpoint_is_refused() -> None:
    store = memory_store()
    one, two = save(store, 1), save(store, 2)
    data = store.backend.read(RunKeys("run").manifest(one.name), 2**30)
    store.backend.put(RunKeys("run").manifest(two.name), data)
    rewrite_record(two, manifest=one.commit.manifest)
    with pytest.raises(IntegrityError, match="does not fit"):
        _ = store.get("run", step=2).files


def test_a_manifest_that_is_missing_or_of_another_length_is_refused() -> None:
    store = memory_store()
    checkpoint = save(store)
    key = RunKeys("run").manifest(checkpoint.name)
    data = store.backend.read(key, 2**30)
    store.backend.put(key, data + b" ")
    with pytest.raises(IntegrityError, match="bytes long"):
        _ = store.get("run", step=1).files
    store.backend.delete([key])
    with pytest.raises(IntegrityError, match="missing"):
        _ = store.get("run", step=1).files


@examples(25)
@given(st.dictionaries(st.text(max_size=5), JSON, max_size=4))
def test_metadata_comes_back_as_it_was_given(metadata: dict[str, Any]) -> None:
    assert save(memory_store(), metadata=metadata).metadata == metadata


@pytest.mark.parametrize("value", [{"x": object()}, {"x": math.nan}, {"x": [math.inf]}])
def test_metadata_that_json_cannot_hold_is_a_usage_error_and_is_never_changed_in_silence(
    value: dict[str, Any],
) -> None:
    store = memory_store()
    with pytest.raises(UsageError):
        save(store, metadata=value)

from __future__ import annotations

import random
from pathlib import Path

from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from ckptstore import hashing
from ckptstore.hashing import (
    BLOCK_SIZE,
    block_count,
    block_digest,
    block_range,
    content_digest,
    file_digest,
    zero_block_digest,
)
from tests.unit.support import examples, memory_store, save, write_tree

BLOCK = 16 * 1024 * 1024
HEX = st.text("0123456789abcdef", min_size=64, max_size=64)


def by_definition(data: bytes) -> tuple[str, list[str]]:
    """A file's digest and its blocks' digests, written anew from the definition of format 1."""
    blocks = [blake3(data[i : i + BLOCK]).hexdigest() for i in range(0, len(data), BLOCK)]
    text = f"{len(data)}\n16777216\n" + "".join(f"{digest}\n" for digest in blocks)
    hasher = blake3(text.encode(), derive_key_context="ckptstore format 1 file digest")
    return hasher.hexdigest(), blocks


def test_the_constants_of_format_1_have_not_changed() -> None:
    assert BLOCK_SIZE == BLOCK
    assert hashing.FILE_CONTEXT == "ckptstore format 1 file digest"
    assert hashing.CONTENT_CONTEXT == "ckptstore format 1 content digest"


def test_a_block_digest_is_what_b3sum_prints() -> None:
    assert block_digest(b"") == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


def test_any_buffer_of_the_same_bytes_has_the_same_digest() -> None:
    data = bytes(range(256))
    assert block_digest(bytearray(data)) == block_digest(memoryview(data)) == block_digest(data)


@examples(200)
@given(st.integers(0, 2**50), st.sampled_from([-1, 0, 1]))
def test_blocks_cover_a_file_without_gap_or_overlap(size: int, off: int) -> None:
    size = max(0, size // BLOCK * BLOCK + off) if size % 2 else size
    count = block_count(size)
    if count == 0:
        assert size == 0
        return
    last_offset, last_length = block_range(count - 1, size)
    assert 1 <= last_length <= BLOCK
    assert last_offset + last_length == size
    assert last_offset == (count - 1) * BLOCK
    if count > 1:
        assert block_range(0, size) == (0, BLOCK)
        assert block_range(count - 2, size) == (last_offset - BLOCK, BLOCK)


@examples(100)
@given(st.integers(0, 2**50), st.lists(HEX, max_size=5))
def test_a_file_digest_follows_its_definition(size: int, blocks: list[str]) -> None:
    text = "\n".join([str(size), "16777216", *blocks]) + "\n"
    expected = blake3(text.encode(), derive_key_context="ckptstore format 1 file digest")
    assert file_digest(size, blocks) == expected.hexdigest()


FILES = st.lists(
    st.tuples(st.text(st.characters(codec="utf-8")), st.integers(0, 2**40), HEX, st.booleans())
)


@examples(100)
@given(FILES, st.lists(st.text(st.characters(codec="utf-8"))))
def test_a_content_digest_follows_its_definition(
    files: list[tuple[str, int, str, bool]], empty: list[str]
) -> None:
    text = "".join(f"{d} {s} {'x' if x else '-'} {p}\n" for p, s, d, x in files)
    text += "".join(f"directory {p}\n" for p in empty)
    expected = blake3(text.encode(), derive_key_context="ckptstore format 1 content digest")
    assert content_digest(files, empty) == expected.hexdigest()


def test_the_exec_bit_path_and_empty_directories_are_part_of_the_content() -> None:
    digest = "0" * 64
    seen = {
        content_digest([("a", 1, digest, False)], []),
        content_digest([("a", 1, digest, True)], []),
        content_digest([("b", 1, digest, False)], []),
        content_digest([("a", 2, digest, False)], []),
        content_digest([("a", 1, digest, False)], ["d"]),
        content_digest([], []),
    }
    assert len(seen) == 6


def test_the_digest_of_a_block_of_zeros_is_that_of_zeros() -> None:
    assert zero_block_digest() == blake3(bytes(BLOCK)).hexdigest()


def test_saved_files_have_the_digests_of_the_definition_at_every_kind_of_size(
    tmp_path: Path,
) -> None:
    filler = random.Random(7).randbytes(1 << 20) * 17
    sizes = {"empty": 0, "one": 1, "short": BLOCK - 1, "exact": BLOCK, "over": BLOCK + 1}
    files = {name: filler[:size] for name, size in sizes.items()} | {
        "two": (filler * 2)[: 2 * BLOCK + 7]
    }
    pushed = memory_store().push(write_tree(tmp_path / "src", files), "run", 1).checkpoint
    saved = save(memory_store(), files=files)
    for checkpoint in (pushed, saved):
        for entry in checkpoint.files:
            digest, blocks = by_definition(files[entry.path])
            assert (entry.digest, list(entry.blocks)) == (digest, blocks)
    lines = [(p, len(d), by_definition(d)[0], False) for p, d in sorted(files.items())]
    assert pushed.commit.content == saved.commit.content == content_digest(lines, [])

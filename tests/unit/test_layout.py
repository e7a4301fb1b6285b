from __future__ import annotations

import os
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import IntegrityError, UsageError
from ckptstore.layout import (
    MARKER,
    TEMPORARY_PREFIX,
    Name,
    RunKeys,
    check_new_path,
    check_run,
    check_step,
    check_stored_path,
    check_tag,
    is_run,
    is_temporary,
    lease_name,
    path_problem,
    record_name,
)
from tests.unit.support import examples, memory_store, save

IDS = st.text("abcdefghijklmnopqrstuvwxyz", min_size=8, max_size=8)
NAMES = st.builds(Name, st.integers(0, 10**12 - 1), IDS, st.integers(0, 10**15 - 1))


@examples(200)
@given(NAMES)
def test_a_name_is_read_back_from_what_it_spells(name: Name) -> None:
    assert Name.parse(str(name)) == name


@examples(60)
@given(st.one_of(st.text(max_size=60), st.from_regex(r"\d{1,16}-step-\d{1,17}-\w{7,9}\n?")))
def test_a_text_that_is_a_name_is_spelt_in_just_one_way(text: str) -> None:
    name = Name.parse(text)
    assert name is None or str(name) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00001-step-00000001-abcdefg",
        "00001-step-00000001-abcdefghi",
        "00001-step-00000001-ABCDEFGH",
        "00001-step-00000001-abcdefgh\n",
        " 00001-step-00000001-abcdefgh",
        "0001-step-00000001-abcdefgh",
        "000001-step-00000001-abcdefgh",
        "00001-step-0000001-abcdefgh",
        "00001-step-000000001-abcdefgh",
        "٠٠٠٠١-step-00000001-abcdefgh",
        "-0001-step-00000001-abcdefgh",
        "00001-step-00000001-abcdefgh.json",
        "../00001-step-00000001-abcdefgh",
    ],
)
def test_near_misses_are_no_names(text: str) -> None:
    assert Name.parse(text) is None


@examples(200)
@given(st.lists(NAMES, max_size=6))
def test_names_are_ordered_by_sequence_and_id_and_never_by_step(names: list[Name]) -> None:
    assert [(n.seq, n.id) for n in sorted(names)] == sorted((n.seq, n.id) for n in names)


def test_after_a_rollback_the_lower_step_is_the_newer() -> None:
    assert Name(3, "aaaaaaaa", 600) > Name(2, "zzzzzzzz", 1000)


@examples(100)
@given(st.lists(st.integers(0, 99_999), unique=True))
def test_the_spelling_of_names_sorts_like_the_names(seqs: list[int]) -> None:
    names = [Name(seq, "aaaaaaaa", 5) for seq in seqs]
    assert sorted(map(str, names)) == list(map(str, sorted(names)))


@examples(100)
@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", fullmatch=True))
def test_a_word_of_letters_digits_dots_and_dashes_can_be_a_run(run: str) -> None:
    if run.lower() != "mirrors" and run != MARKER:
        assert check_run(run) == run
        assert is_run(run)


@examples(200)
@given(st.text(max_size=20))
def test_a_run_is_always_one_plain_segment(text: str) -> None:
    try:
        run = check_run(text)
    except UsageError:
        assert not is_run(text)
        return
    assert is_run(text)
    assert os.path.normpath(run) == run
    assert os.sep not in run
    assert run not in (".", "..")


@pytest.mark.parametrize(
    "run", ["", ".", "..", "a/b", "/a", ".hidden", "-x", "a b", "a@b", "a\n", "é", "mirrors"]
)
def test_what_cannot_be_a_run_is_refused(run: str) -> None:
    with pytest.raises(UsageError):
        check_run(run)


def test_a_run_name_of_200_characters_is_the_longest() -> None:
    check_run("a" * 200)
    with pytest.raises(UsageError):
        check_run("a" * 201)


def test_a_reserved_run_is_reserved_in_any_letter_case() -> None:
    for run in ("mirrors", "MIRRORS", "Mirrors"):
        with pytest.raises(UsageError, match="reserved"):
            check_run(run)
        assert not is_run(run)


def test_a_run_cannot_have_the_name_of_the_marker() -> None:
    with pytest.raises(UsageError):
        check_run(MARKER)


@examples(100)
@given(st.integers())
def test_steps_are_whole_numbers_from_0_up_to_10_to_the_15(step: int) -> None:
    if 0 <= step < 10**15:
        assert check_step(step) == step
    else:
        with pytest.raises(UsageError):
            check_step(step)


@pytest.mark.parametrize("step", [True, False, 1.0, "1", None, -1, 10**15])
def test_what_is_no_step_is_refused(step: object) -> None:
    with pytest.raises(UsageError):
        check_step(step)  # type: ignore[arg-type]


@pytest.mark.parametrize("tag", ["a", "good", "v1.2_x-y", "steps", "step", "bests", "a" * 100])
def test_lower_case_words_can_be_tags(tag: str) -> None:
    assert check_tag(tag) == tag


@pytest.mark.parametrize(
    "tag", ["", "latest", "best", "step-5", "A", "1a", "a b", "a/b", "a@b", "a\n", "é", "a" * 101]
)
def test_what_cannot_be_a_tag_is_refused(tag: str) -> None:
    with pytest.raises(UsageError):
        check_tag(tag)


def test_keys_of_a_run_lie_where_the_layout_says() -> None:
    keys, name = RunKeys("gsm8k"), Name(17, "kfqzmwta", 500)
    assert keys.record(name) == "gsm8k/commits/00017-step-00000500-kfqzmwta.json"
    assert keys.trash_record(name) == "gsm8k/trash/00017-step-00000500-kfqzmwta.json"
    assert keys.directory(name) == "gsm8k/00017-step-00000500-kfqzmwta"
    assert keys.manifest(name) == "gsm8k/00017-step-00000500-kfqzmwta/MANIFEST.json"
    assert keys.file(name, "a/b") == "gsm8k/00017-step-00000500-kfqzmwta/a/b"
    assert keys.lease(name, "w") == "gsm8k/leases/00017-step-00000500-kfqzmwta.w.json"
    assert keys.marks_of(name) == "gsm8k/marks/00017-step-00000500-kfqzmwta"
    assert keys.latest == "gsm8k/latest"


@examples(50)
@given(NAMES, st.from_regex(r"[a-z]{1,16}", fullmatch=True))
def test_names_are_read_back_from_the_keys_of_records_and_leases(name: Name, writer: str) -> None:
    keys = RunKeys("r")
    assert record_name(keys.record(name).rpartition("/")[2]) == name
    assert record_name(keys.trash_record(name).rpartition("/")[2]) == name
    assert lease_name(keys.lease(name, writer).rpartition("/")[2]) == name


@pytest.mark.parametrize(
    "file_name", ["", ".json", "00001-step-00000001-abcdefgh", "x.json", ".ckpt-tmp-abcdefgh"]
)
def test_other_files_beside_records_and_leases_name_no_checkpoint(file_name: str) -> None:
    assert record_name(file_name) is None
    assert lease_name(file_name) is None


def test_temporaries_are_known_by_their_last_segment() -> None:
    assert is_temporary(f"a/b/{TEMPORARY_PREFIX}x")
    assert is_temporary(f"{TEMPORARY_PREFIX}x")
    assert not is_temporary(f"{TEMPORARY_PREFIX}x/b")


PARTS = st.one_of(
    st.sampled_from(["", ".", "..", "a", "MANIFEST.json", "manifest.JSON", "\0", "a" * 256, "…"]),
    st.text(st.characters(codec=None), max_size=5),
)
HOSTILE = st.one_of(
    st.text(st.characters(codec=None)),
    st.lists(PARTS, max_size=6).map("/".join),
)


@examples(250)
@given(HOSTILE)
def test_a_path_that_passes_the_checks_never_leads_outside(path: str) -> None:
    if path_problem(path) is not None:
        with pytest.raises(IntegrityError):
            check_stored_path(path, "it")
        with pytest.raises(UsageError):
            check_new_path(path)
        return
    check_stored_path(path, "it")
    joined = os.path.normpath(os.path.join("/base/dir", path))
    assert joined == f"/base/dir/{path}"
    assert "\0" not in path
    assert path.partition("/")[0].lower() != "manifest.json"


@examples(250)
@given(HOSTILE)
def test_a_path_that_may_be_stored_is_utf8_without_control_characters(path: str) -> None:
    try:
        check_new_path(path)
    except UsageError:
        return
    path.encode("utf-8")
    assert not any(unicodedata.category(c) == "Cc" for c in path)
    assert path_problem(path) is None


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc/passwd",
        "../../etc/passwd",
        "a/../../b",
        "a/..",
        "./a",
        "a/./b",
        "a//b",
        "a/",
        "a\0b",
        "MANIFEST.json",
        "manifest.json",
        "Manifest.JSON",
        "MANIFEST.json/x",
        "x" * 256,
        "/".join(["xxxxxxx"] * 600),
    ],
)
def test_paths_that_must_not_be_followed_are_refused_wherever_they_come_from(path: str) -> None:
    with pytest.raises(IntegrityError):
        check_stored_path(path, "the manifest")
    with pytest.raises(UsageError):
        check_new_path(path)


@pytest.mark.parametrize(
    "path", ["a", "a/b", "...", "..a", "a..", "sub/MANIFEST.json", "a b", "é/ü", "*[?", "x" * 255]
)
def test_odd_but_harmless_paths_are_taken(path: str) -> None:
    check_stored_path(path, "the manifest")
    check_new_path(path)


@pytest.mark.parametrize("path", ["a\nb", "a\x1bb", "a\x7fb", "\udc80", f"d/{TEMPORARY_PREFIX}x"])
def test_control_characters_non_utf8_and_our_own_temporaries_are_not_stored(path: str) -> None:
    with pytest.raises(UsageError):
        check_new_path(path)


def test_a_save_after_the_highest_name_there_can_be_is_found_or_refused() -> None:
    store = memory_store()
    store.create()
    highest = Name(10**12 - 2, "aaaaaaaa", 1)
    store.backend.put(RunKeys("run").manifest(highest), b"planted")
    try:
        checkpoint = save(store, 2)
    except UsageError:
        return
    assert [c.name for c in store.list("run")] == [checkpoint.name]

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckptstore.backends import open_backend
from ckptstore.backends.local import LocalBackend
from ckptstore.errors import UsageError
from ckptstore.layout import Name
from ckptstore.uri import Ref, StoreURI, is_ref, parse_ref, redact
from tests.unit.support import examples

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)
OPTION_KEYS = st.from_regex(r"opt[a-z]{1,5}", fullmatch=True).filter(lambda k: "token" not in k)
OPTIONS = st.dictionaries(OPTION_KEYS, TEXT, max_size=3)
RUNS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True).filter(
    lambda r: r.lower() != "mirrors" and not r.endswith(".json")
)
TAGS = st.from_regex(r"[a-z][a-z0-9._-]{0,20}", fullmatch=True).filter(
    lambda t: t not in ("latest", "best") and not t.startswith("step-")
)
IDS = st.text("abcdefghijklmnopqrstuvwxyz", min_size=8, max_size=8)
NAMES = st.builds(Name, st.integers(0, 10**12 - 1), IDS, st.integers(0, 10**15 - 1))
SELECTORS = st.one_of(
    st.integers(0, 10**15 - 1).map(str),
    st.sampled_from(["latest", "best"]),
    TAGS,
    NAMES.map(str),
)


@examples(80)
@given(TEXT)
def test_a_local_path_is_read_back_from_its_shortest_text(path: str) -> None:
    uri = StoreURI.parse(os.path.abspath(f"/{path}"))
    assert StoreURI.parse(str(uri)) == uri


@examples(80)
@given(TEXT, OPTIONS)
def test_a_file_uri_is_read_back_from_its_text_whatever_its_path_holds(
    path: str, options: dict[str, str]
) -> None:
    uri = StoreURI("file", os.path.abspath(f"/{path}"), options)
    assert StoreURI.parse(str(uri)) == uri


@examples(100)
@given(
    st.sampled_from(["memory", "s3", "hdfs", "webhdfs"]),
    st.from_regex(r"[a-z0-9.-]{1,10}(/[a-z0-9._=-]{1,8}){0,3}", fullmatch=True),
    OPTIONS,
)
def test_a_uri_with_a_scheme_is_read_back_from_its_text(
    scheme: str, path: str, options: dict[str, str]
) -> None:
    uri = StoreURI(scheme, path, options)
    assert StoreURI.parse(str(uri)) == uri


@examples(150)
@given(st.text(max_size=40))
def test_any_text_is_a_store_or_a_usage_error(text: str) -> None:
    try:
        uri = StoreURI.parse(text)
    except UsageError:
        return
    assert uri.path


def test_a_text_without_a_scheme_is_a_path_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert StoreURI.parse("a?b#c%41") == StoreURI("file", str(tmp_path / "a?b#c%41"))
    monkeypatch.setenv("HOME", "/home/someone")
    assert StoreURI.parse("~/ckpts").path == "/home/someone/ckpts"


@pytest.mark.parametrize(
    ("text", "path", "options"),
    [
        ("file:///data/ckpts", "/data/ckpts", {}),
        ("FILE:///data/ckpts", "/data/ckpts", {}),
        ("file://localhost/data/ckpts/", "/data/ckpts", {}),
        ("file:///data/a%20b?dedupe=link", "/data/a b", {"dedupe": "link"}),
        ("file:///data/../etc", "/etc", {}),
        ("file:///x?dedupe=", "/x", {"dedupe": ""}),
    ],
)
def test_file_uris_name_absolute_paths(text: str, path: str, options: dict[str, str]) -> None:
    assert StoreURI.parse(text) == StoreURI("file", path, options)


@pytest.mark.parametrize(
    "text",
    ["", "a\0b", "file://host/data", "memory://", "memory:///", "s3://", "memory://a?novalue&"],
)
def test_what_names_no_store_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        StoreURI.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "s3://b/p?secret_key=hunter2",
        "s3://b/p?aws_secret_access_key=hunter2",
        "s3://b/p?accesskey=hunter2",
        "s3://b/p?session_token=hunter2",
        "hdfs://h/p?password=hunter2",
        "webhdfs://me:hunter2@host:9870/p",
        "file://me:hunter2@host/p",
    ],
)
def test_a_secret_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        StoreURI.parse(text)
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in (caught.value.hint or "")


@examples(100)
@given(st.from_regex(r"[a-z0-9]{12}", fullmatch=True), st.sampled_from(["s3", "hdfs", "file"]))
def test_redacted_text_holds_no_password_and_no_option_value(secret: str, scheme: str) -> None:
    text = f"{scheme}://user:{secret}@host/path?a={secret}&b=x{secret}"
    assert secret not in redact(text)
    assert "user" in redact(text)
    assert "a=" in redact(text)


def test_an_unknown_scheme_is_a_usage_error_that_names_the_known_ones() -> None:
    with pytest.raises(UsageError) as caught:
        open_backend(StoreURI.parse("ftp://host/x"))
    assert "file://" in (caught.value.hint or "")


@pytest.mark.parametrize("text", ["file:///x?dedup=link", "file:///x?dedupe=all", "memory://m?a=b"])
def test_an_unknown_option_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        open_backend(StoreURI.parse(text))


@pytest.mark.parametrize("dedupe", ["reflink", "link", "none"])
def test_the_dedupe_option_reaches_the_backend(dedupe: str) -> None:
    backend = open_backend(StoreURI.parse(f"file:///x?dedupe={dedupe}"))
    assert isinstance(backend, LocalBackend)
    assert backend.dedupe == dedupe


@examples(80)
@given(RUNS, SELECTORS)
def test_a_ref_is_read_back_from_its_text(run: str, selector: str) -> None:
    ref = parse_ref(f"{run}@{selector}")
    assert ref == Ref(None, run, selector)
    assert parse_ref(str(ref)) == ref
    assert is_ref(str(ref))


@examples(80)
@given(
    st.sampled_from(["/data/x", "rel/dir", ".", "s3://b/p", "memory://m", "hdfs://u@h:1/p"]),
    RUNS,
    SELECTORS,
    OPTIONS,
)
def test_a_ref_behind_a_store_names_that_store_with_its_options(
    store: str, run: str, selector: str, options: dict[str, str]
) -> None:
    query = "&".join(f"{k}=v" for k in options) if "://" in store else ""
    query = f"?{query}" if query else ""
    ref = parse_ref(f"{store}/{run}@{selector}{query}")
    assert (ref.store, ref.run, ref.selector) == (store + query, run, selector)


@examples(100)
@given(RUNS, st.integers(0, 10**15 - 1), NAMES)
def test_a_selector_of_digits_is_a_step_and_a_full_name_is_a_name(
    run: str, step: int, name: Name
) -> None:
    assert parse_ref(f"{run}@{step}").step == step
    assert parse_ref(f"{run}@{step}").name is None
    assert parse_ref(f"{run}@{name}").name == name
    assert parse_ref(f"{run}@{name}").step is None


@examples(150)
@given(st.text(max_size=30))
def test_any_text_is_a_ref_or_a_usage_error(text: str) -> None:
    for optional in (False, True):
        try:
            ref = parse_ref(text, selector_optional=optional)
        except UsageError:
            continue
        assert "/" not in ref.run
        assert ref.selector is not None or optional


@pytest.mark.parametrize(
    "text",
    [
        "",
        "run",
        "run@",
        "@5",
        "run@-5",
        "run@+5",
        "run@٣",
        "run@1000000000000000",
        "run@" + "9" * 5000,
        "run@Tag",
        "run@step-5",
        "run@a@b",
        "run@5/",
        "ru n@5",
        "../..@5",
        "mirrors@5",
        "memory://run@5",
        "s3://run@5",
        "file://run@5",
    ],
)
def test_what_names_no_checkpoint_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        parse_ref(text)


def test_a_step_with_leading_zeros_is_the_same_step() -> None:
    assert parse_ref("run@00500").step == 500


def test_without_a_selector_a_push_target_is_taken_where_that_is_asked_for() -> None:
    assert parse_ref("/data/run", selector_optional=True) == Ref("/data", "run", None)
    assert parse_ref("run", selector_optional=True) == Ref(None, "run", None)
    with pytest.raises(UsageError):
        parse_ref("run@", selector_optional=True)


def test_a_run_below_the_root_of_the_disk_has_the_root_as_its_store() -> None:
    assert parse_ref("/run@5") == Ref("/", "run", "5")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run@5", True),
        ("/data/run@5", True),
        ("s3://b/run@5?endpoint_url=http://x", True),
        ("s3://b/p?x=a@b", False),
        ("hdfs://u@h/p", False),
        ("/data@x/run", False),
        ("run", False),
    ],
)
def test_an_argument_is_a_ref_if_its_last_segment_holds_an_at(text: str, expected: bool) -> None:
    assert is_ref(text) is expected


@examples(100)
@given(RUNS, st.text(max_size=10))
def test_a_malformed_selector_never_escapes_into_the_message_unescaped(
    run: str, selector: str
) -> None:
    assume("/" not in selector)
    with pytest.raises(UsageError) as caught:
        parse_ref(f"{run}@\x1b{selector}")
    assert str(caught.value).isprintable()

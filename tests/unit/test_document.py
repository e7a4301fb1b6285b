from __future__ import annotations

import json

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from ckptstore import document
from ckptstore.document import Decoder, body_of, encode
from ckptstore.errors import IntegrityError
from tests.unit.support import examples, flipped


class Sample(msgspec.Struct, frozen=True):
    text: str
    number: int = 0


SAMPLES = st.builds(Sample, st.text(st.characters(codec="utf-8"), max_size=40), st.integers(0, 99))
DECODER = Decoder[Sample](Sample)


@examples(100)
@given(SAMPLES)
def test_what_was_encoded_is_decoded(body: Sample) -> None:
    assert DECODER.decode(encode(body), "it") == body


@examples(50)
@given(SAMPLES)
def test_a_document_is_one_line_of_json_with_the_digest_of_its_body(body: Sample) -> None:
    data = encode(body)
    assert data.count(b"\n") == 1
    assert data.endswith(b"}\n")
    outer = json.loads(data)
    start = data.index(b'"body":') + len(b'"body":')
    assert list(outer) == ["digest", "body"]
    assert outer["body"] == {"text": body.text, "number": body.number}
    assert outer["digest"] == blake3(data[start:-2]).hexdigest()


@examples(25)
@given(SAMPLES)
def test_any_single_flipped_bit_is_detected(body: Sample) -> None:
    data = encode(body)
    for bit in range(len(data) * 8):
        with pytest.raises(IntegrityError):
            DECODER.decode(flipped(data, bit), "it")


@examples(50)
@given(SAMPLES, st.data())
def test_a_document_cut_short_anywhere_is_refused(body: Sample, data: st.DataObject) -> None:
    whole = encode(body)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(IntegrityError):
        body_of(whole[:cut], "it")


@examples(50)
@given(SAMPLES, st.binary(min_size=1, max_size=8))
def test_anything_after_or_before_a_document_is_refused(body: Sample, more: bytes) -> None:
    for data in (encode(body) + more, more + encode(body)):
        with pytest.raises(IntegrityError):
            body_of(data, "it")


@examples(200)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_no_document_and_never_another_error(data: bytes) -> None:
    with pytest.raises(IntegrityError, match="it"):
        DECODER.decode(data, "it")


def framed(body: bytes) -> bytes:
    digest = blake3(body).hexdigest().encode()
    return b'{"digest":"' + digest + b'","body":' + body + b"}\n"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nonsense",
        b"[]",
        b"{}",
        b'{"text":1}',
        b'{"text":"a","number":"b"}',
        b'{"text":"\xff"}',
        b'{"text":"\\ud800"}',
        b"[" * 100_000,
    ],
)
def test_a_body_with_a_right_digest_that_cannot_be_understood_is_refused(body: bytes) -> None:
    with pytest.raises(IntegrityError, match="it"):
        DECODER.decode(framed(body), "it")


def test_fields_that_a_later_version_added_are_passed_over() -> None:
    assert DECODER.decode(framed(b'{"text":"a","later":[1]}'), "it") == Sample("a")


def test_an_upper_case_digest_is_not_taken_for_the_same() -> None:
    data = encode(Sample("a"))
    upper = data[:11] + data[11:75].upper() + data[75:]
    assert upper != data
    with pytest.raises(IntegrityError):
        body_of(upper, "it")


def test_the_message_says_whether_a_document_is_empty_short_or_damaged() -> None:
    data = encode(Sample("a"))
    for bad, reason in [
        (b"", "is empty"),
        (data[:-4], "cut short"),
        (flipped(data, 8 * 85), "digest"),
    ]:
        with pytest.raises(IntegrityError, match=reason):
            body_of(bad, "it")


def test_the_size_limit_has_room_for_the_journal_of_30000_files() -> None:
    assert document.SIZE_LIMIT >= 30_000 * 512

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.torch.envelope import envelope
from ckptstore.torch.segments import bytes_of
from tests.torch.support import raw
from tests.unit.support import examples

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

WORDS = """
bool uint8 int8 uint16 int16 uint32 int32 uint64 int64
float16 bfloat16 float32 float64 complex32 complex64 complex128
float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2
"""
DTYPES: list[torch.dtype] = [getattr(torch, name) for name in WORDS.split()]
SHAPES = [(), (0,), (1,), (5,), (3, 0, 2), (2, 3), (2, 1, 3, 2)]


def filled(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor whose bytes are all kinds of things, NaNs of any payload among them."""
    tensor = torch.empty(shape, dtype=dtype)
    size = tensor.nbytes
    pattern = torch.arange(size, dtype=torch.int64) * 37 + 11
    if dtype is torch.bool:
        pattern %= 2
    if size:
        data = pattern.to(torch.uint8)
        tensor = data.view(dtype).reshape(shape) if shape else data.view(dtype)[0].clone()
    return tensor


def wrapped(tensor: torch.Tensor) -> bytes:
    head, tail = envelope(tensor.dtype, tuple(tensor.shape))
    return head + bytes(bytes_of(tensor)) + tail


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_load_reads_every_type_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = filled(dtype, shape)
    found = torch.load(io.BytesIO(wrapped(tensor)), weights_only=True)
    assert found.dtype == dtype
    assert found.shape == tensor.shape
    assert found.stride() == torch.empty(shape).stride()
    assert raw(found) == raw(tensor)


def test_the_data_lie_at_a_multiple_of_64_bytes() -> None:
    for dtype in DTYPES:
        for shape in SHAPES:
            assert len(envelope(dtype, shape)[0]) % 64 == 0


@examples(100)
@given(
    st.sampled_from(DTYPES), st.lists(st.integers(0, 300), max_size=5).filter(lambda s: len(s) < 5)
)
def test_any_small_shape(dtype: torch.dtype, lengths: list[int]) -> None:
    shape = []
    count = 1
    for length in lengths:
        count *= length
        if count > 2000:
            break
        shape.append(length)
    tensor = filled(dtype, tuple(shape))
    found = torch.load(io.BytesIO(wrapped(tensor)), weights_only=True)
    assert (found.dtype, found.shape, raw(found)) == (dtype, tensor.shape, raw(tensor))


def test_equal_tensors_have_equal_bytes_wherever_they_are() -> None:
    one = torch.arange(12.0).reshape(3, 4)
    other = torch.arange(12.0).reshape(4, 3).t().contiguous().reshape(3, 4).copy_(one)
    before = wrapped(one)
    envelope.cache_clear()
    assert wrapped(other) == before


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.uint8, (0xFFFFFFFE,)),
        (torch.uint8, (0xFFFFFFFF,)),
        (torch.float32, (1 << 30,)),
        (torch.float32, (1 << 20, 1 << 11)),
    ],
    ids=str,
)
def test_around_and_above_4_gib(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """A sparse file, loaded through mmap: no memory is needed for what it would take."""
    head, tail = envelope(dtype, shape)
    size = torch.Size(shape).numel() * dtype.itemsize
    path = tmp_path / "big.pt"
    with path.open("wb") as f:
        f.write(head)
        f.seek(len(head) + size - 1)
        f.write(b"\x42")
        f.write(tail)
    found = torch.load(path, mmap=True, weights_only=True)
    assert (found.dtype, tuple(found.shape)) == (dtype, shape)
    flat = found.view(-1)[-1:].clone().view(torch.uint8)
    assert flat[-1] == 0x42
    del found


def test_the_records_are_what_zip_tools_see(tmp_path: Path) -> None:
    import zipfile

    path = tmp_path / "t.pt"
    path.write_bytes(wrapped(torch.arange(100)))
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist() == [
            "archive/data.pkl",
            "archive/byteorder",
            "archive/version",
            "archive/data/0",
        ]
        assert archive.read("archive/byteorder") == b"little"

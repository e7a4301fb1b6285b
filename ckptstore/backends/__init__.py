"""Kinds of storage: a contract (``base``) and an implementation for each scheme."""

from __future__ import annotations

from ckptstore.backends.base import Backend
from ckptstore.errors import UsageError, printable
from ckptstore.uri import StoreURI

SCHEMES = ("file", "hdfs", "webhdfs", "swebhdfs", "memory")
"""The schemes of storage URIs that this version opens."""


def open_backend(uri: StoreURI) -> Backend:
    """The backend for a storage URI. Touches nothing yet.

    Raises:
        UsageError: the scheme or an option is unknown.
    """
    if uri.scheme == "file":
        from ckptstore.backends.local import LocalBackend

        return LocalBackend.from_uri(uri)
    if uri.scheme == "memory":
        from ckptstore.backends.memory import MemoryBackend

        return MemoryBackend.from_uri(uri)
    if uri.scheme == "hdfs":
        from ckptstore.backends import hdfs

        return hdfs.from_uri(uri)
    if uri.scheme in ("webhdfs", "swebhdfs"):
        from ckptstore.backends import webhdfs

        return webhdfs.from_uri(uri)
    raise UsageError(
        f"unknown storage scheme {printable(uri.scheme)!r}",
        hint=f"known: a local path, {', '.join(f'{s}://' for s in SCHEMES)}",
    )

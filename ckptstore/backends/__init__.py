"""Kinds of storage: a contract (``base``) and an implementation for each scheme."""

from __future__ import annotations

from ckptstore.backends.base import Backend
from ckptstore.errors import UsageError, printable
from ckptstore.uri import StoreURI

SCHEMES = ("file", "s3", "hdfs", "webhdfs", "swebhdfs", "memory")
"""The schemes of storage URIs that this version opens."""


def open_backend(uri: StoreURI) -> Backend:
    """The backend for a storage URI. Touches nothing yet; of a path it asks which file system.

    Raises:
        UsageError: the scheme or an option is unknown.
    """
    if uri.scheme == "file":
        from ckptstore.backends.local import LocalBackend
        from ckptstore.backends.localfile import is_on_nfs

        if is_on_nfs(uri.path):
            from ckptstore.backends.nfs import NfsBackend

            return NfsBackend.from_uri(uri)
        return LocalBackend.from_uri(uri)
    if uri.scheme == "s3":
        try:
            from ckptstore.backends.s3 import S3Backend
        except ImportError as error:
            raise _missing("s3", error) from error

        return S3Backend.from_uri(uri)
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


def _missing(extra: str, error: ImportError) -> UsageError:
    return UsageError(
        f"{extra}:// needs the package {printable(error.name or str(error))!r}",
        hint=f"pip install 'ckptstore[{extra}]'",
    )

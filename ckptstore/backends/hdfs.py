"""``hdfs://namenode:port/path``: a store on HDFS, through hdfs-native or through libhdfs."""

from __future__ import annotations

from ckptstore.backends.hadoop import HadoopBackend
from ckptstore.backends.hadoopclient import HadoopClient, HadoopOptions, split_location
from ckptstore.errors import UsageError, printable
from ckptstore.uri import StoreURI

INSTALL = "pip install 'ckptstore[hdfs]'"

CLIENTS = ("native", "pyarrow")
"""What ``?client=`` can be; the first is the default."""


def from_uri(uri: StoreURI) -> HadoopBackend:
    """The backend that an ``hdfs`` URI names.

    Raises:
        UsageError: an option is unknown, or the client's package is not installed.
    """
    options = dict(uri.options)
    kind = options.pop("client", CLIENTS[0])
    if kind not in CLIENTS:
        raise UsageError(
            f"client={printable(kind)} is not known", hint=f"known: {', '.join(CLIENTS)}"
        )
    authority, root = split_location(uri)
    return HadoopBackend(_client(kind, authority, HadoopOptions.take(options, uri)), root)


def _client(kind: str, authority: str, options: HadoopOptions) -> HadoopClient:
    try:
        if kind == "native":
            from ckptstore.backends.hdfsnative import NativeClient

            return NativeClient(authority, options)
        from ckptstore.backends.hdfsarrow import ArrowClient
    except ImportError as error:
        package = "hdfs-native" if kind == "native" else "pyarrow"
        raise UsageError(
            f"a store on hdfs:// needs the package {package}, which is not installed",
            hint=INSTALL,
        ) from error
    return ArrowClient(authority, options)

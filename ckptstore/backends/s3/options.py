"""What a person can say about a bucket: ``s3://bucket/prefix?endpoint_url=…``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ckptstore.errors import UsageError, printable
from ckptstore.uri import StoreURI

DEFAULT_TIMEOUT = 60.0

_STYLES = ("path", "virtual", "auto")
_CHECKSUMS = ("auto", "crc64nvme", "md5")


@dataclass(frozen=True)
class S3Options:
    """Where the store is, and how it is talked to.

    Attributes:
        bucket: The bucket.
        prefix: What all keys begin with; empty, or with a slash at its end.
        endpoint_url: Another server than Amazon's; else the environment or the profile decides.
        region: The bucket's region; else the environment or the profile decides.
        profile: A profile of the AWS configuration files.
        anon: Read without credentials.
        addressing_style: ``path``, ``virtual`` or ``auto``; ``None`` is ``path`` for other servers.
        checksums: ``crc64nvme``, ``md5``, or ``auto``: the first where the server takes it.
        timeout: Seconds that one request may be silent.
        storage_class: Of what is stored.
        sse: ``AES256`` or ``aws:kms``; else the bucket's own setting.
        sse_kms_key_id: The key for ``aws:kms``.
    """

    bucket: str
    prefix: str
    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    anon: bool = False
    addressing_style: str | None = None
    checksums: str = "auto"
    timeout: float = DEFAULT_TIMEOUT
    storage_class: str | None = None
    sse: str | None = None
    sse_kms_key_id: str | None = None

    @classmethod
    def from_uri(cls, uri: StoreURI) -> S3Options:
        """The options of an ``s3`` URI.

        Raises:
            UsageError: one is unknown, or has a value that cannot be.
        """
        bucket, _, prefix = uri.path.partition("/")
        prefix = prefix.strip("/")
        if any(part in ("", ".", "..") for part in prefix.split("/")) and prefix:
            raise UsageError(f"{uri} names a prefix with an empty or a dotted segment")
        known: dict[str, Any] = dict(uri.options)
        unknown = sorted(
            set(known) - set(cls.__dataclass_fields__) | {"bucket", "prefix"} & set(known)
        )
        if unknown:
            names = [n for n in cls.__dataclass_fields__ if n not in ("bucket", "prefix")]
            raise UsageError(
                f"unknown option for an S3 store: {', '.join(map(printable, unknown))}",
                hint=f"known: {', '.join(names)}",
            )
        if "anon" in known:
            known["anon"] = _yes_or_no(known["anon"])
        if "timeout" in known:
            known["timeout"] = _seconds(known["timeout"])
        options = cls(bucket, f"{prefix}/" if prefix else "", **known)
        options._check()
        return options

    def _check(self) -> None:
        if self.addressing_style not in (None, *_STYLES):
            raise _unknown("addressing_style", self.addressing_style, _STYLES)
        if self.checksums not in _CHECKSUMS:
            raise _unknown("checksums", self.checksums, _CHECKSUMS)
        if self.sse_kms_key_id is not None and self.sse is None:
            raise UsageError("sse_kms_key_id needs sse=aws:kms beside it")
        if self.endpoint_url is not None:
            parts = urlsplit(self.endpoint_url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise UsageError("endpoint_url must be http://HOST:PORT or https://HOST[:PORT]")
            if parts.username or parts.password:
                raise UsageError(
                    "endpoint_url carries a user or a password",
                    hint="give credentials by the environment or the AWS configuration files",
                )


def _unknown(name: str, value: str | None, known: tuple[str, ...]) -> UsageError:
    return UsageError(
        f"{name}={printable(value or '')} is not known", hint=f"known: {', '.join(known)}"
    )


def _yes_or_no(value: str) -> bool:
    if value.lower() not in ("true", "false", "1", "0"):
        raise UsageError(f"anon={printable(value)} must be true or false")
    return value.lower() in ("true", "1")


def _seconds(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise UsageError(f"timeout={printable(value)} must be seconds from 0.1 to 3600")
    return seconds

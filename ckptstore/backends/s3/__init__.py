"""A store in a bucket of S3, or of a server that speaks its protocol."""

from __future__ import annotations

from ckptstore.backends.s3.backend import S3Backend

__all__ = ["S3Backend"]

"""What the answers and the silences of an S3 server mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from botocore import exceptions as boto

from ckptstore.errors import (
    AccessDeniedError,
    CkptError,
    ConflictError,
    IntegrityError,
    NoSpaceError,
    NotFoundError,
    PlaceNotFoundError,
    TemporaryError,
    UsageError,
    printable,
)

_DENIED = {
    "AccessDenied", "AccountProblem", "AllAccessDisabled", "ExpiredToken", "Forbidden",
    "InvalidAccessKeyId", "InvalidSecurity", "InvalidToken", "InvalidTokenId", "NotSignedUp",
    "SignatureDoesNotMatch", "TokenRefreshRequired", "UnauthorizedAccess",
}  # fmt: skip
_TEMPORARY = {
    "BadDigest", "ConditionalRequestConflict", "InternalError", "OperationAborted",
    "RequestTimeout", "RequestTimeoutException", "ServiceUnavailable", "SlowDown", "Throttling",
    "ThrottlingException", "TooManyRequests", "XAmzContentChecksumMismatch",
}  # fmt: skip
_FULL = {"InsufficientStorage", "QuotaExceeded", "StorageFull", "XMinioStorageFull"}
_REGION = {"AuthorizationHeaderMalformed", "IllegalLocationConstraintException",
           "PermanentRedirect", "TemporaryRedirect"}  # fmt: skip
_USAGE = {"InvalidBucketName", "InvalidStorageClass", "KeyTooLongError"}

_NO_CREDENTIALS = (
    boto.CredentialRetrievalError,
    boto.MetadataRetrievalError,
    boto.RefreshWithMFAUnsupportedError,
    boto.SSOTokenLoadError,
    boto.TokenRetrievalError,
    boto.UnauthorizedSSOTokenError,
)
_WRONG_CALL = (boto.InvalidRegionError, boto.NoRegionError, boto.ParamValidationError, ValueError)

_CREDENTIALS_HINT = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a profile with ?profile=…; "
    "?anon=true reads a public bucket"
)


def code_of(error: Exception) -> tuple[str, int]:
    """The code and the HTTP status of a server's refusal; ``("", 0)`` of anything else."""
    if not isinstance(error, boto.ClientError):
        return "", 0
    response: dict[str, Any] = error.response
    code = str(response.get("Error", {}).get("Code", ""))
    return code, int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) or 0)


def translate(error: Exception, what: str, bucket: str) -> CkptError:
    """The exception of ours that says what ``error`` means.

    Args:
        error: An error of botocore.
        what: The thing it happened to, as it should be named to a person.
        bucket: The bucket's name.
    """
    what = printable(what)
    if isinstance(error, boto.ClientError):
        return _refused(error, what, bucket)
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError):
        return AccessDeniedError(f"{what}: there are no credentials", hint=_CREDENTIALS_HINT)
    if isinstance(error, boto.ProfileNotFound | boto.ConfigParseError):
        return UsageError(f"{what}: {printable(str(error))}")
    if isinstance(error, _NO_CREDENTIALS):
        return AccessDeniedError(
            f"{what}: credentials could not be had: {printable(str(error))}",
            hint=_CREDENTIALS_HINT,
        )
    if isinstance(error, _WRONG_CALL):
        return UsageError(f"{what}: {printable(str(error).splitlines()[-1])}")
    if isinstance(error, boto.SSLError):
        return CkptError(f"{what}: TLS failed: {printable(str(error))}")
    # Connections that failed, broke, or were silent for too long, answers cut short.
    return TemporaryError(
        f"{what}: {_reason(error)}", hint="is the address right, and the server up? Then try again"
    )


def _reason(error: Exception) -> str:
    if isinstance(error, boto.ReadTimeoutError):
        return "the server did not answer in time"
    if isinstance(error, boto.ConnectTimeoutError):
        return "no connection to the server in time"
    if isinstance(error, boto.EndpointConnectionError):
        return "no connection to the server"
    if isinstance(error, boto.ProxyConnectionError):
        return "no connection to the proxy"
    if isinstance(error, boto.ConnectionClosedError):
        return "the server closed the connection"
    return printable(str(error))[:300] or type(error).__name__


def _refused(error: boto.ClientError, what: str, bucket: str) -> CkptError:
    code, status = code_of(error)
    said = printable(str(error.response.get("Error", {}).get("Message", "")))[:300]
    told = f"{what}: {said or 'refused'} ({printable(code) or status})"
    if code == "NoSuchBucket":
        return no_bucket(bucket)
    if code in _TOLD:
        return _TOLD[code](told)
    if status in _BY_STATUS:
        return _BY_STATUS[status](told)
    return TemporaryError(told) if status >= 500 else CkptError(told)


def no_bucket(bucket: str) -> PlaceNotFoundError:
    """There is none of this name."""
    return PlaceNotFoundError(
        f"there is no bucket {printable(bucket)!r} there",
        hint="make it first (ckptstore never does), or correct the name or the endpoint",
    )


def _denied(told: str) -> CkptError:
    return AccessDeniedError(told, hint="check the credentials and what they may do")


def _full(told: str) -> CkptError:
    return NoSpaceError(f"no space left: {told}")


def _elsewhere(told: str) -> CkptError:
    return UsageError(told, hint="name the bucket's region with ?region=…")


def _skewed(told: str) -> CkptError:
    return TemporaryError(told, hint="this machine's clock is wrong: set it")


def _archived(told: str) -> CkptError:
    return CkptError(told, hint="it was moved to an archive: restore it there first")


_TOLD: Mapping[str, Callable[[str], CkptError]] = {
    **dict.fromkeys(_DENIED, _denied),
    **dict.fromkeys(_TEMPORARY, TemporaryError),
    **dict.fromkeys(_FULL, _full),
    **dict.fromkeys(_REGION, _elsewhere),
    **dict.fromkeys(_USAGE, UsageError),
    "InvalidObjectState": _archived,
    "InvalidRange": IntegrityError,
    "NotImplemented": CkptError,
    "RequestTimeTooSkewed": _skewed,
}

_BY_STATUS: Mapping[int, Callable[[str], CkptError]] = {
    301: _elsewhere,
    307: _elsewhere,
    401: _denied,
    403: _denied,
    404: NotFoundError,
    412: ConflictError,
    429: TemporaryError,
    501: CkptError,
    507: _full,
}

"""What a bucket is set to, and how far its server keeps to the protocol: for ``ckpt doctor``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from botocore.exceptions import BotoCoreError, ClientError

from ckptstore.backends.base import Unfinished
from ckptstore.backends.findings import Finding, attempt
from ckptstore.backends.s3.client import S3Client
from ckptstore.backends.s3.failures import code_of
from ckptstore.errors import AccessDeniedError, ConflictError, TemporaryError, printable

if TYPE_CHECKING:
    from ckptstore.backends.s3.backend import S3Backend

ABANDONED_DAYS = 7
"""After so many days the rule that is proposed gives up an upload; a save must not take longer."""

OLD_VERSION_DAYS = 7
_NO_SUCH_SETTING = "the server knows no such setting"
_ARCHIVES = {"GLACIER", "DEEP_ARCHIVE"}

Rule = Mapping[str, Any]


class _UnknownError(Exception):
    """A setting cannot be read; the message says why."""


def describe(client: S3Client) -> Iterator[Finding]:
    """The bucket, and those of its settings that can lose checkpoints or never free space."""
    yield attempt("place", lambda: _place(client))
    try:
        rules: Sequence[Rule] | None = _rules(client)
        why = ""
    except _UnknownError as error:
        rules, why = None, str(error)
    wanted: list[Rule] = []
    yield attempt("versions", lambda: _versions(client, rules, wanted))
    if rules is None:
        yield Finding.skipped("lifecycle", why)
    else:
        yield _lifecycle(client, rules, wanted)
    yield attempt("object-lock", lambda: _lock(client))


def _place(client: S3Client) -> Finding:
    options = client.options
    below = f", below {printable(options.prefix)}" if options.prefix else ""
    return Finding.ok(
        "place",
        f"the bucket {printable(options.bucket)}{below} at {printable(client.endpoint)}, region "
        f"{printable(client.region)}, with {printable(client.identity)}",
    )


def _ask(client: S3Client, operation: str, none: str = "") -> dict[str, Any] | None:
    """The answer to a question about a setting of the bucket; ``None`` when it is not set.

    Args:
        client: The client of the bucket.
        operation: The question.
        none: The code of the answer that says that it is not set.

    Raises:
        _UnknownError: it may not be looked at, or the server knows of no such thing.
    """
    try:
        return client.raw(operation)
    except (BotoCoreError, ClientError) as error:
        code, status = code_of(error)
        if code == none:
            return None
        meaning = client.meaning(error, None)
        if isinstance(meaning, AccessDeniedError):
            raise _UnknownError("these credentials may not look at it") from error
        if status in (400, 404, 405, 501) or code == "NotImplemented":
            raise _UnknownError(_NO_SUCH_SETTING) from error
        if isinstance(meaning, TemporaryError) and status:  # it answers, though not this
            raise _UnknownError(f"the server could not tell: {meaning}") from error
        raise meaning from error


def _rules(client: S3Client) -> list[Rule]:
    answer = _ask(client, "get_bucket_lifecycle_configuration", "NoSuchLifecycleConfiguration")
    if answer is None:
        return []
    if "Rules" not in answer:  # some servers answer another question
        raise _UnknownError(_NO_SUCH_SETTING)
    return [_modern(rule) for rule in answer["Rules"]]


def _modern(rule: Rule) -> Rule:
    """A rule whose prefix stands in its filter, as all of them must as soon as one does."""
    changed = dict(rule)
    prefix = changed.pop("Prefix", None)
    if "Filter" not in changed:
        changed["Filter"] = {"Prefix": prefix or ""}
    return changed


def _prefix(rule: Rule) -> str:
    chosen = rule["Filter"]
    return str(chosen.get("Prefix") or chosen.get("And", {}).get("Prefix") or "")


def _is_for_tags(rule: Rule) -> bool:
    """Whether it is only about objects with a tag, which ours have not."""
    chosen = rule["Filter"]
    return "Tag" in chosen or bool(chosen.get("And", {}).get("Tags"))


def _in_force(client: S3Client, rules: Sequence[Rule], *, whole: bool) -> list[Rule]:
    """The rules that apply to the whole of the store, or to anything in it."""
    ours = client.options.prefix
    return [
        rule
        for rule in rules
        if rule.get("Status") == "Enabled"
        and not _is_for_tags(rule)
        and (
            ours.startswith(_prefix(rule)) or (not whole and _prefix(rule).startswith(ours))
        )
    ]  # fmt: skip


def _versions(client: S3Client, rules: Sequence[Rule] | None, wanted: list[Rule]) -> Finding:
    check = "versions"
    try:
        status = (_ask(client, "get_bucket_versioning") or {}).get("Status")
    except _UnknownError as error:
        return Finding.skipped(check, str(error))
    if status != "Enabled":
        return Finding.ok(check, "the bucket keeps no old versions: what is deleted is gone")
    ending = [
        rule
        for rule in _in_force(client, rules or (), whole=True)
        if "NoncurrentVersionExpiration" in rule
    ]
    if ending:
        days = ending[0]["NoncurrentVersionExpiration"].get("NoncurrentDays", 0)
        return Finding.ok(check, f"the bucket keeps old versions, and ends them after {days} days")
    detail = "the bucket keeps every version for ever: deleting checkpoints frees no space"
    if rules is None:
        return Finding.warning(check, detail, "set a lifecycle rule that ends old versions")
    wanted.append(
        _rule(
            client,
            "end-old-versions",
            NoncurrentVersionExpiration={"NoncurrentDays": OLD_VERSION_DAYS},
            Expiration={"ExpiredObjectDeleteMarker": True},
        )
    )
    return Finding.warning(check, detail, "add the rule that is shown for `lifecycle`")


def _rule(client: S3Client, name: str, **actions: Any) -> Rule:
    chosen = {"Prefix": client.options.prefix}
    return {"ID": f"ckptstore-{name}", "Status": "Enabled", "Filter": chosen, **actions}


def _lifecycle(client: S3Client, rules: Sequence[Rule], wanted: list[Rule]) -> Finding:
    check = "lifecycle"
    touching = _in_force(client, rules, whole=False)
    for rule in touching:
        name = printable(str(rule.get("ID") or "without a name"))
        expiry = rule.get("Expiration", {})
        if "Days" in expiry or "Date" in expiry:
            when = f"after {expiry['Days']} days" if "Days" in expiry else f"at {expiry['Date']}"
            return Finding.failed(
                check,
                f"the bucket's rule {name} deletes objects of this store {when}",
                "limit that rule to another prefix: ckpt gc frees what is no longer needed",
            )
    for rule in touching:
        moved = {t.get("StorageClass") for t in rule.get("Transitions", ())} & _ARCHIVES
        if moved:
            name = printable(str(rule.get("ID") or "without a name"))
            return Finding.warning(
                check,
                f"the bucket's rule {name} moves objects of this store into an archive",
                "a checkpoint there cannot be read before it was restored: limit the rule",
            )
    covering = _in_force(client, rules, whole=True)
    if not any("AbortIncompleteMultipartUpload" in rule for rule in covering):
        wanted.append(
            _rule(
                client,
                "end-abandoned-uploads",
                AbortIncompleteMultipartUpload={"DaysAfterInitiation": ABANDONED_DAYS},
            )
        )
        detail = "no rule ends uploads that nobody finished; they take space and no listing shows"
        detail += " them"
        hint = "ckpt gc collects those of its runs; a rule of the bucket also finds the rest"
    elif wanted:
        detail, hint = "a rule for old versions is missing", "it is in the command"
    else:
        return Finding.ok(check, "the bucket's rules end abandoned uploads, and delete nothing")
    return Finding(check, "warning", detail, hint, command=_command(client, [*rules, *wanted]))


def _command(client: S3Client, rules: Sequence[Rule]) -> str:
    """The command that sets the rules: all of them, because it replaces those that are there."""
    options = client.options
    endpoint = (
        f"--endpoint-url {shlex.quote(options.endpoint_url)} " if options.endpoint_url else ""
    )
    document = json.dumps({"Rules": list(rules)}, default=str, ensure_ascii=False)
    return (
        f"aws {endpoint}s3api put-bucket-lifecycle-configuration --bucket "
        f"{shlex.quote(options.bucket)} --lifecycle-configuration {shlex.quote(document)}"
    )


def _lock(client: S3Client) -> Finding:
    check = "object-lock"
    try:
        answer = _ask(
            client, "get_object_lock_configuration", "ObjectLockConfigurationNotFoundError"
        )
    except _UnknownError as error:
        return Finding.skipped(check, str(error))
    if answer is not None and "ObjectLockConfiguration" not in answer:
        return Finding.skipped(check, _NO_SUCH_SETTING)
    kept = (answer or {}).get("ObjectLockConfiguration", {}).get("Rule", {}).get("DefaultRetention")
    if not kept:
        return Finding.ok(check, "nothing keeps objects from being deleted")
    unit = "Years" if "Years" in kept else "Days"
    return Finding.warning(
        check,
        f"the bucket keeps every object for {kept.get(unit)} {unit.lower()} ({kept.get('Mode')})",
        "deleted checkpoints take space for as long; leases and temporaries do too",
    )


def examine(backend: S3Backend, scratch: str) -> Iterator[Finding]:
    """Conditional deletion, and the list of unfinished uploads, tried out."""
    yield attempt("conditional-delete", lambda: _conditional_delete(backend, f"{scratch}/deleted"))
    yield attempt("unfinished", lambda: _unfinished(backend, scratch))


def _conditional_delete(backend: S3Backend, key: str) -> Finding:
    check = "conditional-delete"
    backend.put(key, b"x")
    try:
        backend.client.raw("delete_object", key, IfMatch=f'"{"0" * 32}"')
    except (BotoCoreError, ClientError) as error:
        meaning = backend.client.meaning(error, key)
        if isinstance(meaning, ConflictError):
            return Finding.ok(check, "the server deletes an object only if it is the expected one")
        if code_of(error)[1] not in (400, 405, 501):
            raise meaning from error
        told = "the server does not know conditions on deletes"
    else:
        told = "the server deletes whatever the condition on it says"
    return Finding.warning(
        check,
        told,
        "delete and undelete of one checkpoint by two people in the same second can undo each "
        "other; all else is safe",
    )


def _unfinished(backend: S3Backend, scratch: str) -> Finding:
    check, key = "unfinished", f"{scratch}/unfinished"
    token = backend.client.call("create_multipart_upload", key)["UploadId"]
    try:
        shown = token in {upload.token for upload in backend.unfinished(scratch)}
    finally:
        backend.discard_unfinished([Unfinished(key, 0.0, token)])
    if not shown:
        return Finding.warning(
            check,
            "the server does not list unfinished uploads, so ckpt gc cannot collect them",
            "have the server end them after some days",
        )
    if token in {upload.token for upload in backend.unfinished(scratch)}:
        return Finding.failed(check, "an upload that was given up is still there")
    return Finding.ok(check, "uploads that nobody finished are listed, and can be given up")

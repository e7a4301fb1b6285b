"""What a bucket's settings mean for a store: answers of S3, and of servers that know them not."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from botocore.exceptions import ClientError

from ckptstore.backends.findings import Finding
from ckptstore.backends.s3 import examining
from ckptstore.backends.s3.client import S3Client
from ckptstore.backends.s3.options import S3Options


def refusal(code: str, status: int) -> ClientError:
    """What botocore raises for an answer with an error."""
    return ClientError(
        {"Error": {"Code": code, "Message": code}, "ResponseMetadata": {"HTTPStatusCode": status}},
        "operation",
    )


_NONE = {
    "get_bucket_versioning": {},
    "get_bucket_lifecycle_configuration": refusal("NoSuchLifecycleConfiguration", 404),
    "get_object_lock_configuration": refusal("ObjectLockConfigurationNotFoundError", 404),
}


class Bucket(S3Client):
    """A bucket whose settings are given."""

    def __init__(self, answers: dict[str, Any]) -> None:
        super().__init__(S3Options("bucket", "ckpts/", region="eu-north-1", anon=True))
        self.answers = {**_NONE, **answers}

    def raw(self, operation: str, key: str | None = None, **parameters: Any) -> dict[str, Any]:
        answer = self.answers[operation]
        if isinstance(answer, Exception):
            raise answer
        return {"ResponseMetadata": {}, **answer}


def found_in(**answers: Any) -> dict[str, Finding]:
    """The findings, by check."""
    return {f.check: f for f in examining.describe(Bucket(answers))}


def rules(*given: dict[str, Any]) -> dict[str, Any]:
    """An answer with these rules, in force."""
    return {
        "get_bucket_lifecycle_configuration": {
            "Rules": [{"Status": "Enabled", "ID": f"rule{i}", **r} for i, r in enumerate(given)]
        }
    }


def proposed(found: Finding) -> list[dict[str, Any]]:
    """The rules that the proposed command sets."""
    words = shlex.split(found.command or "")
    assert words[:1] == ["aws"]
    assert "put-bucket-lifecycle-configuration" in words
    made: list[dict[str, Any]] = json.loads(words[-1])["Rules"]
    return made


ENDS_UPLOADS = {"AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 3}}
ENDS_VERSIONS = {"NoncurrentVersionExpiration": {"NoncurrentDays": 3}}


def test_the_place_is_named() -> None:
    detail = found_in()["place"].detail
    for part in ("bucket", "ckpts/", "eu-north-1", "no credentials"):
        assert part in detail


def test_without_a_rule_for_abandoned_uploads_one_is_proposed() -> None:
    found = found_in()
    assert found["versions"].verdict == found["object-lock"].verdict == "ok"
    assert found["lifecycle"].verdict == "warning"
    (rule,) = proposed(found["lifecycle"])
    assert rule["Filter"] == {"Prefix": "ckpts/"}
    assert rule["AbortIncompleteMultipartUpload"]["DaysAfterInitiation"] > 0
    assert "Expiration" not in rule


@pytest.mark.parametrize(
    "where", [{"Filter": {}}, {"Filter": {"Prefix": "ck"}}, {"Prefix": "ckpts/"}, {"Prefix": ""}]
)
def test_a_rule_that_ends_abandoned_uploads_is_enough(where: dict[str, Any]) -> None:
    assert found_in(**rules({**where, **ENDS_UPLOADS}))["lifecycle"].verdict == "ok"


@pytest.mark.parametrize(
    "where",
    [
        {"Filter": {"Prefix": "other/"}},
        {"Filter": {"Prefix": "ckpts/run/"}},
        {"Filter": {}, "Status": "Disabled"},
        {"Filter": {"Tag": {"Key": "a", "Value": "b"}}},
    ],
)
def test_a_rule_for_something_else_is_not(where: dict[str, Any]) -> None:
    found = found_in(**rules({**where, **ENDS_UPLOADS}))["lifecycle"]
    assert found.verdict == "warning"
    old, new = proposed(found)  # the command replaces what is there, so it repeats it
    assert (old["ID"], new["Filter"]) == ("rule0", {"Prefix": "ckpts/"})


def test_an_old_rule_is_repeated_in_the_new_form() -> None:
    old, new = proposed(found_in(**rules({"Prefix": "x/", **ENDS_UPLOADS}))["lifecycle"])
    assert "Prefix" not in old
    assert old["Filter"] == {"Prefix": "x/"}
    assert set(new) == {"ID", "Status", "Filter", "AbortIncompleteMultipartUpload"}


@pytest.mark.parametrize(
    "rule",
    [
        {"Filter": {}, "Expiration": {"Days": 30}},
        {"Filter": {"Prefix": "ckpts/run/"}, "Expiration": {"Days": 30}},
        {"Prefix": "", "Expiration": {"Date": "2030-01-01"}},
        {
            "Filter": {"And": {"Prefix": "ck", "ObjectSizeGreaterThan": 1}},
            "Expiration": {"Days": 1},
        },
    ],
)
def test_a_rule_that_deletes_checkpoints_is_a_failure(rule: dict[str, Any]) -> None:
    found = found_in(**rules({"Filter": {}, **ENDS_UPLOADS}, rule))["lifecycle"]
    assert (found.verdict, found.exit_code) == ("failed", 1)
    assert "rule1" in found.detail


@pytest.mark.parametrize(
    "rule",
    [
        {"Filter": {"Prefix": "logs/"}, "Expiration": {"Days": 30}},
        {"Filter": {}, "Expiration": {"ExpiredObjectDeleteMarker": True}},
        {"Filter": {"Tag": {"Key": "tmp", "Value": "1"}}, "Expiration": {"Days": 1}},
        {"Filter": {}, "Expiration": {"Days": 30}, "Status": "Disabled"},
        {"Filter": {}, "Transitions": [{"Days": 30, "StorageClass": "STANDARD_IA"}]},
    ],
)
def test_a_rule_that_deletes_no_checkpoint_is_none(rule: dict[str, Any]) -> None:
    assert found_in(**rules({"Filter": {}, **ENDS_UPLOADS}, rule))["lifecycle"].verdict == "ok"


def test_a_rule_that_archives_checkpoints_is_a_warning() -> None:
    rule = {"Filter": {}, "Transitions": [{"Days": 30, "StorageClass": "GLACIER"}]}
    found = found_in(**rules({"Filter": {}, **ENDS_UPLOADS}, rule))["lifecycle"]
    assert found.verdict == "warning"
    assert "archive" in found.detail


def test_a_bucket_that_keeps_every_version_never_frees_space() -> None:
    versioned = {"get_bucket_versioning": {"Status": "Enabled"}}
    found = found_in(**versioned)
    assert found["versions"].verdict == "warning"
    ending, abandoned = proposed(found["lifecycle"])
    assert ending["NoncurrentVersionExpiration"]["NoncurrentDays"] > 0
    assert ending["Expiration"] == {"ExpiredObjectDeleteMarker": True}
    assert "AbortIncompleteMultipartUpload" in abandoned

    found = found_in(**versioned, **rules({"Filter": {}, **ENDS_UPLOADS}))
    assert (found["versions"].verdict, found["lifecycle"].verdict) == ("warning", "warning")
    assert len(proposed(found["lifecycle"])) == 2

    found = found_in(**versioned, **rules({"Filter": {}, **ENDS_UPLOADS, **ENDS_VERSIONS}))
    assert (found["versions"].verdict, found["lifecycle"].verdict) == ("ok", "ok")
    assert "after 3 days" in found["versions"].detail

    suspended = {"get_bucket_versioning": {"Status": "Suspended"}}
    assert found_in(**suspended)["versions"].verdict == "ok"


def test_retention_is_a_warning() -> None:
    kept = {"Rule": {"DefaultRetention": {"Mode": "COMPLIANCE", "Days": 30}}}
    found = found_in(get_object_lock_configuration={"ObjectLockConfiguration": kept})
    assert found["object-lock"].verdict == "warning"
    assert "30 days (COMPLIANCE)" in found["object-lock"].detail
    none = {"ObjectLockConfiguration": {"ObjectLockEnabled": "Enabled"}}
    assert found_in(get_object_lock_configuration=none)["object-lock"].verdict == "ok"


@pytest.mark.parametrize(
    "answer",
    [
        refusal("AccessDenied", 403),
        refusal("NotImplemented", 501),
        refusal("MethodNotAllowed", 405),
        refusal("InternalError", 500),
    ],
)
def test_settings_that_cannot_be_looked_at_are_skipped(answer: ClientError) -> None:
    found = found_in(**dict.fromkeys(_NONE, answer))
    assert {c: f.verdict for c, f in found.items()} == {
        "place": "ok",
        "versions": "skipped",
        "lifecycle": "skipped",
        "object-lock": "skipped",
    }


def test_versions_are_told_also_where_rules_are_secret() -> None:
    found = found_in(
        get_bucket_versioning={"Status": "Enabled"},
        get_bucket_lifecycle_configuration=refusal("AccessDenied", 403),
    )
    assert (found["versions"].verdict, found["lifecycle"].verdict) == ("warning", "skipped")


def test_an_answer_to_another_question_is_not_believed() -> None:
    found = found_in(get_bucket_lifecycle_configuration={}, get_object_lock_configuration={})
    assert (found["lifecycle"].verdict, found["object-lock"].verdict) == ("skipped", "skipped")

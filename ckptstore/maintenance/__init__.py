"""Keeping a store sound: verification and the collection of what nothing needs any more."""

from __future__ import annotations

from ckptstore.maintenance.gc import GcAction, GcResult, gc
from ckptstore.maintenance.plan import VerifyPlan, verify_plan
from ckptstore.maintenance.verify import CheckResult, verify, verify_run

__all__ = [
    "CheckResult",
    "GcAction",
    "GcResult",
    "VerifyPlan",
    "gc",
    "verify",
    "verify_plan",
    "verify_run",
]

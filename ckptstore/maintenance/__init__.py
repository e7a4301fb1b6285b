"""Keeping a store sound: verification, repair, collecting what nothing needs any more."""

from __future__ import annotations

from ckptstore.maintenance.gc import GcAction, GcResult, gc
from ckptstore.maintenance.marker import restore_marker
from ckptstore.maintenance.plan import VerifyPlan, verify_plan
from ckptstore.maintenance.repair import (
    Fixed,
    RepairResult,
    repair,
    repair_name,
    repair_run,
)
from ckptstore.maintenance.verify import CheckResult, verify, verify_run

__all__ = [
    "CheckResult",
    "Fixed",
    "GcAction",
    "GcResult",
    "RepairResult",
    "VerifyPlan",
    "gc",
    "repair",
    "repair_name",
    "repair_run",
    "restore_marker",
    "verify",
    "verify_plan",
    "verify_run",
]

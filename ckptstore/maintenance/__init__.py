"""Keeping a store sound: verify, repair, retention, collecting what nothing needs any more."""

from __future__ import annotations

from ckptstore.maintenance.gc import GcAction, GcResult, gc
from ckptstore.maintenance.marker import restore_marker
from ckptstore.maintenance.plan import VerifyPlan, verify_plan
from ckptstore.maintenance.policy import Policy, configured_policy
from ckptstore.maintenance.repair import (
    Fixed,
    RepairResult,
    repair,
    repair_name,
    repair_run,
)
from ckptstore.maintenance.retention import PrunePlan, PruneResult, carry_out, plan_prune, prune
from ckptstore.maintenance.verify import CheckResult, verify, verify_run

__all__ = [
    "CheckResult",
    "Fixed",
    "GcAction",
    "GcResult",
    "Policy",
    "PrunePlan",
    "PruneResult",
    "RepairResult",
    "VerifyPlan",
    "carry_out",
    "configured_policy",
    "gc",
    "plan_prune",
    "prune",
    "repair",
    "repair_name",
    "repair_run",
    "restore_marker",
    "verify",
    "verify_plan",
    "verify_run",
]

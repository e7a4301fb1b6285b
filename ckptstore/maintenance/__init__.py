"""Keeping a store sound: verification, retention, and collecting what nothing needs any more."""

from __future__ import annotations

from ckptstore.maintenance.gc import GcAction, GcResult, gc
from ckptstore.maintenance.policy import Policy, configured_policy
from ckptstore.maintenance.retention import PrunePlan, PruneResult, carry_out, plan_prune, prune
from ckptstore.maintenance.verify import CheckResult, verify, verify_run

__all__ = [
    "CheckResult",
    "GcAction",
    "GcResult",
    "Policy",
    "PrunePlan",
    "PruneResult",
    "carry_out",
    "configured_policy",
    "gc",
    "plan_prune",
    "prune",
    "verify",
    "verify_run",
]

"""``ckpt prune``"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.options import (
    DryRunOption,
    JsonOption,
    QuietOption,
    StoreOption,
    YesOption,
    command,
    store_and_run,
)

if TYPE_CHECKING:
    from ckptstore.maintenance import Policy, PrunePlan, PruneResult
    from ckptstore.store import Store
    from cli.output import Output


def _count(name: str, help: str, least: int = 1) -> Any:
    return typer.Option(name, metavar="N", min=least, help=help, show_default=False)


@command
def prune(
    first: Annotated[
        str | None, typer.Argument(metavar="[STORE]", help="The store.", show_default=False)
    ] = None,
    second: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Only this run.", show_default=False)
    ] = None,
    keep_last: Annotated[int | None, _count("--keep-last", "The newest N.")] = None,
    keep_every: Annotated[int | None, _count("--keep-every", "Steps that N divides.")] = None,
    keep_best: Annotated[int | None, _count("--keep-best", "The N best.")] = None,
    keep_within: Annotated[
        str | None,
        typer.Option("--keep-within", metavar="TIME", help="Those of the last TIME: 36h, 7d."),
    ] = None,
    keep_hourly: Annotated[
        int | None, _count("--keep-hourly", "The newest of each of the last N hours that have one.")
    ] = None,
    keep_daily: Annotated[int | None, _count("--keep-daily", "The same for days.")] = None,
    keep_weekly: Annotated[int | None, _count("--keep-weekly", "The same for weeks.")] = None,
    keep_monthly: Annotated[int | None, _count("--keep-monthly", "The same for months.")] = None,
    keep_tag: Annotated[
        list[str] | None,
        typer.Option("--keep-tag", metavar="GLOB", help="Those with such a tag. Repeatable."),
    ] = None,
    max_size: Annotated[
        str | None,
        typer.Option("--max-size", metavar="SIZE", help="At most so much a run: 500GiB, 1.5TB."),
    ] = None,
    owed_limit: Annotated[
        int | None, _count("--owed-limit", "Hold back at most N for mirrors that lack them.", 0)
    ] = None,
    grace: Annotated[
        str | None,
        typer.Option("--grace", metavar="TIME", help="Keep what is deleted in the trash so long."),
    ] = None,
    max_delete: Annotated[
        int | None, _count("--max-delete", "Delete nothing if more than N would go.", 0)
    ] = None,
    damaged: Annotated[
        bool, typer.Option("--damaged", help="Delete damaged checkpoints too.")
    ] = False,
    store: StoreOption = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Delete the checkpoints of a run that no rule keeps, and free their space.

    What one --keep rule keeps stays. So do the newest, the best, the last verified and pinned ones,
    whatever the rules say, and up to --owed-limit that a mirror lacks. Without rules those of
    ckpt.toml count, each for the runs that its pattern fits.
    """
    from ckptstore.maintenance.retention import carry_out, check_count, plan_prune
    from cli.output import Output

    out = Output(json, quiet)
    given = {
        "keep_last": keep_last,
        "keep_every": keep_every,
        "keep_best": keep_best,
        "keep_within": _seconds(keep_within),
        "keep_hourly": keep_hourly,
        "keep_daily": keep_daily,
        "keep_weekly": keep_weekly,
        "keep_monthly": keep_monthly,
        "keep_tag": tuple(keep_tag) if keep_tag else None,
        "max_size": _bytes(max_size),
    }
    besides = {"owed_limit": owed_limit, "grace": _seconds(grace)}
    opened, run = store_and_run(first, second, store)
    policies = _policies(opened, run, given, besides, out)
    plans = [plan_prune(opened, one, policy, damaged=damaged) for one, policy in policies.items()]
    count = sum(len(plan.deleted) for plan in plans)
    check_count(count, max_delete)
    asks = bool(count) and not dry_run and not yes and _interactive()
    if asks:
        if not json and not quiet:
            _show(out, plans, "to delete")
        typer.confirm(f"delete {count} of {_total(plans)}?", abort=True, err=True)
    if dry_run:
        _report(out, plans, dry_run=True, table=True)
        return
    _report(out, [carry_out(opened, plan) for plan in plans], dry_run=False, table=not asks)


def _seconds(text: str | None) -> float | None:
    from ckptstore.durations import parse_duration

    return None if text is None else parse_duration(text)


def _bytes(text: str | None) -> int | None:
    from ckptstore.sizes import parse_size

    return None if text is None else parse_size(text)


def _policies(
    store: Store, run: str | None, given: dict[str, Any], besides: dict[str, Any], out: Output
) -> dict[str, Policy]:
    """The policy of each run that is meant: the options', else that of ``ckpt.toml``.

    Raises:
        UsageError: there is none for any of them.
    """
    from dataclasses import replace

    from ckptstore.errors import UsageError
    from ckptstore.maintenance.policy import RULES, Policy, configured_policy

    options = {key: value for key, value in given.items() if value is not None}
    others = {key: value for key, value in besides.items() if value is not None}
    if run is not None:
        store.catalog.require_run(run)
    runs = [run] if run is not None else store.runs()
    if options:
        return dict.fromkeys(runs, Policy(**options, **others))
    found = {one: policy for one in runs if (policy := configured_policy(one)) is not None}
    if not found:
        names = ", ".join(f"--{rule.replace('_', '-')}" for rule in RULES)
        which = f"run {run!r}" if run is not None else "any run"
        raise UsageError(
            f"no rule says what to keep, and ckpt.toml has no [retention] for {which}",
            hint=f"give one or more of {names}",
        )
    for one in runs:
        if one not in found:
            out.note(f"{one}: ckpt.toml has no [retention] for it, so all of it stays")
    return {one: replace(policy, **others) for one, policy in found.items()}


def _interactive() -> bool:
    from cli.output import is_terminal

    return is_terminal(sys.stdin) and is_terminal(sys.stderr)


def _total(plans: Sequence[PrunePlan]) -> str:
    from cli.output import plural

    return plural(sum(len(plan.decisions) for plan in plans), "checkpoint")


def _show(out: Output, plans: Sequence[PrunePlan], verb: str) -> None:
    """The table: what stays and what goes, each with its reasons."""
    from cli.output import ago, is_terminal, size, when

    spell = ago if is_terminal(sys.stdout) else when
    rows = [
        [
            plan.refs[d.name],
            "kept" if d.keep else verb,
            size(d.candidate.size) if d.candidate.readable else "-",
            spell(d.candidate.created or None),
            ", ".join(d.reasons),
        ]
        for plan in plans
        for d in plan.decisions
    ]
    if rows:
        out.table(("REF", "FATE", "SIZE", "SAVED", "WHY"), rows, right=("SIZE", "SAVED"))


def _report(
    out: Output, plans: Sequence[PrunePlan | PruneResult], *, dry_run: bool, table: bool
) -> None:
    from cli.output import size

    freed = sum(getattr(plan, "freed", 0) for plan in plans)
    if out.json:
        out.document([_as_json(plan, dry_run) for plan in plans])
    elif not out.quiet:
        if table:
            _show(out, plans, "would go" if dry_run else "deleted")
        gone = [d for plan in plans for d in plan.deleted]
        amount = f"{len(gone)} of {_total(plans)}, {size(sum(d.candidate.size for d in gone))}"
        if not gone:
            out.note(f"nothing goes: {_total(plans)} stay")
        elif dry_run:
            out.note(f"would delete {amount}")
        else:
            out.note(f"deleted {amount}; {size(freed)} freed")
        if gone and any(plan.policy.grace for plan in plans):
            out.note("they stay in the trash until their grace period is over (ckpt undelete)")
    for plan in plans:
        for text in plan.warnings:
            _warn(text)


def _warn(text: str) -> None:
    """What has to be said even with ``--quiet``: cron sends it on."""
    from ckptstore.errors import printable

    print(f"warning: {printable(text)}", file=sys.stderr)


def _as_json(plan: PrunePlan | PruneResult, dry_run: bool) -> dict[str, Any]:
    def rows(keep: bool) -> list[dict[str, Any]]:
        return [
            {
                "ref": plan.refs[d.name],
                "name": str(d.name),
                "step": d.name.step,
                "bytes": d.candidate.size,
                "reasons": list(d.reasons),
            }
            for d in plan.decisions
            if d.keep is keep
        ]

    return {
        "run": plan.run,
        "kept": rows(True),
        "deleted": rows(False),
        "freed_bytes": getattr(plan, "freed", 0),
        "warnings": list(plan.warnings),
        "dry_run": dry_run,
    }

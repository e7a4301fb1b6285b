"""``ckpt resume-info``"""

from __future__ import annotations

from typing import Annotated

import typer

from cli.options import JsonOption, QuietOption, RefArgument, StoreOption, command, open_ref


@command
def resume_info(
    ref: RefArgument,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read all of each candidate, not only its sizes.")
    ] = False,
    store: StoreOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Say which checkpoint a resume would take, and why newer ones were passed over.

    RUN@latest falls back to the newest intact one; any other REF means just that checkpoint. When
    there are checkpoints and none is intact the exit code is 5: do not start from scratch then.
    """
    from ckptstore.resume import plan_from
    from cli.output import Output

    out = Output(json, quiet)
    opened, parsed = open_ref(ref, store)
    plan = plan_from(opened, parsed, deep=deep)
    chosen = plan.chosen
    if json:
        out.document(
            {
                "run": plan.run,
                "ref": chosen.ref if chosen else None,
                "name": str(chosen.name) if chosen else None,
                "step": chosen.step if chosen else None,
                "commits": plan.commits,
                "passed_over": [
                    {
                        "name": str(p.name),
                        "step": p.name.step,
                        "reason": p.reason,
                        "repair": p.repair,
                    }
                    for p in plan.passed_over
                ],
            }
        )
    for passed in plan.passed_over:
        out.line(f"passed over {plan.run}@{passed.name.step} ({passed.name}): {passed.reason}")
        if passed.repair is not None:
            out.note(f"repair it: {passed.repair}")
    if chosen is not None:
        out.line(f"a resume takes {chosen.ref} ({chosen.name})")
    plan.require()

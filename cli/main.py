"""The ``ckpt`` command: every subcommand is a module; each loads what it needs when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from cli import (
    backup,
    deleting,
    diff,
    doctor,
    listing,
    marking,
    mirror,
    prune,
    pull,
    push,
    repair,
    resume_info,
    schedule,
    setup,
    show,
    status,
    verify,
)
from cli.completion import rejoin_words

rejoin_words()
app = typer.Typer(
    name="ckpt",
    help="A checkpoint store that does not lose checkpoints.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        from ckptstore.version import __version__

        print(f"ckpt {__version__}")
        raise typer.Exit


@app.callback(
    epilog="Exit codes: 0 ok, 1 error or different, 2 usage, 3 partial, 4 not found, 5 integrity, "
    "6 conflict, 7 access denied, 8 temporary, 130/143 signal."
)
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="The version.")
    ] = False,
) -> None:
    """A checkpoint store that does not lose checkpoints."""
    del version


_COMMANDS = (
    ("push", push.push, "ckpt push ./out /data/ckpts/gsm8k@500 --metric reward=0.41"),
    ("pull", pull.pull, "ckpt pull /data/ckpts/gsm8k@latest ./restored"),
    ("list", listing.list_checkpoints, "ckpt list /data/ckpts gsm8k"),
    ("show", show.show, "ckpt show /data/ckpts/gsm8k@500"),
    ("diff", diff.diff, "ckpt diff gsm8k@400 gsm8k@500 --store /data/ckpts"),
    ("verify", verify.verify, "ckpt verify /data/ckpts/gsm8k@500 --deep"),
    ("repair", repair.repair, "ckpt repair /data/ckpts/gsm8k@500 --from s3://bucket/ckpts"),
    ("delete", deleting.delete, "ckpt delete /data/ckpts/gsm8k@100"),
    ("undelete", deleting.undelete, "ckpt undelete /data/ckpts/gsm8k@100"),
    ("pin", marking.pin, "ckpt pin /data/ckpts/gsm8k@500"),
    ("tag", marking.tag, "ckpt tag /data/ckpts/gsm8k@500 release"),
    ("prune", prune.prune, "ckpt prune /data/ckpts gsm8k --keep-last 3 --keep-best 1 --dry-run"),
    ("gc", deleting.gc, "ckpt gc /data/ckpts --dry-run"),
    ("mirror", mirror.mirror, "ckpt mirror /data/ckpts s3://bucket/ckpts"),
    ("status", status.status, "ckpt status /data/ckpts --max-lag 2h"),
    ("backup", backup.backup, "ckpt backup nightly --quiet"),
    ("resume-info", resume_info.resume_info, "ckpt resume-info /data/ckpts/gsm8k@latest"),
    ("doctor", doctor.doctor, "ckpt doctor /data/ckpts"),
    ("init", setup.init, "ckpt init /data/ckpts"),
    ("config", setup.config, "CKPT_STORE=/data/ckpts ckpt config"),
)

for _name, _function, _example in _COMMANDS:
    app.command(_name, epilog=f"Example: {_example}")(_function)

app.add_typer(schedule.app, name="schedule")

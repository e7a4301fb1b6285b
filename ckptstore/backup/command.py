"""The command line that a scheduler runs, and the environment that it needs.

cron and systemd start a job with a bare environment in another directory, so the line names
everything: the program by its path, the directory of ckpt.toml, and the settings that are in force
where the schedule is installed. Secrets are never among them: they belong into the file of
secrets, which the job reads itself.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptstore.backup.jobs import Job
from ckptstore.backup.secretfile import is_secret_name, is_secret_url
from ckptstore.config import load_settings
from ckptstore.errors import NotFoundError, UsageError, printable

_KEPT = re.compile(
    r"AWS_(PROFILE|DEFAULT_PROFILE|REGION|DEFAULT_REGION|ENDPOINT_URL\w*|CONFIG_FILE|"
    r"SHARED_CREDENTIALS_FILE|CA_BUNDLE)|HADOOP_\w+|JAVA_HOME|KRB5_CONFIG|KRB5CCNAME|"
    r"XDG_CONFIG_HOME|XDG_STATE_HOME|PYTHONPATH|SSL_CERT_FILE|REQUESTS_CA_BUNDLE|"
    r"(HTTPS?|NO)_PROXY|(https?|no)_proxy"
)
_SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_SYSTEM_PATH = ("/usr/local/bin", "/usr/bin", "/bin")


@dataclass(frozen=True)
class JobCommand:
    """What a scheduler runs.

    Attributes:
        program: The path of ``ckpt``.
        arguments: Its arguments.
        directory: Where.
        environment: With these variables, PATH among them.
        short_path: A PATH that will do where there is no room for a long one.
        left_out: Variables that are set here, may be needed, and are secrets.
    """

    program: str
    arguments: tuple[str, ...]
    directory: str
    environment: Mapping[str, str]
    short_path: str
    left_out: tuple[str, ...]


def command_for(job: Job, environment: Mapping[str, str] | None = None) -> JobCommand:
    """The command that runs a job from anywhere.

    Args:
        job: The job.
        environment: What is in force here; this process's by default.

    Raises:
        NotFoundError: ``ckpt`` is not where it must be.
        UsageError: a path holds a line break.
    """
    environment = os.environ if environment is None else environment
    program = _program()
    short = os.pathsep.join(dict.fromkeys((os.path.dirname(program), *_SYSTEM_PATH)))
    own = {job.ping_env, *job.notify_env}
    settings = {f"CKPT_{key.upper()}" for key in load_settings({})}
    kept, left_out = {}, []
    for name, value in sorted(environment.items()):
        if name in own or name in _SECRETS:
            left_out.append(name)
        elif value and (name in settings or _KEPT.fullmatch(name)):
            if (is_secret_name(name) and not name.endswith("_FILE")) or is_secret_url(value):
                left_out.append(name)
            else:
                kept[name] = value
    for text in (program, str(job.directory), *kept.values()):
        if "\n" in text or "\0" in text or "\r" in text:
            raise UsageError(f"{printable(text)} holds a line break: it cannot be scheduled")
    path = _path(environment.get("PATH", ""), os.path.dirname(program))
    return JobCommand(
        program,
        ("backup", job.name, "--quiet"),
        str(job.directory),
        {"PATH": path, **kept},
        short,
        tuple(left_out),
    )


def _program() -> str:
    program = Path(sys.executable).with_name("ckpt")
    if not os.access(program, os.X_OK):
        raise NotFoundError(
            f"there is no program {program}", hint="install ckptstore into this Python: pip install"
        )
    return str(program)


def _path(current: str, first: str) -> str:
    """PATH as it is here, with the directory of ``ckpt`` in front and what exists only."""
    parts = [p for p in current.split(os.pathsep) if os.path.isabs(p) and os.path.isdir(p)]
    parts = [p for p in parts if "\n" not in p]
    return os.pathsep.join(dict.fromkeys((first, *parts, *_SYSTEM_PATH)))

"""rclone's S3 server: one that ignores conditions, for what must hold without them."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import ClassVar

from tests.servers.process import Server, listens
from tests.servers.seaweed import ACCESS_KEY, SECRET_KEY


class Rclone(Server):
    """``rclone serve s3`` over a folder."""

    name: ClassVar[str] = "rclone's S3 server"

    @classmethod
    def missing(cls) -> str | None:
        return None if _program() else "`rclone` is not installed (`make servers`)"

    @property
    def endpoint(self) -> str:
        """The URL of its S3 service."""
        return f"http://127.0.0.1:{self.port('s3')}"

    def start(self) -> None:
        data = self.folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        port = self.port("s3")
        self.launch(
            "rclone",
            [
                _program() or "rclone",
                "serve",
                "s3",
                f"--addr=127.0.0.1:{port}",
                f"--auth-key={ACCESS_KEY},{SECRET_KEY}",
                "--vfs-cache-mode=off",
                data,
            ],
            {"RCLONE_CONFIG": "/dev/null"},
        )
        self.wait_until(lambda: listens(port), "rclone")


def _program() -> str | None:
    beside = Path(sys.executable).parent / "rclone"
    return str(beside) if beside.exists() else shutil.which("rclone")

"""SeaweedFS: the S3 server of every day."""

from __future__ import annotations

import json
import shutil
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import ClassVar

from tests.servers.process import Server

ACCESS_KEY = "test-access-key"
PUBLIC_BUCKET = "public-bucket"
"""What anyone may read."""
SECRET_KEY = "test-secret-key-of-no-value"


class SeaweedFS(Server):
    """Master, volume, filer and S3 gateway in one process."""

    name: ClassVar[str] = "SeaweedFS"

    @classmethod
    def missing(cls) -> str | None:
        if _program() is None:
            return "`weed` is not installed (`make servers`)"
        return None

    @property
    def endpoint(self) -> str:
        """The URL of its S3 service."""
        return f"http://127.0.0.1:{self.port('s3')}"

    def start(self) -> None:
        config = self.folder / "s3.json"
        data = self.folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        config.write_text(
            json.dumps(
                {
                    "identities": [
                        {
                            "name": "admin",
                            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
                            "actions": ["Admin", "Read", "List", "Tagging", "Write"],
                        },
                        {
                            "name": "anonymous",
                            "actions": [f"Read:{PUBLIC_BUCKET}", f"List:{PUBLIC_BUCKET}"],
                        },
                    ]
                }
            )
        )
        ports = [f"-{part}.port={self.port(part)}" for part in ("master", "volume", "filer", "s3")]
        ports += [
            f"-{part}.port.grpc={self.port(f'{part}-grpc')}"
            for part in ("master", "volume", "filer", "s3")
        ]
        self.launch(
            "weed",
            [
                _program() or "weed",
                "server",
                "-ip=127.0.0.1",
                "-ip.bind=127.0.0.1",
                f"-dir={data}",
                "-s3",
                f"-s3.config={config}",
                *ports,
                "-s3.port.iceberg=0",
                "-s3.port.lance=0",
                "-volume.max=1000",
                "-volume.preStopSeconds=0",
                "-master.electionTimeout=1s",
                "-master.heartbeatInterval=100ms",
                "-master.volumeSizeLimitMB=1024",
                "-master.telemetry=false",
            ],
            {"WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"},  # by default seven for each bucket
        )
        self.wait_until(self._serves, "weed")

    def _serves(self) -> bool:
        # Unsigned: a server that is up refuses it, one that is not yet says 5xx or nothing.
        try:
            urllib.request.urlopen(self.endpoint, timeout=5).close()
        except urllib.error.HTTPError as error:
            return error.code == 403
        except OSError:
            return False
        return True


def _program() -> str | None:
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")

"""Ceph's RADOS Gateway: a second S3 server that has nothing in common with the first."""

from __future__ import annotations

import os
import shutil
import subprocess
import urllib.request
import uuid
from typing import ClassVar

from tests.servers.process import Server
from tests.servers.seaweed import ACCESS_KEY, SECRET_KEY

PACKAGES = ("radosgw", "ceph-mon", "ceph-osd", "ceph-common")
_PROGRAMS = ("radosgw", "radosgw-admin", "ceph-mon", "ceph-osd", "ceph", "monmaptool")

_CONFIG = """\
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{mon},v1:127.0.0.1:{mon_old}]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false
# All of it is on loopback: checksums, no encryption.
ms mon client mode = crc
ms client mode = crc
keyring = {folder}/keyring
admin socket =
run dir = {folder}
crash dir = {folder}
log to file = false
mon cluster log to file = false
log to stderr = true
# One disk: one copy of each object.
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000

[mon]
mon data = {folder}/mon

[osd]
osd data = {folder}/osd
osd journal =
osd objectstore = bluestore
bluestore block path =
bluestore block create = true
bluestore block size = {size}
osd memory target = 939524096
# Nobody waits for a second disk.
osd class update on start = false

[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{s3}
rgw thread pool size = 64
rgw enable usage log = false
"""

_DISK = 24 * 1024**3
"""Of a file with holes: it takes what is stored."""

_CAPABILITIES = {
    "mon.": {"mon": "allow *"},
    "client.admin": {"mon": "allow *", "osd": "allow *", "mgr": "allow *"},
    "osd.0": {"mon": "allow profile osd", "osd": "allow *", "mgr": "allow profile osd"},
    "client.rgw": {"mon": "allow rw", "osd": "allow rwx", "mgr": "allow rw"},
}


class Ceph(Server):
    """A monitor, one OSD on a file, and the gateway."""

    name: ClassVar[str] = "Ceph's RADOS Gateway"

    @classmethod
    def missing(cls) -> str | None:
        lacking = [program for program in _PROGRAMS if shutil.which(program) is None]
        if lacking:
            return (
                f"`{lacking[0]}` is not installed (`make test-ceph` as root, "
                f"or apt-get install {' '.join(PACKAGES)})"
            )
        if os.getuid() != 0:
            return "it is started as root here"
        return None

    @property
    def endpoint(self) -> str:
        """The URL of its S3 service."""
        return f"http://127.0.0.1:{self.port('s3')}"

    def start(self) -> None:
        if not self.load().get("made"):
            self._make_cluster()
        self.launch("mon", ["ceph-mon", "-f", "-i", "a", *self._conf])
        self.wait_until(self._has_monitor, "mon")
        if not self.load().get("made"):
            self._do("ceph", "osd", "new", self.load()["disk"], "0")
            self._do("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", self.load()["disk"])
        self.launch("osd", ["ceph-osd", "-f", "-i", "0", *self._conf])
        self.wait_until(self._has_disk, "osd")
        self.launch("rgw", ["radosgw", "-f", "-n", "client.rgw", *self._conf])
        self.wait_until(self._serves, "rgw")
        if not self.load().get("made"):
            self._do(
                "radosgw-admin", "user", "create", "--uid=test", "--display-name=test",
                f"--access-key={ACCESS_KEY}", f"--secret-key={SECRET_KEY}",
            )  # fmt: skip
            self.save(made=True)

    @property
    def _conf(self) -> list[str]:
        return ["-c", str(self.folder / "ceph.conf")]

    def _make_cluster(self) -> None:
        """Keys, the monitor's map and its database; the disk is made when there is a monitor."""
        for part in ("mon", "osd"):
            shutil.rmtree(self.folder / part, ignore_errors=True)
            (self.folder / part).mkdir(parents=True)
        fsid = str(uuid.uuid4())
        self.save(disk=str(uuid.uuid4()))
        (self.folder / "ceph.conf").write_text(
            _CONFIG.format(
                folder=self.folder,
                fsid=fsid,
                size=_DISK,
                mon=self.port("mon"),
                mon_old=self.port("mon-old"),
                s3=self.port("s3"),
            )
        )
        keyring = self.folder / "keyring"
        keyring.touch(0o600)
        for entity, granted in _CAPABILITIES.items():
            caps = [word for part, rule in granted.items() for word in ("--cap", part, rule)]
            self._do("ceph-authtool", str(keyring), "--gen-key", "-n", entity, *caps)
        monmap = self.folder / "monmap"
        address = f"[v2:127.0.0.1:{self.port('mon')},v1:127.0.0.1:{self.port('mon-old')}]"
        self._do(
            "monmaptool", "--create", "--clobber", "--fsid", fsid, "--addv", "a", address,
            str(monmap),
        )  # fmt: skip
        self._do(
            "ceph-mon", "--mkfs", "-i", "a", "--monmap", str(monmap), "--keyring", str(keyring)
        )

    def _has_monitor(self) -> bool:
        return self._run("ceph", "--connect-timeout", "5", "mon", "stat").returncode == 0

    def _has_disk(self) -> bool:
        return "1 up" in self._run("ceph", "--connect-timeout", "5", "osd", "stat").stdout

    def _do(self, *command: str) -> None:
        done = self._run(*command)
        if done.returncode:
            raise RuntimeError(f"{self.name}: {command[0]} failed:\n{done.stderr[-3000:]}")

    def _run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [program, *self._conf, *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def _serves(self) -> bool:
        try:
            urllib.request.urlopen(self.endpoint, timeout=5).close()
        except OSError:  # nothing listens, or it answers 5xx
            return False
        return True

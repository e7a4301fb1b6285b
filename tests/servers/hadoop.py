"""Hadoop 3.3.6: a real NameNode and a real DataNode."""

from __future__ import annotations

import importlib.util
import json
import os
import urllib.request
from pathlib import Path
from typing import Any, ClassVar
from xml.sax.saxutils import escape

from tests.servers import install_hadoop
from tests.servers.process import Server

_OPEN = ("java.lang", "java.util", "java.net", "java.nio", "sun.nio.ch", "java.io")

_PORTS = {
    "namenode": ("dfs.namenode.rpc-address",),
    "http": ("dfs.namenode.http-address",),
    "data": ("dfs.datanode.address",),
    "data-http": ("dfs.datanode.http.address",),
    "data-ipc": ("dfs.datanode.ipc.address",),
}


class Hadoop(Server):
    """A cluster of one NameNode (``namenode``) and one DataNode (``datanode``).

    ``start`` starts those of the two that do not run, so a test may kill one alone.
    """

    name: ClassVar[str] = "Hadoop"

    @classmethod
    def missing(cls) -> str | None:
        absent = install_hadoop.absent()
        if absent:
            return f"{', '.join(absent[:3])} missing (`make servers` as root)"
        if not install_hadoop.STAMP.exists():
            return "its jars are not installed (`make servers`)"
        clients = ("hdfs_native", "hdfs", "pyarrow")
        if not all(importlib.util.find_spec(client) for client in clients):
            return "its clients are not installed (`make servers`)"
        return None

    @property
    def authority(self) -> str:
        """Host and port of the NameNode's RPC."""
        return f"127.0.0.1:{self.port('namenode')}"

    @property
    def web_authority(self) -> str:
        """Host and port of WebHDFS."""
        return f"127.0.0.1:{self.port('http')}"

    @property
    def environment(self) -> dict[str, str]:
        """What libhdfs, and so pyarrow, wants to find in the environment."""
        return {
            "ARROW_LIBHDFS_DIR": str(install_hadoop.HOME),
            "CLASSPATH": f"{self._conf}:{install_hadoop.class_path()}",
            "JAVA_HOME": str(install_hadoop.java_home()),
        }

    @property
    def _conf(self) -> Path:
        return self.folder / "conf"

    def start(self) -> None:
        self._configure()
        if not (self.folder / "name").exists():
            self.launch("format", self._java("namenode.NameNode", "-format", "-nonInteractive"))
            while self.alive("format"):
                pass
            pids = self.load()["pids"]
            del pids["format"]
            self.save(pids=pids)
        for label, program in (
            ("namenode", "namenode.NameNode"),
            ("datanode", "datanode.DataNode"),
        ):
            if not self.alive(label):
                self.launch(label, self._java(program))
        self.wait_until(self._serves, "namenode")
        self.wait_until(self._stores, "datanode")

    def _java(self, program: str, *arguments: str) -> list[str]:
        return [
            str(Path(self.environment["JAVA_HOME"]) / "bin" / "java"),
            "-Xmx384m",
            "-XX:TieredStopAtLevel=1",
            "-XX:+UseSerialGC",
            "-Djava.net.preferIPv4Stack=true",
            f"-Dhadoop.log.dir={self.folder}",
            *(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPEN),
            "-cp",
            self.environment["CLASSPATH"],
            f"org.apache.hadoop.hdfs.server.{program}",
            *arguments,
        ]

    def _configure(self) -> None:
        self._conf.mkdir(parents=True, exist_ok=True)
        groups = "org.apache.hadoop.security.ShellBasedUnixGroupsMapping"
        core = {
            "fs.defaultFS": f"hdfs://{self.authority}",
            "hadoop.tmp.dir": self.folder / "tmp",
            "hadoop.security.group.mapping": groups,
            "ipc.client.connect.retry.interval": 100,  # the DataNode's, when the NameNode is back
        }
        hdfs: dict[str, Any] = {
            "dfs.replication": 1,
            "dfs.namenode.name.dir": f"file://{self.folder}/name",
            "dfs.datanode.data.dir": f"file://{self.folder}/data",
            "dfs.datanode.hostname": "localhost",
            "dfs.namenode.datanode.registration.ip-hostname-check": "false",
            "dfs.namenode.secondary.http-address": "127.0.0.1:0",
            "dfs.webhdfs.enabled": "true",
            "dfs.permissions.enabled": "true",
            "dfs.namenode.safemode.threshold-pct": 0.999,  # it serves once it knows the blocks
            "dfs.namenode.safemode.extension": 0,
            "dfs.namenode.fs-limits.min-block-size": 1024 * 1024,
            # A killed process costs nothing here, and no test cuts the power.
            "dfs.namenode.edits.noeditlogchannelflush": "true",
            "dfs.heartbeat.interval": 1,
            # A file closes before its only copy was reported: with one DataNode that takes a while.
            "dfs.namenode.file.close.num-committed-allowed": 1,
            # A file is complete once its DataNode has said so, which a client may ask too early.
            "dfs.client.block.write.locateFollowingBlock.initial.delay.ms": 10,
            "dfs.namenode.heartbeat.recheck-interval": 1000,
        }
        for port, names in _PORTS.items():
            hdfs.update(dict.fromkeys(names, f"127.0.0.1:{self.port(port)}"))
        for file, properties in (("core-site.xml", core), ("hdfs-site.xml", hdfs)):
            lines = (
                f"<property><name>{key}</name><value>{escape(str(value))}</value></property>"
                for key, value in properties.items()
            )
            (self._conf / file).write_text(
                "<configuration>\n{}\n</configuration>\n".format("\n".join(lines))
            )
        (self._conf / "log4j.properties").write_text(
            "log4j.rootLogger=WARN,A\nlog4j.appender.A=org.apache.log4j.ConsoleAppender\n"
            "log4j.appender.A.target=System.err\n"
            "log4j.appender.A.layout=org.apache.log4j.PatternLayout\n"
            "log4j.appender.A.layout.ConversionPattern=%d %p %c{1}: %m%n\n"
        )

    def _serves(self) -> bool:
        """Whether the NameNode answers and is out of safe mode."""
        state = _bean(self.port("http"), "NameNode,name=NameNodeInfo")
        return state is not None and not state["Safemode"]

    def _stores(self) -> bool:
        """Whether the NameNode has heard from this DataNode, and of its blocks."""
        node = _bean(self.port("data-http"), "DataNode,name=DataNodeInfo")
        if node is None or "BPServiceActorInfo" not in node:
            return False
        actors = json.loads(node["BPServiceActorInfo"])
        heard = bool(actors) and all(
            a["ActorState"] == "RUNNING" and int(a["LastHeartbeat"]) < 5 for a in actors
        )
        nodes = _bean(self.port("http"), "NameNode,name=FSNamesystemState")
        blocks = _bean(self.port("http"), "NameNode,name=NameNodeInfo")
        if nodes is None or blocks is None:
            return False
        return heard and nodes["NumLiveDataNodes"] == 1 and blocks["NumberOfMissingBlocks"] == 0


def _bean(port: int, name: str) -> dict[str, Any] | None:
    """What a daemon says of itself; ``None`` while it does not."""
    url = f"http://127.0.0.1:{port}/jmx?qry=Hadoop:service={name}"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            beans: list[dict[str, Any]] = json.load(answer)["beans"]
    except (OSError, ValueError):
        return None
    return beans[0] if beans and "modelerType" in beans[0] else None


def client_environment(server: Hadoop) -> dict[str, str]:
    """The process's environment with what clients of ``server`` need."""
    return {**os.environ, **server.environment}

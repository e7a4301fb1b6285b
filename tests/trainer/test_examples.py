"""Every configuration among the examples can be used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ckptstore.backends import open_backend
from ckptstore.uri import StoreURI
from trainer.settings import load_config

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIGURATIONS = sorted(
    path for path in EXAMPLES.glob("*.yaml") if re.search("^model:", path.read_text(), re.MULTILINE)
)


def test_there_is_one_for_each_kind_of_storage() -> None:
    assert {"hdfs.yaml", "nfs.yaml", "s3.yaml", "tiny_cpu.yaml"} <= {p.name for p in CONFIGURATIONS}


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.name)
def test_it_is_valid_and_its_store_can_be_opened(path: Path) -> None:
    if path.name == "hdfs.yaml":
        pytest.importorskip("hdfs_native")
    if path.name == "s3.yaml":
        pytest.importorskip("botocore")
    config, _ = load_config(["--config", str(path)])
    open_backend(StoreURI.parse(str(config.storage.uri))).close()

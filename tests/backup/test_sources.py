"""Which checkpoints of a live directory are finished."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptstore.backup.sources import Found, Layout, find
from ckptstore.errors import CkptError, NotFoundError, UsageError
from tests.cli.support import fill

NOW = 1_800_000_000.0
"""When it is looked."""


def age(path: Path, seconds: float) -> None:
    """Make everything at a path as old as this."""
    paths = [*path.rglob("*"), path] if path.is_dir() else [path]
    for one in paths:
        os.utime(one, (NOW - seconds, NOW - seconds), follow_symlinks=False)


def verl(root: Path, step: int, seconds: float = 3600, ranks: int = 2, name: str = "") -> Path:
    """A save of verl with FSDP."""
    directory = root / (name or f"global_step_{step}")
    for role in ("actor", "critic"):
        for kind in ("model", "optim", "extra_state"):
            for rank in range(ranks):
                file = f"{role}/{kind}_world_size_{ranks}_rank_{rank}.pt"
                fill(directory, {file: f"{step} {file}".encode()})
    fill(directory, {"data.pt": b"data"})
    age(directory, seconds)
    return directory


def tracker(root: Path, text: str | int, seconds: float = 3600) -> None:
    """verl's tracker."""
    fill(root, {"latest_checkpointed_iteration.txt": str(text).encode()})
    age(root / "latest_checkpointed_iteration.txt", seconds)


def steps(found: Found) -> list[int | None]:
    """The finished steps."""
    return [one.step for one in found.finished]


def reasons(found: Found) -> dict[int, str]:
    """Why the others are not."""
    return {one.step: one.reason for one in found.unfinished}


def look(root: Path, layout: Layout | None = None) -> Found:
    """As a job looks."""
    return find(root, layout, now=NOW)


# verl


def test_verl_up_to_the_tracker(tmp_path: Path) -> None:
    for step, seconds in ((20, 900), (100, 300), (3, 1200)):
        verl(tmp_path, step, seconds)
    verl(tmp_path, 120, 5)
    tracker(tmp_path, 100, 299)
    found = look(tmp_path)
    assert found.layout == "verl"
    assert steps(found) == [3, 20, 100]
    assert reasons(found) == {120: "nothing says yet that it is finished"}


def test_megatron_names_its_directories_otherwise(tmp_path: Path) -> None:
    verl(tmp_path, 100, name="iter_0000100")
    tracker(tmp_path, 100)
    assert steps(look(tmp_path)) == [100]


def test_verl_without_a_tracker_takes_only_what_is_older_and_left_alone(tmp_path: Path) -> None:
    """Its asynchronous saves do not write one."""
    verl(tmp_path, 10, 3000)
    verl(tmp_path, 20, 30)
    verl(tmp_path, 30, 3000)
    found = look(tmp_path)
    assert steps(found) == [10]
    assert "less than" in reasons(found)[20]
    assert "nothing says" in reasons(found)[30]


def test_verl_with_a_tracker_that_was_left_behind(tmp_path: Path) -> None:
    verl(tmp_path, 10, 9000)
    tracker(tmp_path, 10, 9000)
    verl(tmp_path, 20, 3000)
    verl(tmp_path, 30, 2000)
    assert steps(look(tmp_path)) == [10, 20]


def test_a_step_that_is_saved_again_is_not_finished_because_the_tracker_is_past_it(
    tmp_path: Path,
) -> None:
    verl(tmp_path, 100, 5000)
    tracker(tmp_path, 100, 5000)
    again = verl(tmp_path, 50, 5500)
    age(again / "actor" / "model_world_size_2_rank_0.pt", 3)
    assert steps(look(tmp_path)) == [100]
    age(again, 1000)  # an export, long ago
    assert steps(look(tmp_path)) == [50, 100]


def test_a_directory_that_is_being_removed_is_left(tmp_path: Path) -> None:
    verl(tmp_path, 100, 5000)
    tracker(tmp_path, 100, 5000)
    old = verl(tmp_path, 50, 5500)
    (old / "actor" / "model_world_size_2_rank_0.pt").unlink()
    (old / "actor" / "model_world_size_2_rank_1.pt").unlink()
    os.utime(old / "actor", (NOW - 1, NOW - 1))
    assert steps(look(tmp_path)) == [100]
    age(old, 5500)
    assert steps(look(tmp_path)) == [50, 100]
    os.utime(old, (NOW - 1, NOW - 1))
    assert steps(look(tmp_path)) == [100]


def test_a_rank_that_is_missing_or_empty(tmp_path: Path) -> None:
    tracker(tmp_path, 300)
    verl(tmp_path, 100, ranks=4)
    (tmp_path / "global_step_100" / "critic" / "optim_world_size_4_rank_2.pt").unlink()
    verl(tmp_path, 200)
    (tmp_path / "global_step_200" / "actor" / "model_world_size_2_rank_1.pt").write_bytes(b"")
    verl(tmp_path, 300)
    (tmp_path / "global_step_250").mkdir()
    for one in (100, 200, 250):
        age(tmp_path / f"global_step_{one}", 3600)
    found = look(tmp_path)
    assert steps(found) == [300]
    assert reasons(found) == {
        100: "of critic/optim rank 2 of 4 is missing",
        200: "actor/model_world_size_2_rank_1.pt is empty",
        250: "actor is missing, which global_step_300 has",
    }


def test_what_a_killed_save_left_is_not_finished_because_a_later_one_is(tmp_path: Path) -> None:
    verl(tmp_path, 100)
    (tmp_path / "global_step_100" / "data.pt").unlink()
    age(tmp_path / "global_step_100", 3600)
    assert steps(look(tmp_path)) == []
    verl(tmp_path, 200)
    tracker(tmp_path, 200)
    found = look(tmp_path)
    assert steps(found) == [200]
    assert reasons(found)[100] == "data.pt is missing, which global_step_200 has"


@pytest.mark.parametrize("text", ["", "release", "-1", "1e2", "9" * 400, "100\n", "\udcff"])
def test_a_strange_tracker_vouches_for_nothing(tmp_path: Path, text: str) -> None:
    verl(tmp_path, 100)
    (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(text.encode("utf-8", "replace"))
    age(tmp_path / "latest_checkpointed_iteration.txt", 0)
    assert steps(look(tmp_path)) == ([100] if text == "100\n" else [])


def test_a_checkpoint_is_its_directory(tmp_path: Path) -> None:
    verl(tmp_path, 100)
    tracker(tmp_path, 100)
    scanned = look(tmp_path).finished[0].open(tmp_path)
    assert "data.pt" in [f.path for f in scanned.files]
    assert len(scanned.files) == 13


# OpenRLHF


def openrlhf(root: Path, step: int, seconds: float = 3600, parts: tuple[str, ...] = ()) -> None:
    """A save of OpenRLHF with DeepSpeed."""
    for part in parts or ("_actor", "_critic"):
        directory = root / part / f"global_step{step}"
        for rank in range(2):
            fill(directory, {f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt": b"optim"})
        fill(directory, {"mp_rank_00_model_states.pt": f"{part} {step}".encode()})
        age(directory, seconds)


def latest(root: Path, step: int, seconds: float = 3600, part: str = "_actor") -> None:
    """DeepSpeed's word of what is finished."""
    fill(root / part, {"latest": f"global_step{step}".encode()})
    age(root / part / "latest", seconds)


def test_openrlhf_needs_both_parts(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        openrlhf(tmp_path, step)
    openrlhf(tmp_path, 40, 5, ("_actor",))
    latest(tmp_path, 30)
    latest(tmp_path, 20, part="_critic")
    found = look(tmp_path)
    assert found.layout == "openrlhf"
    assert steps(found) == [10, 20]
    assert reasons(found) == {
        30: "latest does not reach it yet",
        40: "_critic has no global_step40",
    }


def test_openrlhf_is_pushed_so_that_deepspeed_loads_this_step(tmp_path: Path) -> None:
    openrlhf(tmp_path, 10)
    openrlhf(tmp_path, 20)
    for part in ("_actor", "_critic"):
        latest(tmp_path, 20, part=part)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    scanned = look(tmp_path).finished[0].open(scratch)
    files = {f.path: Path(f.real).read_bytes() for f in scanned.files}
    assert files["_actor/latest"] == files["_critic/latest"] == b"global_step10"
    assert files["_critic/global_step10/mp_rank_00_model_states.pt"] == b"_critic 10"
    assert len(files) == 8


def test_deepspeed_alone(tmp_path: Path) -> None:
    openrlhf(tmp_path.parent, 10, parts=(tmp_path.name,))
    latest(tmp_path.parent, 10, part=tmp_path.name)
    found = look(tmp_path)
    assert (found.layout, steps(found)) == ("openrlhf", [10])
    (tmp_path / "global_step10" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    age(tmp_path / "global_step10", 3600)
    assert "rank 0 of 2" in reasons(look(tmp_path))[10]


# DCP


def dcp(root: Path, step: int, *, finished: bool, name: str = "step-") -> Path:
    """A save of torch.distributed.checkpoint."""
    directory = fill(root / f"{name}{step}", {"__0_0.distcp": b"data", "__1_0.distcp": b"data"})
    if finished:
        fill(directory, {".metadata.tmp": b"metadata"})
        (directory / ".metadata.tmp").rename(directory / ".metadata")
    return directory


def test_dcp_with_its_metadata(tmp_path: Path) -> None:
    dcp(tmp_path, 5, finished=True)
    dcp(tmp_path, 10, finished=True)
    dcp(tmp_path, 15, finished=False)
    fill(tmp_path, {"logs/train.log": b"x"})
    found = find(tmp_path)
    assert (found.layout, steps(found)) == ("dcp", [5, 10])
    assert reasons(found) == {15: "it has no .metadata yet"}


def test_dcp_that_is_written_again_over_its_old_metadata(tmp_path: Path) -> None:
    directory = dcp(tmp_path, 5, finished=True)
    later = (directory / ".metadata").stat().st_mtime + 100
    os.utime(directory / "__0_0.distcp", (later, later))
    assert "changed less than" in reasons(find(tmp_path, now=later + 1))[5]
    assert steps(find(tmp_path, now=later + 700)) == [5]


def test_dcp_with_empty_metadata(tmp_path: Path) -> None:
    (dcp(tmp_path, 5, finished=False) / ".metadata").write_bytes(b"")
    assert reasons(find(tmp_path)) == {5: "its .metadata is empty"}


# Everything else


def test_a_plain_directory_is_one_checkpoint(tmp_path: Path) -> None:
    fill(tmp_path, {"model.bin": b"x", "config/a.json": b"{}"})
    found = look(tmp_path)
    assert (found.layout, steps(found)) == ("plain", [None])
    assert [f.path for f in found.finished[0].open(tmp_path).files] == [
        "config/a.json",
        "model.bin",
    ]


def test_a_dcp_directory_itself_is_one_checkpoint(tmp_path: Path) -> None:
    assert look(dcp(tmp_path, 5, finished=True)).layout == "plain"


def test_numbered_directories_that_nothing_vouches_for_are_not_guessed_about(
    tmp_path: Path,
) -> None:
    fill(tmp_path, {"checkpoint-500/model.bin": b"x"})
    with pytest.raises(UsageError, match="checkpoint-500") as caught:
        look(tmp_path)
    assert "layout" in str(caught.value.hint)
    assert look(tmp_path, "plain").layout == "plain"


@pytest.mark.parametrize("kind", ["missing", "file", "empty"])
def test_no_directory_to_speak_of(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    if kind == "file":
        path.write_bytes(b"x")
    if kind == "empty":
        path.mkdir()
    with pytest.raises(NotFoundError, match=kind):
        look(path)


def test_what_goes_meanwhile_is_an_error_of_ours(tmp_path: Path) -> None:
    verl(tmp_path, 100)
    tracker(tmp_path, 100)
    one = look(tmp_path).finished[0]
    (tmp_path / "global_step_100").rename(tmp_path / "gone")
    with pytest.raises(CkptError):
        one.open(tmp_path)

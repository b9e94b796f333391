"""A full disk stops a run with one message and the checkpoints before it intact: real file systems, really full."""

import os
import re
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import PATIENCE_S
from short_runs import finish, require_same_run, start

from jax_grpo.config.sections import CheckpointConfig
from jax_grpo.run import files
from jax_grpo.run.checkpoints import Checkpoints, load
from jax_grpo.run.files import CheckpointError


def state() -> dict:
    return {"w": jnp.arange(48.0).reshape(8, 6), "beta": jnp.float32(0.1)}


def saved(folder: Path) -> None:
    """Checkpoints 1 and 2."""
    with Checkpoints(folder, CheckpointConfig(keep_best=0)) as checkpoints:
        for number in (1, 2):
            checkpoints.save(number, state(), {"note": f"number {number}"}, {})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_disk_that_takes_no_more_bytes_fails_the_write_and_nothing_else(tmp_path, capfd):
    """A real failure of several files in mid-write: the process may not write files beyond 4 kB (RLIMIT_FSIZE)."""
    saved(tmp_path)
    large = state() | {f"large{i}": jnp.ones(100_000) for i in range(20)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with (
            pytest.raises(
                CheckpointError,
                match=r"iteration 3 could not be written to .*: File too large \(.*needs up to 8\.\d MB\)",
            ),
            Checkpoints(tmp_path, CheckpointConfig(keep_best=0)) as writing,
        ):
            writing.save(3, large, {}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["000001", "000002"]
    assert load(tmp_path / "000002").content["note"] == "number 2"
    assert capfd.readouterr().err == "", "the message is all that is said"


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 2 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_disk_without_room_is_noticed_before_a_byte_is_written(small_disk, capfd):
    saved(small_disk / "run")
    (small_disk / "other").write_bytes(bytes(1_200_000))
    before = os.statvfs(small_disk)
    with (
        pytest.raises(
            CheckpointError,
            match=r"iteration 3 could not be written to .*: No space left on device \(0\.8 MB free without it; it needs "
            r"up to 1\.\d MB\)",
        ) as caught,
        Checkpoints(small_disk / "run", CheckpointConfig(keep_best=0)) as writing,
    ):
        writing.save(3, state() | {"large": jnp.ones(250_000)}, {}, {})
    assert os.statvfs(small_disk) == before and capfd.readouterr().err == ""
    assert caught.value.__notes__ == [
        f"the newest complete checkpoint is {small_disk / 'run' / '000002'}: continue with --resume auto"
    ]


@pytest.mark.parametrize("left", [0, 40_000, 120_000], ids=lambda left: f"{left}_bytes_left")
def test_a_disk_that_another_program_fills_in_mid_write_says_that_and_nothing_else(
    small_disk, monkeypatch, capfd, left
):
    """The check finds room; then `other` takes all but `left` bytes, so that many tensors' writes fail one after another."""
    saved(small_disk / "run")
    real = files.write_arrays

    def filled_meanwhile(*arguments):
        free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
        (small_disk / "other").write_bytes(bytes(free - left))
        return real(*arguments)

    monkeypatch.setattr(files, "write_arrays", filled_meanwhile)
    large = state() | {f"large{i}": jnp.ones(10_000) for i in range(20)}
    with (
        pytest.raises(CheckpointError, match=r"iteration 3 could not be written to .*: No space left on device \("),
        Checkpoints(small_disk / "run", CheckpointConfig(keep_best=0)) as writing,
    ):
        writing.save(3, large, {}, {})
    assert capfd.readouterr().err == ""
    assert names(small_disk / "run") == ["000001", "000002"]
    assert load(small_disk / "run" / "000002").content["note"] == "number 2"


def test_a_checkpoint_needs_no_more_room_than_was_said(tmp_path):
    leaves = {f"a{i}": np.ones(3 + 5000 * i, np.float32) for i in range(30)}
    with Checkpoints(tmp_path, CheckpointConfig(keep_best=0)) as checkpoints:
        checkpoints.save(1, leaves, {"config": ["x" * 100] * 100}, {})
    taken = sum(path.stat().st_blocks * 512 for path in (tmp_path / "000001").rglob("*"))
    estimate = files.bytes_on_disk(leaves, os.statvfs(tmp_path).f_frsize)
    print(taken, estimate)
    assert taken <= estimate <= 1.05 * taken


@pytest.mark.slow
def test_a_disk_that_fills_up_stops_the_run_with_the_last_checkpoint_intact_and_it_continues_once_there_is_room(
    tmp_path,
):
    finish(start(tmp_path, "whole"))
    disk = tmp_path / "small"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1800k", "none", disk], capture_output=True, check=False
    ).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        process = start(tmp_path, "small/run", "--record_batches", "0")
        output = process.communicate(timeout=PATIENCE_S)[0]
        print(output)
        assert process.returncode == 1 and "Traceback" not in output
        assert re.search(
            r"CheckpointError: the checkpoint of iteration \d+ could not be written to .*No space left on device",
            output,
        )
        newest = files.complete(disk / "run" / "checkpoints")[-1]
        load(newest)
        assert f"the newest complete checkpoint is {newest}: continue with --resume auto" in output
        subprocess.run(["mount", "-o", "remount,size=20m", disk], check=True)
        assert "continuing after iteration" in finish(
            start(tmp_path, "small/run", "--record_batches", "0", "--resume", "auto")
        )
        require_same_run(disk / "run", tmp_path / "whole", batches=0)
    finally:
        subprocess.run(["umount", disk], check=True)

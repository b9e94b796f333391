"""The folder of a run: made, writable, and used by one process at a time; and `run.json`, what it was made with.

Knows nothing of what is trained.
"""

import contextlib
import hashlib
import os
import platform
import socket
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from jax_grpo.config.files import RUN_WEIGHTS, is_adapter, parsed_json
from jax_grpo.system.devices import cores, processor
from jax_grpo.system.whole_files import lock, write_record

LOCK = "run.lock"
RECORD = "run.json"
PACKAGES = ("jax_grpo", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "chess", "tokenizers")


class RunFolderError(ValueError):
    """The run folder cannot be used; the message names it, why, and what to do."""


@contextlib.contextmanager
def locked_folder(path: str | Path) -> Iterator[Path]:
    """Makes a run's folder and holds its lock, whose file says who does; that of a killed run is taken over.

    Raises RunFolderError: it cannot be made or written, or another process is using it.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = lock(folder / LOCK)
    except BlockingIOError as error:
        holder = (folder / LOCK).read_text(errors="replace").strip()
        raise RunFolderError(
            f"run_dir is {str(folder)!r}, which another run is using ({holder or 'it has just started'}); stop that one, or "
            f"choose another run_dir"
        ) from error
    except OSError as error:
        raise RunFolderError(
            f"run_dir is {str(folder)!r}, which cannot be written ({error.strerror}); give a folder that can"
        ) from error
    try:
        os.ftruncate(handle, 0)  # by the handle: on NFS closing another one of the file would release the lock
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()} since {_now()}\n".encode())
        yield folder
    finally:
        os.close(handle)  # releases the lock; the file stays: removing it would race with a run that opens it


def record_start(run_dir: Path, resolved_config: str, command: str | None, iteration: int, micro_batches: int) -> None:
    """Writes `run.json`: versions, hardware, commit, command and micro-batches of this start, after those of earlier ones."""
    earlier, devices = read_record(run_dir)["starts"] if iteration > 0 else [], jax.devices()
    start = {
        "time": _now(),
        "from_iteration": iteration,
        "command": command,
        "micro_batches": micro_batches,
        "config_sha256": hashlib.sha256(resolved_config.encode()).hexdigest(),
        "git": _commit(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "hardware": {
            "platform": devices[0].platform,
            "devices": [device.device_kind for device in devices],
            "cpu": processor(),
            "cores": cores(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
        "environment": {name: os.environ[name] for name in ("JAX_PLATFORMS", "XLA_FLAGS") if name in os.environ},
    }
    write_record(run_dir / RECORD, {"starts": [*earlier, start], "finished": None})


def record_finish(run_dir: Path) -> None:
    """Notes in `run.json` that the run reached its last iteration and its weights are written."""
    write_record(run_dir / RECORD, read_record(run_dir) | {"finished": _now()})


def require_no_finished_run(run_dir: Path, way_out: str) -> None:
    """Refuses to write over a finished run: its weights are there, or `run.json` says so. `way_out` ends the sentence.

    Raises RunFolderError.
    """
    finished = read_record(run_dir)["finished"]
    exported = run_dir / RUN_WEIGHTS
    if finished or (exported / "config.json").is_file() or is_adapter(exported):
        when = f", of {finished}" if finished else ""
        lost = "its metrics, checkpoints and weights would be written over"
        raise RunFolderError(f"{run_dir} holds a finished run{when}, and {lost}: {way_out}")


def read_record(run_dir: Path) -> dict[str, Any]:
    """`run.json`; a record without starts where there is none or it is unreadable: it informs, nothing depends on it."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        record = parsed_json((run_dir / RECORD).read_text(encoding="utf-8"))
        if isinstance(record["starts"], list):
            return record
    return {"starts": [], "finished": None}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _version(package: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _commit() -> dict[str, Any] | None:
    """Commit of the source's repository and whether it has uncommitted changes; None outside one."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        words = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
        return {"commit": words.removesuffix("-dirty"), "changed": words.endswith("-dirty")}
    return None

"""The files of one checkpoint: made durable, listed with their hashes, put in place whole, and checked while they are read.

A checkpoint is a folder named by its iteration, with `state/` (Orbax arrays: one uncompressed zarr chunk a tensor, or several, of
a run of several processes) and `manifest.json` (what the run was, and the size and SHA-256 of every file). It is written under a
name that no reader looks at and renamed once everything is on the disk. Knows nothing of models or training.
"""

import concurrent.futures
import hashlib
import json
import logging
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jax_grpo.config.files import MANIFEST, is_checkpoint, parsed_json
from jax_grpo.mesh import processes
from jax_grpo.system import memory
from jax_grpo.system.whole_files import file_hash, to_disk, write_whole

FORMAT = 1
STATE = "state"
UNFINISHED, DISCARDED = ".unfinished-", ".discarded-"  # prefixes of folders that no reader looks at
AT_ONCE = 4  # files read and hashed side by side, so that the disk is busy while bytes are hashed
# Parts of every manifest. A run's has `RUN_PARTS` besides.
PARTS = {"format": int, "iteration": int, "files": dict, "arrays": dict, "metrics": dict}
RUN_PARTS = {"config": dict, "identity": dict, "next_prompt": int, "metrics_bytes": int}
WORDS = {int: "a whole number", dict: "a mapping", str: "a text"}
# Bytes a tensor takes in Orbax's `_METADATA` and in the manifest, at most; names are some dozen bytes.
TENSOR_METADATA = 2048
FIXED_METADATA = 1 << 17  # bytes of all other files: the manifest's config is some 10 kB
# Orbax warns on every save that a layout which is not used here has nothing to merge, and logs the traceback of a failed write,
# which is also raised.
NOISE = ("Skipping merge of OCDBT", "_SignalingThread.run() raised an exception")
logging.getLogger("absl").addFilter(lambda record: not any(text in record.getMessage() for text in NOISE))


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read or used; the message names the file or key, what it holds and what to do."""


def folder_name(iteration: int) -> str:
    """Folder of the checkpoint after `iteration` iterations."""
    return f"{iteration:06d}"


def complete(folder: Path) -> list[Path]:
    """Complete checkpoints of a folder, oldest first; half-written ones never have such a name."""
    checkpoints = [path for path in folder.glob("[0-9]*") if path.name.isdigit() and is_checkpoint(path)]
    return sorted(checkpoints, key=lambda path: int(path.name))


def clear_leftovers(folder: Path) -> None:
    """Removes folders that a killed writer left; only for the run that owns the folder."""
    for prefix in (UNFINISHED, DISCARDED):
        for path in folder.glob(f"{prefix}*"):
            shutil.rmtree(path, ignore_errors=True)


def discard(path: Path) -> None:
    """Removes a checkpoint: renamed first, so that none is ever half there under its name."""
    hidden = path.with_name(DISCARDED + path.name)
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def publish(folder: Path, iteration: int, arrays: Mapping[str, Any], content: dict[str, Any]) -> None:
    """Writes one checkpoint, with JSON values for its manifest; raises the errors of Orbax, TensorStore and the file system.

    It is there whole or not at all: on a full disk nothing with its name exists. With several processes all of them call this;
    each writes the parts of the arrays that it has, and hashes its share of the files.
    """
    working, final = folder / f"{UNFINISHED}{folder_name(iteration)}", folder / folder_name(iteration)
    first = processes.is_first()
    try:
        if first:
            shutil.rmtree(working, ignore_errors=True)
            working.mkdir(parents=True)
        processes.wait_for_all()
        write_arrays(working, arrays)
        names = sorted(path.relative_to(working).as_posix() for path in working.rglob("*") if path.is_file())
        names = names[processes.own(len(names))]
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            own = dict(zip(names, pool.map(lambda name: _fingerprint(working / name), names), strict=True))
        hashes = {name: of_file for part in processes.exchanged(own) for name, of_file in part.items()}
        if first:
            write_manifest(working, content | {"format": FORMAT, "iteration": iteration, "files": hashes})
            for path in (working, *(path for path in working.rglob("*") if path.is_dir())):
                to_disk(path)
            if final.exists():
                discard(final)
            working.rename(final)
            to_disk(folder)
    except BaseException:
        if processes.count() == 1:  # others may still be writing into it
            shutil.rmtree(working, ignore_errors=True)
        raise
    processes.wait_for_all()


class _OneByOne(ocp.type_handlers.NumpyHandler):
    """Orbax's own writer of arrays, given one array at a time, each of them written before the next begins.

    Orbax copies all arrays, and writes them at once. On a full disk the writes that fail after the first one report to an event
    loop that is closed by then: a page of tracebacks beside the error, which is TensorStore's ValueError.
    """

    async def serialize(self, values, infos, args=None) -> list:
        for value, info in zip(values, infos, strict=True):
            for written in await super().serialize([value], [info]):
                written.result()
        return []


def write_arrays(folder: Path, arrays: Mapping[str, Any]) -> None:
    """Saves the named arrays as the Orbax checkpoint `folder/state`, which Orbax alone can read too; raises as `publish` does."""
    registry = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, _OneByOne()),
        (jax.Array, ocp.type_handlers.ArrayHandler()),  # of several processes; Orbax warns where it is not registered
    )
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False, type_handler_registry=registry)
    with ocp.Checkpointer(handler) as writer:
        writer.save((folder / STATE).absolute(), args=ocp.args.PyTreeSave(dict(arrays)))


def _fingerprint(file: Path) -> dict[str, Any]:
    """A durable file's size and the SHA-256 of its bytes, as the manifest lists them."""
    to_disk(file)
    return {"bytes": file.stat().st_size, "sha256": file_hash(file)}


def bytes_on_disk(arrays: Mapping[str, Any], block: int) -> int:
    """Most bytes that a checkpoint of these arrays (`nbytes` each) takes on a file system of `block` bytes an allocation unit."""
    values = sum(-(-array.nbytes // block) * block for array in arrays.values())
    return values + len(arrays) * (2 * block + TENSOR_METADATA) + FIXED_METADATA  # the folder and `.zarray`


def write_manifest(path: Path, content: dict[str, Any]) -> None:
    """Writes or replaces a checkpoint's manifest; after an OSError the earlier one is still there."""
    record = {"sha256": _json_hash(content), "content": content}
    write_whole(path / MANIFEST, json.dumps(record, indent=1), durable=True)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest's content, its own hash verified; a CheckpointError if it is missing, damaged, or of another format."""
    file = path / MANIFEST
    try:
        record = parsed_json(file.read_text(encoding="utf-8"))
        content, stated = record["content"], record["sha256"]
        intact = _json_hash(content) == stated
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} does not exist; {path} is not a complete checkpoint") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{file} is damaged: not a readable manifest ({reason})") from error
    if not intact:
        raise CheckpointError(f"{file} is damaged: its SHA-256 is not the one it states")
    require_parts(path, content, PARTS)
    if content["format"] != FORMAT:
        raise CheckpointError(f"{file} has format {content['format']}; this version reads format {FORMAT}")
    for name, listed in content["files"].items():
        within = isinstance(listed, dict) and not Path(name).is_absolute() and ".." not in Path(name).parts
        if not (within and _is_count(listed.get("bytes")) and isinstance(listed.get("sha256"), str)):
            raise CheckpointError(f"{file} is damaged: it lists {name!r} as {listed!r:.80}; expected bytes and sha256")
    for name, described in content["arrays"].items():
        _require_possible(file, name, described, content["files"])
    return content


def require_parts(path: Path, content: Any, parts: Mapping[str, type]) -> None:
    """Raises a CheckpointError if a manifest's content lacks a part, or has one of another type."""
    for name, kind in parts.items():
        part = content.get(name) if isinstance(content, dict) else content
        if not isinstance(part, kind):
            raise CheckpointError(f"{path / MANIFEST} is damaged: its {name} is {part!r:.60}; expected {WORDS[kind]}")


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _require_possible(file: Path, name: str, described: Any, listed: Mapping[str, Any]) -> None:
    """Raises a CheckpointError for a shape and dtype that no array has, or that the files have too few bytes for."""
    stored = sum(of["bytes"] for chunk, of in listed.items() if chunk.startswith(f"{STATE}/{name}/"))
    try:
        shape, dtype = described
        possible = all(map(_is_count, shape)) and isinstance(dtype, str) and not np.dtype(dtype).hasobject
        if possible and math.prod(shape) * np.dtype(dtype).itemsize <= stored:
            return
    except (TypeError, ValueError):
        pass
    raise CheckpointError(f"{file} is damaged: tensor {name!r} is {described!r:.80}, in files of {stored} bytes")


def _json_hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_arrays(path: Path, content: Mapping[str, Any], prefix: str = "") -> dict[str, np.ndarray]:
    """The arrays whose names begin with `prefix`, by name, in host memory; the bytes returned are those that were hashed.

    Only their files are read, each once: Orbax would read them a second time after their hashes were verified. A CheckpointError
    names a file that is missing, truncated or changed.
    """
    listed = {name: file for name, file in content["files"].items() if name.startswith(f"{STATE}/{prefix}")}
    names = sorted(listed, key=lambda name: -listed[name]["bytes"])  # so that no large one is left for last alone
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        files = dict(zip(names, pool.map(lambda name: _read_file(path / name, listed[name]), names), strict=True))
    arrays = {}
    for name, (shape, dtype) in content["arrays"].items():
        if name.startswith(prefix):
            try:
                arrays[name] = _assembled(files, f"{STATE}/{name}", shape, np.dtype(dtype))
            except (ArithmeticError, LookupError, TypeError, ValueError) as error:
                reason = f"{type(error).__name__}: {error}"
                raise CheckpointError(
                    f"{path}: the checkpoint is damaged: tensor {name!r} is not {dtype} {shape} ({reason})"
                ) from error
    return arrays


def _assembled(files: dict[str, np.ndarray], folder: str, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An array from its zarr chunks, which are removed from `files` where there are several; a single one is not copied."""
    first = files[f"{folder}/{'.'.join('0' * len(shape)) or '0'}"].view(dtype)
    if first.size == math.prod(shape):
        return first.reshape(shape)
    sizes = parsed_json(files[f"{folder}/.zarray"].tobytes())["chunks"]
    whole = memory.empty(tuple(shape), dtype)
    for number in np.ndindex(*(-(-axis // size) for axis, size in zip(shape, sizes, strict=True))):
        chunk = files.pop(f"{folder}/{'.'.join(map(str, number))}").view(dtype).reshape(sizes)
        where = tuple(slice(at * size, (at + 1) * size) for at, size in zip(number, sizes, strict=True))
        part = whole[where]  # at an array's end a chunk is larger than what is left
        part[...] = chunk[tuple(slice(length) for length in part.shape)]
    return whole


def _read_file(file: Path, expected: Mapping[str, Any]) -> np.ndarray:
    """The file's bytes, read once and hashed."""
    try:
        if (size := file.stat().st_size) != expected["bytes"]:
            raise CheckpointError(f"{file} has {size} bytes; expected {expected['bytes']}: the checkpoint is damaged")
        buffer = memory.empty((size,), np.dtype(np.uint8))
        with file.open("rb") as opened:
            opened.readinto(buffer.data)
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing; the checkpoint is damaged") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if (actual := hashlib.sha256(buffer.data).hexdigest()) != expected["sha256"]:
        hashes = f"SHA-256 {actual[:12]}...; expected {expected['sha256'][:12]}..."
        raise CheckpointError(f"{file} has other bytes than were written ({hashes}): the checkpoint is damaged")
    return buffer

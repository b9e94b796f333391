"""The files of one checkpoint: made durable, listed with their hashes, put in place whole, and checked while they are read.

A checkpoint is a folder named by its iteration, with `state/` (Orbax arrays: one uncompressed zarr chunk a tensor, or several, of
a run of several processes) and `manifest.json` (what the run was, and the size and SHA-256 of every file). It is written under a
name that no reader looks at and renamed once everything is on the disk. Knows nothing of models or training.
"""

import concurrent.futures
import hashlib
import itertools
import json
import logging
import math
import shutil
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jax_grpo.config.files import MANIFEST, is_checkpoint
from jax_grpo.system import memory
from jax_grpo.system.whole_files import file_hash, to_disk, written_whole

FORMAT = 1
STATE = "state"
UNFINISHED, DISCARDED = ".unfinished-", ".discarded-"  # prefixes of folders that no reader looks at
AT_ONCE = 4  # files read and hashed side by side, so that the disk is busy while bytes are hashed
PIECE = 1 << 20  # bytes read and hashed at a time: they are in the cache when they are hashed
# Bytes a tensor takes in Orbax's `_METADATA` and in the manifest, at most; names are some dozen bytes.
TENSOR_METADATA = 2048
FIXED_METADATA = 1 << 17  # bytes of all other files: the manifest's config is some 10 kB
# Orbax warns on every save that a layout which is not used here has nothing to merge, and logs the traceback of a failed write,
# which is also raised.
NOISE = ("Skipping merge of OCDBT", "_SignalingThread.run() raised an exception")
logging.getLogger("absl").addFilter(lambda record: not any(text in record.getMessage() for text in NOISE))


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read or used; the message names the file or key, what was found and what to do."""


def folder_name(iteration: int) -> str:
    """Folder of the checkpoint after `iteration` iterations."""
    return f"{iteration:06d}"


def complete(folder: Path) -> list[Path]:
    """Complete checkpoints of a folder, oldest first; half-written ones never have such a name."""
    checkpoints = [path for path in folder.glob("[0-9]*") if path.name.isdigit() and is_checkpoint(path)]
    return sorted(checkpoints, key=lambda path: int(path.name))


def clear_leftovers(folder: Path) -> None:
    """Removes what a killed writer left; only for the run that owns the folder."""
    for prefix in (UNFINISHED, DISCARDED):
        for path in folder.glob(f"{prefix}*"):
            shutil.rmtree(path, ignore_errors=True)


def discard(path: Path) -> None:
    """Removes a checkpoint: renamed first, so that none is ever half there under its name."""
    hidden = path.with_name(DISCARDED + path.name)
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def publish(folder: Path, iteration: int, arrays: Mapping[str, np.ndarray], content: dict[str, Any]) -> None:
    """Writes one checkpoint into the folder of all, with JSON values for its manifest, or raises an OSError or ValueError.

    It is there whole or not at all: on a full disk nothing with its name exists.
    """
    working, final = folder / f"{UNFINISHED}{folder_name(iteration)}", folder / folder_name(iteration)
    shutil.rmtree(working, ignore_errors=True)
    working.mkdir(parents=True)
    try:
        write_arrays(working, arrays)
        files = fingerprints(working, written(working))
        put_in_place(working, final, content | {"format": FORMAT, "iteration": iteration, "files": files})
    except BaseException:
        shutil.rmtree(working, ignore_errors=True)
        raise


def written(working: Path) -> list[str]:
    """Names of all files in a checkpoint that is being written, in order."""
    return sorted(path.relative_to(working).as_posix() for path in working.rglob("*") if path.is_file())


def fingerprints(working: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What the manifest says of these files, each of which is made durable."""
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(names, pool.map(lambda name: _fingerprint(working / name), names), strict=True))


def put_in_place(working: Path, final: Path, content: dict[str, Any]) -> None:
    """Gives a checkpoint whose files are written its manifest, and its name."""
    write_manifest(working, content)
    for path in (working, *(path for path in working.rglob("*") if path.is_dir())):
        to_disk(path)
    if final.exists():
        discard(final)
    working.rename(final)
    to_disk(final.parent)


class _OneByOne(ocp.type_handlers.NumpyHandler):
    """Orbax's own writer of arrays, given one array at a time, each of them written before the next begins.

    It would write all at once, and copy them all before. Where the disk fills up, the writes that fail after the first one report
    to an event loop that is closed by then: a page of tracebacks beside the error, which is TensorStore's ValueError.
    """

    async def serialize(self, values, infos, args=None) -> list:
        for value, info in zip(values, infos, strict=True):
            for written in await super().serialize([value], [info]):
                written.result()
        return []


def write_arrays(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Saves the named arrays as the Orbax checkpoint `folder/state`, which Orbax alone can read too; raises as `publish` does."""
    registry = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, _OneByOne()),
        (jax.Array, ocp.type_handlers.ArrayHandler()),  # none is saved; Orbax warns where it is not registered
    )
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False, type_handler_registry=registry)
    with ocp.Checkpointer(handler) as writer:
        writer.save((folder / STATE).absolute(), args=ocp.args.PyTreeSave(dict(arrays)))


def _fingerprint(file: Path) -> dict[str, Any]:
    """A durable file's size and the SHA-256 of its bytes, as the manifest lists them."""
    to_disk(file)
    return {"bytes": file.stat().st_size, "sha256": file_hash(file)}


def bytes_on_disk(arrays: Mapping[str, Any], block: int) -> int:
    """What a checkpoint of these arrays (`nbytes` each) takes at most on a file system of `block` bytes an allocation unit."""
    values = sum(-(-array.nbytes // block) * block for array in arrays.values())
    return values + len(arrays) * (2 * block + TENSOR_METADATA) + FIXED_METADATA  # the folder and `.zarray`


def write_manifest(path: Path, content: dict[str, Any]) -> None:
    """Writes a checkpoint's manifest, or puts another in its place; after an OSError the one that was there still is."""
    with written_whole(path / MANIFEST, durable=True) as working:
        working.write_text(json.dumps({"sha256": _json_hash(content), "content": content}, indent=1), encoding="utf-8")


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest's content, its own hash verified. Raises CheckpointError: missing, not JSON, changed, or of another format."""
    file = path / MANIFEST
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        content, stated = record["content"], record["sha256"]
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} does not exist; {path} is not a complete checkpoint") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{file} is damaged: not a readable manifest ({reason})") from error
    if _json_hash(content) != stated:
        raise CheckpointError(f"{file} is damaged: its SHA-256 is not the one it states")
    if content["format"] != FORMAT:
        raise CheckpointError(f"{file} has format {content['format']}; this version reads format {FORMAT}")
    return content


def _json_hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_arrays(path: Path, content: Mapping[str, Any], prefix: str = "") -> dict[str, np.ndarray]:
    """The arrays whose names begin with `prefix`, by name, in host memory; the bytes returned are those that were hashed.

    Their files, which the manifest's `content` lists, are read once, and so are those that describe the tree where all arrays
    are asked for; others stay on the disk. Orbax would read them a second time after the hashes were right. A CheckpointError
    names a file that is missing, truncated or changed.
    """
    listed = {name: file for name, file in content["files"].items() if name.startswith(f"{STATE}/{prefix}")}
    for name, expected in listed.items():  # before anything is read: most damage shows in the sizes
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path / name} is missing; the checkpoint is damaged") from error
        if size != expected["bytes"]:
            sizes = f"{size} bytes; expected {expected['bytes']}"
            raise CheckpointError(f"{path / name} has {sizes}: the checkpoint is damaged")
    names = sorted(listed, key=lambda name: -listed[name]["bytes"])  # so that no large one is left for last alone
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        files = dict(zip(names, pool.map(lambda name: _read_file(path / name, listed[name]), names), strict=True))
    arrays = {}
    for name, (shape, dtype) in content["arrays"].items():
        if name.startswith(prefix):
            arrays[name] = _assembled(files, f"{STATE}/{name}", shape, np.dtype(dtype))
    return arrays


def _assembled(
    files: MutableMapping[str, np.ndarray], folder: str, shape: Sequence[int], dtype: np.dtype
) -> np.ndarray:
    """An array of its zarr chunks, whose bytes are taken out of `files`; of a single one the bytes themselves."""
    only = files.pop(f"{folder}/{'.'.join('0' * len(shape)) or '0'}").view(dtype)
    if only.size == math.prod(shape):
        return only.reshape(shape)
    sizes = json.loads(files[f"{folder}/.zarray"].tobytes())["chunks"]
    whole = memory.empty(tuple(shape), dtype)
    for number in itertools.product(*(range(-(-axis // size)) for axis, size in zip(shape, sizes, strict=True))):
        name = f"{folder}/{'.'.join(map(str, number))}"
        chunk = (files.pop(name).view(dtype) if any(number) else only).reshape(sizes)
        where = tuple(slice(at * size, (at + 1) * size) for at, size in zip(number, sizes, strict=True))
        part = whole[where]  # at an array's end a chunk is larger than what is left
        part[...] = chunk[tuple(slice(length) for length in part.shape)]
    return whole


def _read_file(file: Path, expected: Mapping[str, Any]) -> np.ndarray:
    """The file's bytes, each read once: what is returned is what was hashed."""
    buffer, digest = memory.empty((expected["bytes"],), np.dtype(np.uint8)), hashlib.sha256()
    rest = buffer.data
    try:
        with file.open("rb", buffering=0) as opened:
            while count := opened.readinto(rest[:PIECE]):
                digest.update(rest[:count])
                rest = rest[count:]
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if (actual := digest.hexdigest()) != expected["sha256"]:
        hashes = f"SHA-256 {actual[:12]}...; expected {expected['sha256'][:12]}..."
        raise CheckpointError(f"{file} has other bytes than were written ({hashes}): the checkpoint is damaged")
    return buffer

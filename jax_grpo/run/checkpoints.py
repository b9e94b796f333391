"""Saves a run's whole state in the background and gives it back bit for bit, on any number of devices and processes.

`run.files` makes each checkpoint atomic and hashed. Values leave the device before `save` returns, because the next
update donates its buffers. No pickles. Knows nothing of rollouts or prompts.
"""

import concurrent.futures
import contextlib
import errno
import functools
import hashlib
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

from jax_grpo.config.sections import CheckpointConfig
from jax_grpo.mesh import processes
from jax_grpo.run import files
from jax_grpo.run.files import CheckpointError
from jax_grpo.system.memory import copied

PARAMS = "params/"
COPIERS = 2  # tensors copied off the device side by side: most of a large copy is the kernel's allocation of memory
# Adds to the niceness of the thread that writes: on Linux it is a thread's, and threads that it starts inherit it.
GIVE_WAY = functools.partial(os.nice, 10) if sys.platform == "linux" else None
MEASURED = "measured"  # in a manifest: names of every metric that the run had measured by then
EVALUATED = "eval/"  # names of metrics of held-out prompts begin with it

Say = Callable[[str], None]
Metrics = Mapping[str, float]


def named(tree: Any) -> dict[str, Any]:
    """Leaves of a pytree by slash-separated path: `params/h/0/attn/c_attn/kernel`, `opt_state/0/mu/...`, `beta`."""
    leaves = tree_leaves_with_path(tree)
    return {keystr(path, simple=True, separator="/").removesuffix("/value"): leaf for path, leaf in leaves}


def content_hash(tree: Any, *dtypes: Any) -> str:
    """SHA-256 of every leaf's name, dtype, shape and bytes: equal exactly when the values are. With `dtypes`, of the values as
    they are after having been in each of them.
    """
    digest = hashlib.sha256()
    for name, leaf in sorted(named(tree).items()):
        array = np.asarray(processes.gathered(leaf))
        for dtype in dtypes:
            array = np.asarray(array, dtype)
        digest.update(f"{name} {array.dtype} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


class Origin(NamedTuple):
    """A checkpoint to continue from, every byte verified: its folder, its manifest's content, its arrays in host memory.

    The arrays take as much memory as a save does, until `take` and `restore` remove them.
    """

    path: Path
    content: dict[str, Any]
    arrays: dict[str, np.ndarray]

    @property
    def iteration(self) -> int:
        return int(self.content["iteration"])

    def take(self, prefix: str) -> dict[str, np.ndarray]:
        """Removes the arrays whose names begin with `prefix`, and returns them by the rest of their names."""
        names = [name for name in self.arrays if name.startswith(prefix)]
        return {name.removeprefix(prefix): self.arrays.pop(name) for name in names}


class Checkpoints(contextlib.AbstractContextManager["Checkpoints"]):
    """The checkpoints in `folder`, which is made when the first is saved. As a context manager it leaves no write unfinished.

    With several processes each calls every method, in the same order, and the folder must be visible to all of them.
    """

    def __init__(self, folder: Path, config: CheckpointConfig):
        self.folder, self._config = folder, config
        self._best, self._smallest = config.ranking
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "checkpoint", initializer=GIVE_WAY)
        self._pending: concurrent.futures.Future[None] | None = None
        self._last_saved, self._needed = -1, 0

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.wait()
        except CheckpointError as failure:
            if error is None:
                error = failure
                raise
            error.add_note(str(failure))  # what ended the run comes first
        finally:
            self._writer.shutdown()
            if error is not None:
                saved = files.complete(self.folder)
                newest = f"the newest complete checkpoint is {saved[-1]}: continue with --resume auto" if saved else ""
                error.add_note(newest or f"there is no checkpoint in {self.folder}")

    def require_measured(self, names: Collection[str]) -> None:
        """Raises a CheckpointError, which lists `names`, if checkpoints are to be ranked by a metric that is not among them."""
        if self._config.keep_best and (name := self._best) not in names:
            raise CheckpointError(
                f"checkpoint.best_metric is {name!r}, which this run does not measure; it has {', '.join(sorted(names))}"
            )

    def save(
        self, iteration: int, state: Any, content: Mapping[str, Any], metrics: Metrics, measured: Collection[str] = ()
    ) -> None:
        """Starts writing a pytree of arrays, the `state` after `iteration` iterations; returns once the values are off the device.

        With several processes it returns when all is written, since Orbax has them wait for each other. The iteration that was
        saved last is not saved again.

        Args:
            content: JSON values for the manifest.
            metrics: of this state; they rank the checkpoint if `checkpoint.best_metric` is among them. Process 0's are written.
            measured: names of the other metrics that the run has.

        Raises:
            CheckpointError: the previous write failed, there is no room for this one, or no metric of the name to rank by.
        """
        self.wait()
        if iteration == self._last_saved:
            return
        names = sorted({*metrics, *measured})
        self.require_measured(names)
        arrays = named(state)
        if processes.is_first():
            # Before a byte is copied or written: a write that fails in the middle has filled the disk for everybody.
            free, block = self._space()
            self._needed = files.bytes_on_disk(arrays, block)
            if free < self._needed:
                raise self._failure(iteration, OSError(errno.ENOSPC, ""))
        content = dict(content) | {"arrays": described(arrays), "metrics": finite(metrics), MEASURED: names}
        several = processes.count() > 1
        if not several:
            with concurrent.futures.ThreadPoolExecutor(COPIERS) as pool:
                copies = pool.map(lambda leaf: copied(np.asarray(leaf)), arrays.values())
                arrays = dict(zip(arrays, copies, strict=True))
        self._pending = self._writer.submit(self._write, iteration, arrays, content)
        self._last_saved = iteration
        if several:
            self.wait()

    def _write(self, iteration: int, arrays: Mapping[str, Any], content: dict[str, Any]) -> None:
        files.publish(self.folder, iteration, arrays, content)
        if processes.is_first():
            self._discard_superseded()

    def add_metrics(self, iteration: int, metrics: Metrics) -> None:
        """Adds metrics that were measured after a checkpoint was saved, and ranks it; without that checkpoint it does nothing.

        Raises:
            CheckpointError: as `wait`, or the manifest cannot be read or written.
        """
        self.wait()
        path = self.folder / files.folder_name(iteration)
        if not processes.is_first() or not files.is_checkpoint(path):
            return
        content = files.read_manifest(path)
        content[MEASURED] = sorted({*content.get(MEASURED, content["metrics"]), *metrics})
        content["metrics"] |= finite(metrics)
        try:
            files.write_manifest(path, content)
        except OSError as error:
            raise self._failure(iteration, error) from error
        self._discard_superseded()

    def poll(self) -> None:
        """Raises the error of a write that has ended, without waiting for one that still runs."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Blocks until the newest checkpoint is on the disk. Raises CheckpointError with the reason if it could not be written."""
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                pending.result()
        except Exception as error:  # Orbax, TensorStore and the file system each have their own
            if processes.is_of_a_link(error):
                raise
            raise self._failure(self._last_saved, error) from error

    def _failure(self, iteration: int, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint of iteration {iteration} could not be written to {self.folder}: {_reason(error)} "
            f"({self._space()[0] / 1e6:.1f} MB free without it; it needs up to {self._needed / 1e6:.1f} MB)"
        )

    def _space(self) -> tuple[int, int]:
        """Bytes that are free on the folder's file system, and those of a unit that it allocates."""
        system = os.statvfs(self.folder if self.folder.exists() else self.folder.parent)
        return system.f_bavail * system.f_frsize, system.f_frsize

    def _discard_superseded(self) -> None:
        """Removes complete checkpoints that are neither among the last nor among the best."""
        saved = files.complete(self.folder)
        keep = set(saved[-self._config.keep_last :])
        if self._config.keep_best:
            sign = 1 if self._smallest else -1
            scores = {path: sign * score for path in saved if (score := self._score(path)) is not None}
            keep |= set(sorted(scores, key=scores.__getitem__)[: self._config.keep_best])
        for path in sorted(set(saved) - keep):
            files.discard(path)

    def _score(self, path: Path) -> float | None:
        """The metric that ranks the checkpoint; None where it was not measured with the checkpoint's own weights."""
        with contextlib.suppress(CheckpointError):
            content = files.read_manifest(path)
            # An earlier version, which wrote no names, saved the newest evaluation there was, of the weights before.
            if MEASURED in content or not self._best.startswith(EVALUATED):
                return content["metrics"].get(self._best)
        return None

    def drop_after(self, iteration: int) -> list[Path]:
        """Removes checkpoints of later iterations, which a run that goes back abandons; returns their folders."""
        later = [path for path in files.complete(self.folder) if int(path.name) > iteration]
        for path in later:
            files.discard(path)
        return later


def finite(metrics: Metrics) -> dict[str, float]:
    """The metrics without infinities and NaN, which JSON does not have."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def described(arrays: Mapping[str, Any]) -> dict[str, list]:
    """Shape and dtype of each array, as a manifest has them."""
    return {name: [list(array.shape), str(array.dtype)] for name, array in arrays.items()}


def _reason(error: Exception) -> str:
    """The operating system's message where there is one; TensorStore quotes its number."""
    quoted = re.search(r"os[ _]error(?: |_code=')(\d+)", str(error), re.IGNORECASE)
    number = error.errno if isinstance(error, OSError) else int(quoted[1]) if quoted else None
    return os.strerror(number) if number else " ".join(f"{type(error).__name__}: {error}".split())[:300]


def abstract(tree: Any) -> Any:
    """Shapes, dtypes and shardings of a pytree of arrays, without its values."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def load(path: Path, prefix: str = "") -> Origin:
    """The arrays of a checkpoint whose names begin with `prefix`; a CheckpointError names a file that is missing or damaged."""
    content = files.read_manifest(path)
    return Origin(path, content, files.read_arrays(path, content, prefix))


def newest_sound(folder: Path, say: Say) -> Origin | None:
    """The newest undamaged checkpoint in `folder`, in host memory; None if there are no checkpoints.

    Damaged ones are reported through `say`. Raises a CheckpointError if all of them are damaged.
    """
    if not (saved := files.complete(folder)):
        return None
    for path in reversed(saved):
        try:
            return load(path)
        except CheckpointError as error:
            say(f"warning: {error}; trying the one before it")
    raise CheckpointError(
        f"none of the {len(saved)} checkpoints in {folder} is sound; start again with --restart, or give "
        f"another one with --resume PATH"
    )


def restore(origin: Origin, like: Any, zero_if_absent: Sequence[str] = ()) -> Any:
    """The state of a checkpoint in the structure and shardings of `like` (see `abstract`). Removes the arrays from `origin`.

    The names `zero_if_absent`, which checkpoints of earlier versions may lack, are 0 then. Raises a CheckpointError that names a
    tensor which is missing, left over, or of another shape or dtype.
    """
    wanted = named(like)
    absent = [name for name in zero_if_absent if name in wanted and name not in origin.arrays]
    origin.arrays.update({name: np.zeros(wanted[name].shape, wanted[name].dtype) for name in absent})
    require_same(origin.path, described(origin.arrays), described(wanted))
    leaves = [processes.placed(origin.arrays.pop(name), leaf.sharding) for name, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def require_same(path: Path, saved: Mapping[str, list], expected: Mapping[str, list]) -> None:
    """Raises a CheckpointError for the first tensor whose [shape, dtype] in the checkpoint `path` is not the expected one."""
    for name in {**expected, **saved}:
        if (needed := expected.get(name)) != (there := saved.get(name)):
            has = "is not in the checkpoint" if there is None else f"has shape {there[0]} and dtype {there[1]}"
            needs = "nothing of this name" if needed is None else f"shape {needed[0]} and dtype {needed[1]}"
            raise CheckpointError(
                f"{path}: tensor {name!r} {has}; this run needs {needs}. The model's sizes, model.param_dtype and the "
                f"optimiser must be those of the run that saved it"
            )

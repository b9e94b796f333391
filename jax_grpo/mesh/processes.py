"""The processes of a run: how they connect, what they exchange, and how all end when one does.

Every process runs the same program on the same prompts' numbers; what is exchanged here is of the host: scores, texts, decisions.
JAX's runtime connects them and notices one that is gone. Every function that exchanges is called by all of them, in the same
order. Alone, a process gets back what it gives. Knows nothing of what is exchanged.
"""

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding

from jax_grpo.config import ConfigError
from jax_grpo.config.sections import MeshConfig

HEARTBEAT_S = 30  # seconds after which JAX takes a silent process for dead, and ends the others
# Words of errors of whatever carries a collective: with another process gone, it is the first to notice.
OF_A_LINK = ("Gloo", "NCCL", "coordination service")


class ProcessLost(RuntimeError):
    """Another process of the run has ended or cannot be reached; its own output says why."""


class Request(Protocol):
    """Whether this process was asked to stop."""

    @property
    def requested(self) -> bool: ...


def count() -> int:
    """How many there are; touches no device of a process that is alone."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def index() -> int:
    """The number of this one, from 0."""
    return jax.process_index() if count() > 1 else 0


def is_first() -> bool:
    """Whether this is process 0, which alone logs and writes, but for checkpoints."""
    return index() == 0


@contextlib.contextmanager
def connected(config: MeshConfig) -> Iterator[None]:
    """Around a run: connects its processes, before JAX has looked at a device; they stay connected.

    Raises:
        ConfigError: JAX finds no such processes, or the mesh is not of all their devices.
        ProcessLost: in the block, a collective failed.
    """
    if config.coordinator is not None and not jax.distributed.is_initialized():
        _connect(config)
    try:
        yield
    except (RuntimeError, ValueError) as error:  # JAX gives one or the other for the same failure
        if not is_of_a_link(error):
            raise
        lost = ProcessLost(
            f"process {index()} of {count()}: another one has ended or does not answer, and its own output says why; this one "
            f"ends too ({str(error).splitlines()[0][:200]})"
        )
        for note in getattr(error, "__notes__", ()):
            lost.add_note(note)
        raise lost from error


def is_of_a_link(error: Exception) -> bool:
    """Whether an error is a collective's that failed: of several processes, another one is gone."""
    return count() > 1 and any(word in str(error) for word in OF_A_LINK)


def _connect(config: MeshConfig) -> None:
    number, processes = config.place or (None, None)
    explicit = config.place is not None and config.coordinator != "auto"
    try:
        jax.distributed.initialize(
            None if config.coordinator == "auto" else config.coordinator,
            processes,
            number,
            cluster_detection_method="deactivate" if explicit else None,
            heartbeat_timeout_seconds=HEARTBEAT_S,
        )
    except ValueError as error:
        raise ConfigError(
            f"mesh.coordinator {config.coordinator}: JAX finds no Slurm, Kubernetes or Open MPI here that says the rest "
            f"({error}); expected mesh.coordinator HOST:PORT of process 0, and mesh.process"
        ) from error
    if config.devices != (devices := jax.device_count()):
        sizes = " x ".join(f"mesh.{axis} {size}" for axis, size in config.sizes.items())
        raise ConfigError(
            f"{sizes} is {config.devices} devices, and {count()} processes have {devices}; expected all of them in the mesh"
        )


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Ends this process as soon as the block fails, where there are several, after its message.

    JAX's own way out waits for all processes; the others wait for this one's part of a collective, and learn from its end.
    """
    try:
        yield
    except BaseException as error:
        if count() == 1:
            raise
        if isinstance(error, SystemExit):
            print(error.code, file=sys.stderr)
        else:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def placed(x: Any, sharding: Sharding) -> jax.Array:
    """An array on devices that may be other processes'; what every host has whole, each puts on its own."""
    on_the_host = not isinstance(x, jax.Array) or x.is_fully_addressable
    if sharding.is_fully_addressable or not on_the_host:
        return jax.device_put(x, sharding)
    whole = np.asarray(x)
    return jax.make_array_from_callback(whole.shape, sharding, lambda where: whole[where])


def gathered(tree: Any) -> Any:
    """Arrays that lie on devices of several processes, whole, as NumPy's, in each of them."""
    return tree if count() == 1 else jax.tree.map(_whole, tree)


def _whole(x: Any) -> Any:
    if not isinstance(x, jax.Array):
        return x
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return multihost_utils.process_allgather(x, tiled=True)


def exchanged(value: Any) -> list[Any]:
    """A JSON value of each process, in their order."""
    if count() == 1:
        return [value]
    data = np.frombuffer(json.dumps(value, default=_plain).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(data.size))
    room = 1 << int(sizes.max() - 1).bit_length()  # a power of two: the program that moves it is compiled for each size
    rows = multihost_utils.process_allgather(np.pad(data, (0, room - data.size)))
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def _plain(value: Any) -> Any:
    """What JSON has no word for: NumPy's numbers and arrays as Python's, anything else as its text."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


def wait_for_all() -> None:
    """Returns when every process is here."""
    exchanged(None)


def own(rows: int) -> slice:
    """This process's share of so many rows, in order: all rows are somebody's."""
    first, last = (rows * number // count() for number in (index(), index() + 1))
    return slice(first, last)


class Agreed:
    """A request to stop that all processes follow as soon as one has it; each looks at the same places of its program."""

    def __init__(self, request: Request):
        self._own, self._agreed = request, False

    @property
    def requested(self) -> bool:
        self._agreed = self._agreed or any(exchanged(self._own.requested))
        return self._agreed

"""Checkpoints of a run of several processes, each of which writes the parts of the arrays that it has.

Every process calls every method, in the same order; what changes the folder but for arrays is process 0's. It must be one that
all of them see. A checkpoint is what `checkpoints` reads, in any number of processes. `save` returns when it is on the disk:
Orbax has the processes wait for each other, which cannot be done beside their training.
"""

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from jax_grpo.mesh import processes
from jax_grpo.run import files
from jax_grpo.run.checkpoints import MEASURED, CheckpointError, Checkpoints, Metrics, described, finite, named


class SharedCheckpoints(Checkpoints):
    """See the module, and `Checkpoints`."""

    def save(
        self, iteration: int, state: Any, content: Mapping[str, Any], metrics: Metrics, measured: Collection[str] = ()
    ) -> None:
        """Writes a pytree of arrays that lie on the devices of all processes; see `Checkpoints.save`.

        A CheckpointError, in the process that it happens in: there is no room, no such metric, or a part cannot be written.
        """
        if iteration == self._last_saved:
            return
        names = sorted({*metrics, *measured})
        self.require_measured(names)
        leaves = named(state)
        if processes.is_first():
            self._require_room(iteration, leaves)
        content = dict(content) | {"arrays": described(leaves), "metrics": finite(metrics), MEASURED: names}
        try:
            publish(self.folder, iteration, leaves, content)
        except Exception as error:  # Orbax, TensorStore and the file system each have their own
            if processes.is_of_a_link(error):
                raise
            raise CheckpointError(self._failure(iteration, error)) from error
        self._last_saved = iteration
        if processes.is_first():
            self._discard_superseded()

    def add_metrics(self, iteration: int, metrics: Metrics) -> None:
        """See `Checkpoints.add_metrics`."""
        if processes.is_first():
            super().add_metrics(iteration, metrics)


def publish(folder: Path, iteration: int, arrays: Mapping[str, Any], content: dict[str, Any]) -> None:
    """Writes one checkpoint into the folder of all; see `files.publish`. Each process hashes its share of the files."""
    working, final = folder / f"{files.UNFINISHED}{files.folder_name(iteration)}", folder / files.folder_name(iteration)
    if processes.is_first():
        shutil.rmtree(working, ignore_errors=True)
        working.mkdir(parents=True)
    processes.wait_for_all()
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)
    with ocp.Checkpointer(handler) as writer:
        writer.save((working / files.STATE).absolute(), args=ocp.args.PyTreeSave(dict(arrays)))
    names = files.written(working)
    own = files.fingerprints(working, names[processes.own(len(names))])
    hashes = {name: of_file for part in processes.exchanged(own) for name, of_file in part.items()}
    if processes.is_first():
        files.put_in_place(working, final, content | {"format": files.FORMAT, "iteration": iteration, "files": hashes})
    processes.wait_for_all()

"""What `test_processes` looks at in two processes that train nothing: `python processes_child.py ADDRESS PROCESS FOLDER`.

The last line but for the failure at the end is a JSON object of what the process found. Process 1 then fails, and process 0 waits
for it. Not collected by pytest.
"""

import json
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jax_grpo.config.sections import CheckpointConfig, MeshConfig
from jax_grpo.mesh import Layout, layout_of, processes
from jax_grpo.run.checkpoints import Checkpoints, abstract, content_hash, load, restore
from jax_grpo.tasks.base import Logged, Prompt, TrainerState
from jax_grpo.tasks.shared import shared_score

ROWS, STATE_AFTER = 5, 3


class Lengths:
    """Its one component is a text's length, and about no text of two letters; what it scored is logged."""

    name, component_weights = "lengths", {"length": 1.0}

    def begin(self, state, completion_ids):
        self._ids = completion_ids

    def score(self, prompts, completions):
        assert [prompt.text for prompt in prompts] == completions and list(self._ids) == [[len(x)] for x in completions]
        self._seen = list(completions)
        lengths = [len(text) for text in completions]
        return {"length": np.ma.masked_array(lengths, [length == 2 for length in lengths])}

    def logged(self):
        return Logged({"seen": [float(len(self._seen))]}, {"text": self._seen} if processes.is_first() else {})


class Asked:
    """Stands for a signal that came to process 1 alone."""

    requested = False


def state() -> dict:
    """A state's kinds of leaves: cut over `fsdp`, and whole."""
    table = np.arange(64, dtype=np.float32).reshape(8, 8)
    return {"params": {"wte": {"embedding": table}, "ln_f": {"scale": table[0]}}, "step": np.int32(7)}


def found(folder: Path) -> dict:
    layout = layout_of(MeshConfig(data=2, fsdp=2))
    placed = layout.place(state())
    doubled = jax.jit(lambda tree: layout.constrain(jax.tree.map(lambda x: x + x, tree)))(placed)
    saved = Checkpoints(folder / "checkpoints", CheckpointConfig(keep_last=1, keep_best=0))
    for iteration in (STATE_AFTER - 1, STATE_AFTER):
        saved.save(iteration, doubled, {"identity": {}}, {"loss": float(processes.index())})
    saved.add_metrics(STATE_AFTER, {"eval/score": 0.5})
    origin = load(folder / "checkpoints" / f"{STATE_AFTER:06d}")
    on_another_mesh = Layout(jax.sharding.Mesh(layout.mesh.devices.reshape(1, 4, 1), layout.mesh.axis_names))
    again = restore(origin, abstract(on_another_mesh.place(state())))
    rows = processes.own(ROWS)
    texts = ["a", "bb", "ccc", "dd", "e\udc80"][rows]
    scores = shared_score(
        Lengths(), [Prompt(x, 0) for x in texts], texts, [[len(x)] for x in texts], TrainerState(0, 1)
    )
    questions = Asked()
    agreed = processes.Agreed(questions)
    before, questions.requested = agreed.requested, processes.index() == 1
    return {
        "count": processes.count(),
        "index": processes.index(),
        "own": [rows.start, rows.stop],
        "exchanged": processes.exchanged({"of": "x" * (1 + 300 * processes.index())}),
        "embedding": processes.gathered(doubled)["params"]["wte"]["embedding"].tolist(),
        "on_a_device": [len(x.addressable_shards) for x in jax.tree.leaves(doubled)],
        "hash": content_hash(doubled),
        "hash_of_the_restored": content_hash(again),
        "parts_after": [list(again["params"]["wte"]["embedding"].addressable_shards[0].data.shape)],
        "texts": scores.texts,
        "length": scores.components["length"].tolist(),
        "logged": [scores.logged.metrics, scores.logged.extras],
        "agreed": [before, agreed.requested],
    }


def main() -> None:
    address, number, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    with (
        processes.ending_at_once(),
        processes.connected(MeshConfig(data=2, fsdp=2, coordinator=address, process=f"{number}/2")),
    ):
        print(json.dumps(found(folder)), flush=True)
        if number == 1:
            raise RuntimeError("its own reason")
        processes.wait_for_all()
        jnp.zeros(1).block_until_ready()
        os._exit(0)  # not reached


if __name__ == "__main__":
    main()

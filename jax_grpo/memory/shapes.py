"""The programs of a config with the shapes and dtypes of their arguments; nothing is allocated, no weights are read.

Shapes follow each other as in training: what one program returns is what the next one gets. Knows no device.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import SingleDeviceSharding

from jax_grpo.batch import Batch, cut, take
from jax_grpo.checkpoint_files import is_checkpoint, read_manifest
from jax_grpo.config import Config
from jax_grpo.config_files import weights_directory
from jax_grpo.config_sections import ModelConfig
from jax_grpo.evaluation import during_training
from jax_grpo.loading import random_architecture
from jax_grpo.model import GPT2, GPT2Config
from jax_grpo.programs import make_programs, needs_old_logp, padded_prompt, reference_copy, unscored
from jax_grpo.tasks import make_task
from jax_grpo.tokenizer import Tokenizer
from jax_grpo.update import TrainState, init_state
from jax_grpo.weights import read_config

EVALUATION = "evaluation/"  # beginning of the names of its programs
HOST = "pinned_host"  # JAX's name of host memory that a device can read
GPT2_SMALL = {"num_layers": 12, "num_heads": 12, "hidden_size": 768, "max_position_embeddings": 1024}


class Program(NamedTuple):
    """One program of a run: what jit makes of `function` for `arguments`.

    Attributes:
        name: `rollout`, `score`, `reference` or `update`; `evaluation/greedy` or `evaluation/sampled` of held-out prompts.
        function: jitted; the trainer's own.
        arguments: trees of `jax.ShapeDtypeStruct`.
        holds: which of the run's resident arrays are among the arguments: `parameters`, `moments`, `reference`.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    holds: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Run:
    """Programs of a run and the arrays that stay in memory from one to the next, in bytes by name.

    Attributes:
        programs: an iteration's in the order they run, then the evaluation's.
        resident: on the device.
        in_host: kept in the host's memory (`update.offload_optimizer`); see `seen_from`.
        architecture, assumed: see `architecture`.
    """

    programs: tuple[Program, ...]
    resident: dict[str, int]
    in_host: dict[str, int]
    architecture: GPT2Config
    assumed: str | None

    def seen_from(self, shares_host_memory: bool) -> "Run":
        """The run as a device sees it: to one whose memory is the host's, nothing is elsewhere."""
        if not shares_host_memory:
            return self
        resident = {name: bytes_ + self.in_host.get(name, 0) for name, bytes_ in self.resident.items()}
        return dataclasses.replace(self, resident=resident, in_host={})


def size(tree: Any) -> int:
    """Bytes of a tree of arrays or shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _in_host_memory(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    # `jax.eval_shape` forgets the memory. The device is whatever the program is compiled for (`aot.on_device`).
    return leaf.update(sharding=SingleDeviceSharding(jax.devices()[0], memory_kind=HOST)) if leaf.ndim else leaf


def architecture(config: ModelConfig, tokenizer: Tokenizer) -> tuple[GPT2Config, str | None]:
    """The model's sizes, and what had to be assumed about them.

    A folder of weights that is not on this machine is no reason not to plan: sizes of the config stand in for it, and
    those of GPT-2 small for sizes that it does not give.

    Raises:
        WeightsError, CheckpointError: the folder is there and is not a GPT-2.
    """
    if config.weights is None:
        return random_architecture(config, tokenizer), None
    folder = weights_directory(config.weights)
    if is_checkpoint(folder):
        return GPT2Config(**read_manifest(folder)["architecture"]), None
    if (folder / "config.json").exists():
        return read_config(folder), None
    sizes = {name: getattr(config, name) or value for name, value in GPT2_SMALL.items()}
    words = ", ".join(f"{name} {value}" for name, value in sizes.items())
    return (
        random_architecture(config.model_copy(update=sizes), tokenizer),
        f"{folder} is not on this machine: assumed {words} (model.num_layers and its kin say otherwise)",
    )


def run_of(config: Config) -> Run:
    """The programs that `jax_grpo.train` runs with this config, on prompts of the widest bucket."""
    tokenizer, task = Tokenizer.load(config.model.tokenizer), make_task(config.task)
    try:
        return _run_of(config, tokenizer, task)
    finally:
        task.close()


def _run_of(config: Config, tokenizer: Tokenizer, task: Any) -> Run:
    sizes, assumed = architecture(config.model, tokenizer)
    model = config.model

    def build() -> GPT2:
        dtypes = {"param_dtype": jnp.dtype(model.param_dtype), "compute_dtype": jnp.dtype(model.compute_dtype)}
        return GPT2(sizes, rngs=nnx.Rngs(0), remat=model.recomputed, vocabulary=tokenizer.vocab_size, **dtypes)

    graphdef, params = nnx.split(nnx.eval_shape(build), nnx.Param)
    state: TrainState = jax.eval_shape(lambda params: init_state(params, config), params)
    moments, in_host = size(state.opt_state), {}
    if config.update.offload_optimizer:
        state = dataclasses.replace(state, opt_state=jax.tree.map(_in_host_memory, state.opt_state))
        in_host["moments"] = size([leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.sharding])
    programs = make_programs(config, graphdef, tokenizer, task)
    prompts, width = config.prompts.per_iteration, padded_prompt(config)

    def int32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    prompt = [int32(prompts, width)] * 2  # ids and mask
    asked = (params, *prompt, int32(prompts), int32(prompts), int32(), int32(), int32(prompts))
    found = [Program("rollout", programs.generate, asked, ("parameters",))]
    rollout = jax.eval_shape(programs.generate, *asked)
    bare: Batch = jax.eval_shape(unscored, *prompt, rollout)
    batch = bare
    if needs_old_logp(config):
        found.append(Program("score", programs.score, (params, bare), ("parameters",)))
        logp, entropy = jax.eval_shape(programs.score, params, bare)
        kept = entropy if config.objective.entropy_quantile > 0 else None
        batch = dataclasses.replace(batch, old_logp_BS=logp, entropy_BS=kept)
    resident = {"parameters": size(params), "moments": moments - in_host.get("moments", 0)}
    if config.kl.beta > 0:
        reference = jax.eval_shape(lambda params: reference_copy(params, config), params)
        found.append(Program("reference", programs.score, (reference, bare), ("reference",)))
        resident["reference"] = size(reference)
        batch = dataclasses.replace(batch, ref_logp_BS=jax.eval_shape(programs.score, reference, bare)[0])
    piece = jax.eval_shape(lambda batch: take(cut(batch, config.update.minibatches), 0), batch)
    found.append(Program("update", programs.update, (state, piece), ("parameters", "moments")))
    if config.evaluation.positions:
        settings = config.rollout
        modes = during_training.make_programs(
            graphdef, tokenizer, task, max_new_tokens=settings.max_new_tokens, temperature=settings.temperature
        )
        batch_of = during_training.BATCH
        held_out = [int32(batch_of, width)] * 2
        asked = (params, *held_out, int32(batch_of), int32(batch_of), int32(), int32(), int32(batch_of))
        found += [Program(f"{EVALUATION}{mode}", made, asked, ("parameters",)) for mode, made in modes.items()]
    return Run(tuple(found), resident, in_host, sizes, assumed)

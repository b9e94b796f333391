"""The programs of a config with the shapes and dtypes of their arguments; nothing is allocated, no weights are read.

Shapes follow each other as in training: what one program returns is what the next one gets. Knows no device.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import SingleDeviceSharding

from jax_grpo.batch import Batch, piece, split
from jax_grpo.config import Config
from jax_grpo.config.files import weights_directory
from jax_grpo.config.sections import ModelConfig
from jax_grpo.evaluate import during_training
from jax_grpo.mesh import ONE_DEVICE, Layout, require_fitting, require_one_device
from jax_grpo.model.gpt2 import GPT2Config
from jax_grpo.model.named import build_model, random_architecture
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.model.weights import read_config
from jax_grpo.optimiser import reference_copy
from jax_grpo.programs import make_programs, needs_old_logp, padded_prompt, unscored, with_logps
from jax_grpo.rollout.episodes import Played
from jax_grpo.rollout.generate import Kept, Rollout
from jax_grpo.run.files import is_checkpoint, read_manifest
from jax_grpo.tasks import make_task
from jax_grpo.update import TrainState, init_state

LATER_TURNS = "rollout/later turns"  # an episode's program after the first
EVALUATION = "evaluation/"  # beginning of the names of its programs
HOST = "pinned_host"  # JAX's name of host memory that a device can read
GPT2_SMALL = {"num_layers": 12, "num_heads": 12, "hidden_size": 768, "max_position_embeddings": 1024}


class Program(NamedTuple):
    """One program of a run: what jit makes of the trainer's own function for these arguments."""

    # `rollout`, of episodes also `rollout/later turns`; `score`, `reference` or `update`; `evaluation/greedy` or
    # `evaluation/sampled` of held-out prompts.
    name: str
    function: Callable[..., Any]  # jitted
    arguments: tuple[Any, ...]  # trees of `jax.ShapeDtypeStruct`
    holds: tuple[str, ...] = ()  # the resident arrays that are among them: `parameters`, `moments`, `reference`

    @property
    def generates(self) -> bool:
        """Whether it makes completions, and so has a cache; micro-batches do not change its memory."""
        return self.name in ("rollout", LATER_TURNS) or self.name.startswith(EVALUATION)


@dataclasses.dataclass(frozen=True)
class Run:
    """Programs of a run and the arrays that stay in memory from one to the next."""

    programs: tuple[Program, ...]  # an iteration's in the order they run, then the evaluation's
    resident: dict[str, int]  # bytes on the device by name
    in_host: dict[str, int]  # bytes in the host's memory, where that is not the device's (`update.offload_optimizer`)
    architecture: GPT2Config
    assumed: str | None  # see `architecture`
    mesh: dict[str, int]  # devices along each axis

    def beside(self, program: Program) -> int:
        """Bytes of resident arrays that are not among the program's arguments."""
        return sum(bytes_ for name, bytes_ in self.resident.items() if name not in program.holds)

    def program(self, name: str) -> Program:
        """The program of that name."""
        return next(program for program in self.programs if program.name == name)


def size(tree: Any) -> int:
    """Bytes of a tree of arrays or shapes; of what is cut over a mesh, those on each of its devices."""
    return sum(math.prod(on_a_device(leaf)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def on_a_device(leaf: Any) -> tuple[int, ...]:
    """Sizes of what one device has of an array or shape; all of it where no device is meant yet."""
    sharding = getattr(leaf, "sharding", None)
    return leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)


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
    assumed = f"{folder} is not on this machine: assumed {words} (model.num_layers and its kin say otherwise)"
    return random_architecture(config.model_copy(update=sizes), tokenizer), assumed


def run_of(config: Config, shares_host_memory: bool = False, layout: Layout = ONE_DEVICE) -> Run:
    """The programs that `jax_grpo.train` runs with this config, on prompts of the widest bucket, as a device sees them.

    On a mesh `layout` is of the devices that they are compiled for, and bytes are of each of them.
    """
    if layout is ONE_DEVICE:
        require_one_device(config.mesh, "this report")
    tokenizer = Tokenizer.load(config.model.tokenizer)
    sizes, assumed = architecture(config.model, tokenizer)
    model = nnx.eval_shape(lambda: build_model(config.model, sizes, seed=0, vocabulary=tokenizer.vocab_size))
    graphdef, params = nnx.split(model, nnx.Param)
    require_fitting(config.mesh, sizes.num_heads, sizes.hidden_size)
    params = layout.shapes(params)
    with contextlib.closing(make_task(config.task)) as task:
        functions = make_programs(config, graphdef, tokenizer, task, layout)
        evaluates = config.evaluation.positions > 0
        modes = during_training.make_programs(graphdef, tokenizer, task, config, layout) if evaluates else {}
    state: TrainState = layout.shapes(jax.eval_shape(lambda params: init_state(params, config), params))
    in_host = {}
    if config.update.offload_optimizer:
        state = dataclasses.replace(state, opt_state=jax.tree.map(_in_host_memory, state.opt_state))
        if not shares_host_memory:
            in_host["moments"] = size([leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.sharding])
    resident = {"parameters": size(params), "moments": size(state.opt_state) - in_host.get("moments", 0)}
    inputs = _generation_arguments(params, config.prompts.per_iteration, padded_prompt(config), layout)
    rollout = jax.eval_shape(functions.generate, *inputs)
    programs = [Program("rollout", functions.generate, inputs, ("parameters",))]
    if functions.next_turn is not None:
        rollout, kept = rollout
        later = _later_turn_arguments(inputs, rollout, kept, config.windows().observation, layout)
        programs.append(Program(LATER_TURNS, functions.next_turn, later, ("parameters",)))
        rollout = _in_columns(rollout, config.windows().columns)
    bare: Batch = layout.rows(jax.eval_shape(unscored, *inputs[1:3], rollout))
    if needs_old_logp(config) or state.reference is not None:
        programs.append(Program("score", functions.score, (params, bare), ("parameters",)))
    reference = None
    if config.kl.beta > 0:
        reference = layout.shapes(jax.eval_shape(lambda params: reference_copy(params, config.kl), params))
        programs.append(Program("reference", functions.score, (reference, bare), ("reference",)))
        resident["reference"] = size(reference)

    if functions.partner is not None:
        held = reference if getattr(task, "asks", None) == "reference" else params
        asked = _generation_arguments(held, during_training.BATCH, padded_prompt(config), layout)
        programs.append(
            Program("partner", functions.partner.program, asked, ("parameters" if held is params else "reference",))
        )

    def first_minibatch(*given: Any) -> Batch:
        return piece(split(with_logps(config, functions.score, *given), config.update.minibatches), 0)

    minibatch = layout.rows(jax.eval_shape(first_minibatch, params, reference, bare))
    trained = ("parameters", "moments") if state.reference is None else ("parameters", "moments", "reference")
    programs.append(Program("update", functions.update, (state, minibatch), trained))
    inputs = _generation_arguments(params, during_training.BATCH, padded_prompt(config), layout)
    for name, jitted in modes.items():
        given = inputs
        if name.endswith(during_training.LATER_TURNS):
            first, kept = jax.eval_shape(modes[name.removesuffix(during_training.LATER_TURNS)], *inputs)
            given = _later_turn_arguments(inputs, first, kept, config.windows().observation, layout)
        programs.append(Program(f"{EVALUATION}{name}", jitted, given, ("parameters",)))
    return Run(tuple(programs), resident, in_host, sizes, assumed, config.mesh.sizes)


def generated(program: Program) -> tuple[Rollout, Kept | None]:
    """Shapes of what a program that generates returns; None where no later turn reads its cache."""
    made = jax.eval_shape(program.function, *program.arguments)
    return (made, None) if isinstance(made, Rollout) else made


def _in_host_memory(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    # `jax.eval_shape` forgets the memory. The device is whatever the program is compiled for (`compile.compile_program`).
    return leaf.update(sharding=SingleDeviceSharding(jax.devices()[0], memory_kind=HOST)) if leaf.ndim else leaf


def _generation_arguments(params: Any, prompts: int, width: int, layout: Layout = ONE_DEVICE) -> tuple[Any, ...]:
    """Parameters, the ids and mask of so many prompts, and the numbers of `rollout.generate.make_generate`'s program."""
    tokens, each, one = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((prompts, width), (prompts,), ()))
    return params, *layout.rows((tokens, tokens, each, each, one, one, each))


def _later_turn_arguments(
    first: tuple[Any, ...], rollout: Rollout, kept: Kept, observation: int, layout: Layout
) -> tuple[Any, ...]:
    """Arguments of `rollout.turns.make_next_turn`'s program after those of the first turn and what it returned."""
    params, _, mask_PT, state_P, number_P, seed, step, cap_P = first
    rows = rollout.stopped_PG.shape
    tokens, goes_on = jax.ShapeDtypeStruct((*rows, observation), jnp.int32), jax.ShapeDtypeStruct(rows, jnp.bool_)
    kept, (rollout, tokens, goes_on) = layout.caches(kept), layout.rows((rollout, tokens, goes_on))
    return params, kept, rollout, mask_PT, tokens, tokens, goes_on, state_P, number_P, seed, step, cap_P, step


def _in_columns(rollout: Rollout, columns: int) -> Played:
    """Shapes of whole episodes, from those of one turn."""

    def wide(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*x.shape[:2], columns), x.dtype)

    ids, mask, logp = (wide(x) for x in rollout[:3])  # pyright: ignore[reportArgumentType]
    return Played(ids, mask, logp, rollout.stopped_PG, mask, [])  # pyright: ignore[reportArgumentType]

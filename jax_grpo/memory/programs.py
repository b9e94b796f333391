"""The programs of a config with the shapes and dtypes of their arguments; nothing is allocated, no weights are read.

Shapes follow each other as in training: the results of one program are the arguments of the next. Knows no device.
"""

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import SingleDeviceSharding

from jax_grpo.batch import Batch, piece, split
from jax_grpo.config import Config
from jax_grpo.config.files import weights_directory
from jax_grpo.config.model import ModelConfig
from jax_grpo.evaluate import during_training
from jax_grpo.mesh import ONE_DEVICE, Layout, require_fitting, require_one_device
from jax_grpo.model.architecture import Architecture
from jax_grpo.model.tokenizer import Tokenizer, TokenizerError, tokenizer_of
from jax_grpo.model.weights import read_config
from jax_grpo.optimiser import reference_copy
from jax_grpo.policy.adapters import divided, joined
from jax_grpo.policy.named import build_model, random_architecture
from jax_grpo.programs import make_programs, unscored, with_logps
from jax_grpo.rollout.generate import EpisodeCache, Rollout
from jax_grpo.run.files import is_checkpoint, read_manifest
from jax_grpo.tasks import make_task
from jax_grpo.tasks.base import Task
from jax_grpo.update import TrainState, init_state

LATER_TURNS = "rollout/later turns"  # an episode's program after the first
EVALUATION = "evaluation/"  # beginning of the names of its programs
HOST = "pinned_host"  # JAX's name of host memory that a device can read
GPT2_SMALL = {"num_layers": 12, "num_heads": 12, "hidden_size": 768, "max_position_embeddings": 1024}


class Program(NamedTuple):
    """One program of a run: the trainer's own function, to be compiled for these arguments."""

    # `rollout`, of episodes also `rollout/later turns`; `score`, `reference` or `update`; `partner` that a task asks between turns;
    # `evaluation/greedy` or `evaluation/sampled` of held-out prompts, of episodes also `evaluation/greedy, later turns`.
    name: str
    function: Callable[..., Any]  # jitted
    arguments: tuple[Any, ...]  # trees of `jax.ShapeDtypeStruct`
    holds: tuple[str, ...] = ()  # the resident arrays that are among them: `base`, `parameters`, `moments`, `reference`

    @property
    def weights(self) -> list[Any]:
        """Shapes of the matrices that it reads: parameters, moments, and what is under adapters."""
        trees = (self.arguments[0], *(self.arguments[2:] if self.name == "update" else ()))
        return [leaf for leaf in jax.tree.leaves(trees) if leaf.ndim >= 2]

    @property
    def generates(self) -> bool:
        """Whether it makes completions, and so has a cache; micro-batches do not change its memory."""
        return self.name.startswith(("rollout", "partner", EVALUATION))

    @property
    def goes_on(self) -> bool:
        """Whether it generates an episode's turns after the first."""
        return self.name.endswith("later turns")


class Run(NamedTuple):
    """Programs of a run and the arrays that stay in memory from one to the next."""

    programs: tuple[Program, ...]  # an iteration's in the order they run, then the evaluation's
    resident: dict[str, int]  # bytes on the device by name
    in_host: dict[str, int]  # bytes by name of what stays in the host's memory, where that is not the device's
    architecture: Architecture
    assumed: str | None  # see `architecture`
    mesh: dict[str, int]  # devices along each axis

    def beside(self, program: Program) -> int:
        """Bytes of resident arrays that are not among the program's arguments."""
        return sum(bytes_ for name, bytes_ in self.resident.items() if name not in program.holds)

    def program(self, name: str) -> Program:
        """The program of that name."""
        return next(program for program in self.programs if program.name == name)


def size(tree: Any) -> int:
    """Bytes of a tree of arrays or shapes; of arrays that are cut over a mesh, those on each of its devices."""
    return sum(math.prod(on_a_device(leaf)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def on_a_device(leaf: Any) -> tuple[int, ...]:
    """Sizes of an array's part on one device; of the whole array where no device is chosen yet."""
    sharding = getattr(leaf, "sharding", None)
    return leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)


def architecture(config: ModelConfig, tokenizer: Tokenizer) -> tuple[Architecture, str | None]:
    """The model's sizes, and a sentence on those that had to be assumed (None: none).

    A folder of weights that is not on this machine is no reason not to plan: sizes of the config stand in for it, and
    those of GPT-2 small for sizes that it does not give.

    Raises:
        WeightsError, CheckpointError: the folder, or the file `model.architecture`, describes no model that can be built.
    """
    assumed = None
    if config.weights is not None:
        folder = weights_directory(config.weights)
        if is_checkpoint(folder):
            return Architecture.from_json(read_manifest(folder)["architecture"]), None
        if (folder / "config.json").exists():
            return read_config(folder), None
        if config.architecture is None:
            sizes = {name: getattr(config, name) or value for name, value in GPT2_SMALL.items()}
            words = ", ".join(f"{name} {value}" for name, value in sizes.items())
            assumed = f"{folder} is not on this machine: assumed {words} (model.num_layers and its kin say otherwise)"
            config = config.model_copy(update=sizes)
    return random_architecture(config, tokenizer), assumed


def _tokenizer_and_sizes(config: ModelConfig) -> tuple[Tokenizer, Architecture, str | None]:
    """The tokenizer, and the results of `architecture`.

    For weights that are not on this machine, or lie there without a tokenizer, GPT-2's stands in, with a token for each row that
    the model has: programs depend on how many there are.
    """
    try:
        tokenizer, stands_in = Tokenizer.load(tokenizer_of(config)), False
    except TokenizerError:
        tokenizer, stands_in = Tokenizer.load("gpt2"), True
    sizes, assumed = architecture(config, tokenizer)
    if stands_in:
        tokenizer.vocab_size = sizes.vocab_size
    return tokenizer, sizes, assumed


def run_of(
    config: Config, shares_host_memory: bool = False, layout: Layout = ONE_DEVICE, task: Task | None = None
) -> Run:
    """The programs that `jax_grpo.train` runs with this config, on prompts of the widest bucket, as a device sees them.

    On a mesh `layout` is of the devices that they are compiled for, and bytes are of each of them. `task` is the config's own, if
    there is none yet.
    """
    if layout is ONE_DEVICE:
        require_one_device(config.mesh, "this report")
    tokenizer, sizes, assumed = _tokenizer_and_sizes(config.model)
    model = nnx.eval_shape(lambda: build_model(config.model, sizes, seed=0, vocabulary=tokenizer.vocab_size))
    graphdef, params = nnx.split(model, nnx.Param)
    columns = sum(sizes.qkv), sizes.inner, *(() if config.model.adapter is None else sizes.qkv)
    require_fitting(config.mesh, sizes.num_heads, sizes.kv_heads, sizes.hidden_size, *columns)
    params = layout.parameter_shapes(params)
    trained, base = divided(params)
    learning, windows = config.learning(), config.windows()
    with contextlib.ExitStack() as cleanup:
        if task is None:
            task = cleanup.enter_context(contextlib.closing(make_task(config.task)))
        functions = make_programs(config, graphdef, tokenizer, task, layout)
        evaluates = config.evaluation.positions > 0
        modes = during_training.make_programs(graphdef, tokenizer, task, config, layout) if evaluates else {}
    state, own = _state_and_reference(config, trained, layout)
    reference = None if own is None else joined(own, base)
    of_base = () if base is None else ("base",)
    all_weights = (*of_base, "parameters")
    inputs = _first_turn(config, layout, params, config.prompts.per_iteration)
    rollout = jax.eval_shape(functions.generate, *inputs)
    programs = [Program("rollout", functions.generate, inputs, all_weights)]
    if functions.next_turn is not None:
        later = _later_turn(inputs, rollout, windows.observation, layout)
        programs.append(Program(LATER_TURNS, functions.next_turn, later, all_weights))
        rollout = _in_columns(rollout[0], windows.columns)
    batch: Batch = layout.prompt_shapes(jax.eval_shape(unscored, *inputs[1:3], rollout))
    if learning.needs_old_logp or state.reference is not None:
        programs.append(Program("score", functions.score, (params, batch), all_weights))
    if reference is not None:
        programs.append(Program("reference", functions.score, (reference, batch), (*of_base, "reference")))
    if functions.task_policy is not None:
        which = "reference" if getattr(task, "asks", None) == "reference" else "parameters"
        given = _first_turn(config, layout, reference if which == "reference" else params, during_training.BATCH)
        programs.append(Program("partner", functions.task_policy.program.generate, given, (*of_base, which)))

    def first_minibatch(*given: Any) -> Batch:
        return piece(split(with_logps(learning, functions.score, *given), config.update.minibatches), 0)

    minibatch = layout.prompt_shapes(jax.eval_shape(first_minibatch, params, reference, batch))
    held = (*all_weights, "moments") if state.reference is None else (*all_weights, "moments", "reference")
    programs.append(Program("update", functions.update, (state, minibatch, base), held))
    for name, jitted in modes.items():
        given = _first_turn(config, layout, params, during_training.BATCH)
        if name.endswith(during_training.LATER_TURNS):
            first = modes[name.removesuffix(during_training.LATER_TURNS)]
            given = _later_turn(given, jax.eval_shape(first, *given), windows.observation, layout)
        programs.append(Program(f"{EVALUATION}{name}", jitted, given, all_weights))
    trees: dict[str, Any] = {"parameters": trained, "moments": state.opt_state, "base": base, "reference": own}
    resident, in_host = Counter[str](), Counter[str]()
    for name, tree in trees.items():
        for leaf in jax.tree.leaves(tree):
            away = getattr(leaf.sharding, "memory_kind", None) == HOST and not shares_host_memory
            (in_host if away else resident)[name] += size(leaf)
    return Run(tuple(programs), dict(resident), dict(in_host), sizes, assumed, config.mesh.sizes)


def _state_and_reference(config: Config, trained: Any, layout: Layout) -> tuple[TrainState, Any]:
    """Shapes around what is trained, in the memory where they stay; without a KL term there is no reference."""
    state: TrainState = jax.eval_shape(partial(init_state, learning=config.learning()), trained)
    own = jax.eval_shape(partial(reference_copy, config=config.kl), trained) if config.kl.beta > 0 else None
    state, own = layout.parameter_shapes(state), layout.parameter_shapes(own)
    if config.update.offload_optimizer:
        state = dataclasses.replace(state, opt_state=_in_host_memory(state.opt_state))
    return state, _in_host_memory(own) if config.kl.offload_reference else own


def generated(program: Program) -> tuple[Rollout, EpisodeCache | None]:
    """Shapes of the rollout and the caches that a program returns; None where no later turn reads the caches."""
    made = jax.eval_shape(program.function, *program.arguments)
    return (made, None) if isinstance(made, Rollout) else made


def _in_host_memory(tree: Any) -> Any:
    # `jax.eval_shape` forgets the memory. The device is whatever the program is compiled for (`compile.compile_program`).
    host = SingleDeviceSharding(jax.devices()[0], memory_kind=HOST)
    return jax.tree.map(lambda leaf: leaf.update(sharding=host) if leaf.ndim else leaf, tree)


def _first_turn(config: Config, layout: Layout, params: Any, prompts: int) -> tuple[Any, ...]:
    """Parameters, the ids and mask of so many prompts, and the numbers of `rollout.generate.make_generate`'s program."""
    shapes = (prompts, config.padded_prompt()), (prompts,), ()
    tokens, each, one = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)
    return params, *layout.prompt_shapes((tokens, tokens, each, each, one, one, each))


def _later_turn(
    first: tuple[Any, ...], made: tuple[Rollout, EpisodeCache], observation: int, layout: Layout
) -> tuple[Any, ...]:
    """Arguments of `rollout.turns.make_next_turn`'s program, from those of the first turn and what that turn `made`."""
    rollout, caches = made
    params, _, mask_PT, state_P, number_P, seed, step, cap_P = first
    rows = rollout.stopped_PG.shape
    tokens, goes_on = jax.ShapeDtypeStruct((*rows, observation), jnp.int32), jax.ShapeDtypeStruct(rows, jnp.bool_)
    caches, rollout, tokens, goes_on = layout.prompt_shapes((caches, rollout, tokens, goes_on))
    return params, caches, rollout, mask_PT, tokens, tokens, goes_on, state_P, number_P, seed, step, cap_P, step


def _in_columns(rollout: Rollout, columns: int) -> Rollout:
    """Shapes of whole episodes, from those of one turn."""
    ids, mask, logp = (jax.ShapeDtypeStruct((*x.shape[:2], columns), x.dtype) for x in rollout[:3])
    return Rollout(ids, mask, logp, rollout.stopped_PG, mask)  # pyright: ignore[reportArgumentType]

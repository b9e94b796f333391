"""The devices of a run as one mesh, and what lies where on it: the one place that knows both.

Arrays have logical axes (`PARAMETERS`, `Part`), and `AXES` says which axes of the mesh each is cut over. Over `data` and `fsdp` a
program is written for one device (`jax.shard_map`), which has its own prompts and trip counts, and gathers what it reads of a
parameter; over `tensor` XLA's partitioner cuts it (`mesh.tensor`), but for the vocabulary, which is cut by hand. Knows nothing of
what is computed. A mesh of one device is none: the programs are what they would be without this module.
"""

import dataclasses
import enum
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_map_with_path

from jax_grpo.config import ConfigError
from jax_grpo.config.sections import MeshConfig
from jax_grpo.mesh.processes import placed

DATA, FSDP, TENSOR = "data", "fsdp", "tensor"
OF_PROMPTS = (DATA, FSDP)
HEADS_AXIS = 3  # of keys and values, from the end

# Axes of the mesh that a logical axis is cut over.
AXES = {
    "prompts": OF_PROMPTS,
    "vocabulary": (TENSOR,),
    "width": (FSDP,),  # of the residual stream
    "inner": (TENSOR,),  # of heads, and of the MLP
    "inner, of both": (FSDP, TENSOR),  # of what has no axis of the residual stream: biases, and halves of adapters
    "positions": (),
    "head": (),  # the numbers of one head
    "rank": (),  # of adapters
}
# Logical axes of a parameter, and of its moments, by the end of its path.
PARAMETERS = {
    "wte/embedding": ("vocabulary", "width"),
    "head/embedding": ("vocabulary", "width"),
    "wpe/embedding": ("positions", "width"),
    "attn/c_attn/kernel": ("width", "inner"),
    "attn/c_attn/bias": ("inner, of both",),
    "attn/c_proj/kernel": ("inner", "width"),
    "attn/c_proj/bias": ("width",),
    "mlp/c_fc/kernel": ("width", "inner"),
    "mlp/c_fc/bias": ("inner, of both",),
    "mlp/c_proj/kernel": ("inner", "width"),
    "mlp/c_proj/bias": ("width",),
    "ln_1/scale": ("width",),
    "ln_1/bias": ("width",),
    "ln_2/scale": ("width",),
    "ln_2/bias": ("width",),
    "post_1/scale": ("width",),
    "post_2/scale": ("width",),
    "q_norm/scale": ("head",),
    "k_norm/scale": ("head",),
    "ln_f/scale": ("width",),
    "ln_f/bias": ("width",),
    # Of matrices in int8, by output column.
    "attn/c_attn/kernel_scale": ("inner, of both",),
    "attn/c_proj/kernel_scale": ("width",),
    "mlp/c_fc/kernel_scale": ("inner, of both",),
    "mlp/c_proj/kernel_scale": ("width",),
    # Of adapters, whichever part of a linear map's columns one is of.
    "attn/c_attn/adapters/a": ("width", "rank"),
    "attn/c_attn/adapters/b": ("rank", "inner, of both"),
    "attn/c_proj/adapters/a": ("inner, of both", "rank"),
    "attn/c_proj/adapters/b": ("rank", "width"),
    "mlp/c_fc/adapters/a": ("width", "rank"),
    "mlp/c_fc/adapters/b": ("rank", "inner, of both"),
    "mlp/c_proj/adapters/a": ("inner, of both", "rank"),
    "mlp/c_proj/adapters/b": ("rank", "width"),
}


class Part(enum.Enum):
    """What an argument or a result of a program is, and so how it is cut."""

    PARAMETERS = enum.auto()  # and gradients: as `PARAMETERS` says
    FROZEN = enum.auto()  # parameters that nothing returns gradients of
    PROMPTS = enum.auto()  # whose leading axis is prompts, or completions group by group
    MICRO_BATCHES = enum.auto()  # the same behind an axis of micro-batches
    WHOLE = enum.auto()  # the same everywhere


def spec(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
    """Axes of the mesh that each axis of a leaf of a state or of parameters is cut over; a scalar is whole.

    Raises:
        KeyError: no rule for the leaf.
    """
    if not jnp.ndim(leaf):
        return PartitionSpec()
    name = keystr(path, simple=True, separator="/").removesuffix("/value")
    name = re.sub(r"(/adapters)/\w+/", r"\1/", name)
    for end, axes in PARAMETERS.items():
        if f"/{name}".endswith(f"/{end}"):
            return PartitionSpec(*(AXES[axis] or None for axis in axes))
    raise KeyError(f"mesh.PARAMETERS has no rule for {name}")


def _only(axes: tuple[str, ...], of: PartitionSpec) -> PartitionSpec:
    """The spec without any other axes of the mesh."""
    names = (tuple(name for name in _names(part) if name in axes) for part in of)
    return PartitionSpec(*(part or None for part in names))


def _names(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Axes of the mesh in one entry of a spec."""
    return (part,) if isinstance(part, str) else part or ()


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where arrays lie and how programs are cut; without a mesh every method returns what it is given."""

    mesh: Mesh | None = None

    @property
    def tensor(self) -> str | None:
        """The axis that the vocabulary is cut over; None: it is not."""
        return TENSOR if self.mesh is not None and self.mesh.shape[TENSOR] > 1 else None

    def place(self, tree: Any) -> Any:
        """A state or parameters, each leaf on the devices where its rule says."""
        return self._each(tree, placed)

    def constrain(self, tree: Any) -> Any:
        """The same inside a jitted program: what comes out of it lies where what went in lay."""
        return self._each(tree, jax.lax.with_sharding_constraint)

    def parameter_shapes(self, tree: Any) -> Any:
        """The same of shapes."""
        return self._each(tree, lambda x, sharding: x.update(sharding=sharding))

    def _each(self, tree: Any, put: Callable[[Any, NamedSharding], Any]) -> Any:
        if (mesh := self.mesh) is None:
            return tree
        return tree_map_with_path(lambda path, x: put(x, NamedSharding(mesh, spec(path, x))), tree)

    def prompt_shapes(self, tree: Any) -> Any:
        """Shapes of arrays of prompts, or of completions group by group: cut by prompts, and keys and values by heads too."""
        if (mesh := self.mesh) is None:
            return tree

        def cut(x: Any) -> Any:
            heads = [*[None] * (x.ndim - HEADS_AXIS - 1), AXES["inner"]] if x.ndim > HEADS_AXIS else []
            rule = PartitionSpec(AXES["prompts"], *heads) if x.ndim else PartitionSpec()
            return x.update(sharding=NamedSharding(mesh, rule))

        return jax.tree.map(cut, tree)

    def per_device(self, function: Callable[..., Any], given: Sequence[Part], returned: Part | tuple[Part, ...]) -> Any:
        """A function of one device's prompts as a function of all prompts; `given` and `returned` say what its arrays are.

        Within it parameters are a device's own part: see `gather`. Of what it returns, `Part.WHOLE` is of its own prompts and
        `Part.PARAMETERS` are gradients in gathered parameters: both are summed over the devices.
        """
        if (mesh := self.mesh) is None:
            return function
        specs = {
            Part.PROMPTS: PartitionSpec(AXES["prompts"]),
            Part.MICRO_BATCHES: PartitionSpec(None, AXES["prompts"]),
            Part.WHOLE: PartitionSpec(),
        }
        sums = {Part.WHOLE: self._sum, Part.PARAMETERS: self._sum_gradients}

        def cut(part: Part, x: Any) -> Any:
            if part not in (Part.PARAMETERS, Part.FROZEN):
                return specs[part]
            return tree_map_with_path(lambda path, x: _only(OF_PROMPTS, spec(path, x)), x)

        def summed(*arguments: Any) -> Any:
            return jax.tree.map(lambda part, x: sums[part](x) if part in sums else x, returned, function(*arguments))

        @functools.wraps(function)
        def program(*arguments: Any) -> Any:
            in_specs = tuple(cut(part, x) for part, x in zip(given, arguments, strict=False))
            like = dict(zip(given, in_specs, strict=False))  # gradients lie as the parameters do
            return jax.shard_map(
                summed,
                mesh=mesh,
                in_specs=in_specs,
                out_specs=jax.tree.map(lambda part: like[part], returned),
                axis_names=set(OF_PROMPTS if self.tensor else (*OF_PROMPTS, TENSOR)),
                check_vma=False,  # loops begin with zeros, which are the same on every device
            )(*arguments)

        return program

    def gather(self, params: Any) -> Any:
        """Within `per_device`: parameters gathered over `fsdp`, still cut over `tensor`.

        Its transpose sums gradients over `fsdp` and leaves each device its own part of them.
        """
        if (mesh := self.mesh) is None:
            return params

        def gathered(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
            rule = spec(path, x)
            over_fsdp, over_tensor, left = _cut_by(FSDP, rule), _cut_by(TENSOR, rule), _only((TENSOR,), rule)
            if mesh.shape[FSDP] > 1 and over_fsdp is not None:
                gather = functools.partial(jax.lax.all_gather, axis_name=FSDP, axis=over_fsdp, tiled=True)
                if self.tensor and over_tensor not in (None, over_fsdp):
                    # The partitioner would gather what a collective of `shard_map` is given over `tensor` first.
                    gather = jax.shard_map(gather, in_specs=left, out_specs=left, axis_names={TENSOR}, check_vma=False)
                x = gather(x)
            return jax.lax.with_sharding_constraint(x, left) if self.tensor else x

        return tree_map_with_path(gathered, params)

    def _sum_gradients(self, gradients: Any) -> Any:
        """Over all devices' prompts: those in gathered parameters are summed over `fsdp` already."""
        leaves, tree = jax.tree_util.tree_flatten_with_path(gradients)
        places: dict[tuple[str, ...], list[int]] = {}
        for place, (path, x) in enumerate(leaves):
            places.setdefault((DATA,) if _cut_by(FSDP, spec(path, x)) is not None else OF_PROMPTS, []).append(place)
        summed = [x for _, x in leaves]
        # XLA:CPU sums arrays of several processes one by one, at 2 ms each. Over `tensor` what is joined would be gathered first.
        joins = self.mesh is not None and self.mesh.devices.flat[0].platform == "cpu" and self.tensor is None
        for axes, some in places.items():
            if joins:
                vector, unravel = ravel_pytree([summed[place] for place in some])
                arrays = unravel(self._sum(vector, axes))
            else:
                arrays = [self._sum(summed[place], axes) for place in some]
            for place, x in zip(some, arrays, strict=True):
                summed[place] = x
        return jax.tree.unflatten(tree, summed)

    def _sum(self, x: Any, axes: tuple[str, ...] = OF_PROMPTS) -> Any:
        """Over those of the axes that have several devices: the partitioner refuses a sum over one."""
        several = tuple(axis for axis in axes if self.mesh is not None and self.mesh.shape[axis] > 1)
        return jax.lax.psum(x, several) if several else x


ONE_DEVICE = Layout()


def gathered_shape(leaf: Any) -> tuple[int, ...]:
    """Of a parameter, what a device computes with: all that `fsdp` cuts, see `Layout.gather`."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return leaf.shape
    return NamedSharding(sharding.mesh, _only((TENSOR,), sharding.spec)).shard_shape(leaf.shape)


def _cut_by(name: str, rule: PartitionSpec) -> int | None:
    """The axis of an array that is cut over this axis of the mesh."""
    return next((axis for axis, part in enumerate(rule) if name in _names(part)), None)


def layout_of(config: MeshConfig, devices: Sequence[Any] | None = None) -> Layout:
    """The layout on the first devices that JAX sees, a process's together: `tensor` are neighbours, then `fsdp`, then `data`.

    Or on these `devices`, in their order.

    Raises:
        ConfigError: there are fewer.
    """
    if config.devices == 1:
        return ONE_DEVICE
    if devices is None:
        devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    sizes = (config.data, config.fsdp, config.tensor)
    if len(devices) < config.devices:
        raise ConfigError(
            f"mesh.data {config.data} x mesh.fsdp {config.fsdp} x mesh.tensor {config.tensor} is {config.devices} devices; "
            f"JAX sees {len(devices)} ({devices[0].platform})"
        )
    return Layout(Mesh(np.array(devices[: config.devices]).reshape(sizes), (DATA, FSDP, TENSOR)))


def require_fitting(config: MeshConfig, num_heads: int, num_kv_heads: int, hidden_size: int, *columns: int) -> None:
    """Refuses, with a ConfigError, a model that does not divide over the mesh; `columns` are those of a block's matrices."""
    for sentence in config.misfits(num_heads, hidden_size, num_kv_heads):
        raise ConfigError(sentence)
    for count in columns:
        if count % (config.fsdp * config.tensor):
            raise ConfigError(
                f"mesh.fsdp {config.fsdp} x mesh.tensor {config.tensor} must divide the {count} columns of a matrix of the model's "
                "blocks: every parameter is cut over both"
            )


def require_one_device(config: MeshConfig, what: str) -> None:
    """Refuses, with a ConfigError, a mesh for what runs on one device; `what` is its name in the message."""
    if config.devices > 1:
        sizes = " x ".join(f"mesh.{axis} {size}" for axis, size in config.sizes.items())
        raise ConfigError(f"{what} is of one device, and the config has {sizes}; expected mesh to be left out")

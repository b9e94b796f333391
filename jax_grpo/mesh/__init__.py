"""The devices of a run as one mesh, and what lies where on it: the one place that knows both.

Arrays have logical axes (`PARAMETERS`, `Part`), and `AXES` says which axes of the mesh each is cut over. Over `data` and `fsdp` a
program is written out for one device (`jax.shard_map`), which has its own prompts, its own trip counts, and gathers what it reads
of a parameter; over `tensor` XLA's partitioner cuts it, but for the vocabulary, which is cut by hand. Knows nothing of what is
computed. A mesh of one device is none: the programs are what they would be without this module.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
    "inner, of a vector": (FSDP, TENSOR),  # biases, which have no other axis
    "positions": (),
}
# Logical axes of a parameter, and of its moments, by the end of its path.
PARAMETERS = {
    "wte/embedding": ("vocabulary", "width"),
    "wpe/embedding": ("positions", "width"),
    "attn/c_attn/kernel": ("width", "inner"),
    "attn/c_attn/bias": ("inner, of a vector",),
    "attn/c_proj/kernel": ("inner", "width"),
    "attn/c_proj/bias": ("width",),
    "mlp/c_fc/kernel": ("width", "inner"),
    "mlp/c_fc/bias": ("inner, of a vector",),
    "mlp/c_proj/kernel": ("inner", "width"),
    "mlp/c_proj/bias": ("width",),
    "ln_1/scale": ("width",),
    "ln_1/bias": ("width",),
    "ln_2/scale": ("width",),
    "ln_2/bias": ("width",),
    "ln_f/scale": ("width",),
    "ln_f/bias": ("width",),
}


class Part(enum.Enum):
    """What an argument or a result of a program is, and so how it is cut."""

    PARAMETERS = enum.auto()  # and gradients: as `PARAMETERS` says
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
    for end, axes in PARAMETERS.items():
        if f"/{name}".endswith(f"/{end}"):
            return PartitionSpec(*(AXES[axis] or None for axis in axes))
    raise KeyError(f"mesh.PARAMETERS has no rule for {name}")


def _only(axes: tuple[str, ...], of: PartitionSpec) -> PartitionSpec:
    """The spec without any other axes of the mesh."""
    kept = (tuple(name for name in _names(part) if name in axes) for part in of)
    return PartitionSpec(*(part or None for part in kept))


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
        """A state or parameters, each leaf where its rule says."""
        if (mesh := self.mesh) is None:
            return tree
        return tree_map_with_path(lambda path, x: placed(x, NamedSharding(mesh, spec(path, x))), tree)

    def shapes(self, tree: Any) -> Any:
        """Shapes of a state or of parameters, each leaf where its rule says."""
        if (mesh := self.mesh) is None:
            return tree
        return tree_map_with_path(lambda path, x: x.update(sharding=NamedSharding(mesh, spec(path, x))), tree)

    def rows(self, tree: Any) -> Any:
        """Shapes of arrays whose leading axis is prompts, or completions group by group, cut over the devices; scalars whole."""
        if (mesh := self.mesh) is None:
            return tree
        cut, whole = NamedSharding(mesh, PartitionSpec(AXES["prompts"])), NamedSharding(mesh, PartitionSpec())
        return jax.tree.map(lambda x: x.update(sharding=cut if x.ndim else whole), tree)

    def caches(self, tree: Any) -> Any:
        """The same of what goes from turn to turn: keys and values are cut by heads too, as `by_heads` leaves them."""
        if (mesh := self.mesh) is None:
            return tree

        def cut(x: Any) -> Any:
            of_heads = [*[None] * (x.ndim - HEADS_AXIS - 1), AXES["inner"]] if x.ndim > HEADS_AXIS else []
            return x.update(sharding=NamedSharding(mesh, PartitionSpec(AXES["prompts"], *of_heads)))

        return jax.tree.map(cut, tree)

    def kept(self, tree: Any) -> Any:
        """The same inside a jitted program: what comes out of it lies where what went in lay."""
        if (mesh := self.mesh) is None:
            return tree
        constrain = jax.lax.with_sharding_constraint
        return tree_map_with_path(lambda path, x: constrain(x, NamedSharding(mesh, spec(path, x))), tree)

    def by_prompts(self, function: Callable[..., Any], given: Sequence[Part], returned: Part | tuple[Part, ...]) -> Any:
        """The function of a device's own prompts as one of everybody's; `given` and `returned` say what its arrays are.

        Within it parameters are a device's own part: see `whole`, `total` and `summed`.
        """
        if (mesh := self.mesh) is None:
            return function
        manual = OF_PROMPTS if self.tensor else (*OF_PROMPTS, TENSOR)
        shared = {
            Part.PROMPTS: PartitionSpec(AXES["prompts"]),
            Part.MICRO_BATCHES: PartitionSpec(None, AXES["prompts"]),
            Part.WHOLE: PartitionSpec(),
        }

        def specs(part: Part, tree: Any) -> Any:
            if part is Part.PARAMETERS:
                return tree_map_with_path(lambda path, x: _only(OF_PROMPTS, spec(path, x)), tree)
            return jax.tree.map(lambda x: shared[part], tree)

        @functools.wraps(function)
        def program(*arguments: Any) -> Any:
            of_arguments = [specs(part, x) for part, x in zip(given, arguments, strict=False)]
            like = dict(zip(given, of_arguments, strict=False))  # gradients lie as the parameters do
            out = jax.tree.map(lambda part: like[part] if part is Part.PARAMETERS else shared[part], returned)
            cut = jax.shard_map(
                function,
                mesh=mesh,
                in_specs=tuple(of_arguments),
                out_specs=out,
                axis_names=set(manual),
                check_vma=False,  # loops begin with zeros, which are nobody's own
            )
            return cut(*arguments)

        return program

    def whole(self, params: Any) -> Any:
        """Within `by_prompts`: parameters gathered over `fsdp`, still cut over `tensor`.

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

    def total(self, x: Any) -> Any:
        """Within `by_prompts`: what every device has found of its own prompts, summed."""
        return self._sum(x, OF_PROMPTS)

    def summed(self, gradients: Any) -> Any:
        """The same for gradients in parameters that were made `whole`, which are summed over `fsdp` already."""
        if (mesh := self.mesh) is None:
            return gradients
        leaves, tree = jax.tree_util.tree_flatten_with_path(gradients)
        over: dict[tuple[str, ...], list[int]] = {}
        for number, (path, x) in enumerate(leaves):
            over.setdefault((DATA,) if _cut_by(FSDP, spec(path, x)) is not None else OF_PROMPTS, []).append(number)
        out = [x for _, x in leaves]
        # XLA:CPU sums arrays of several processes one by one, at 2 ms each. Over `tensor` what is joined would be gathered first.
        slow = mesh.devices.flat[0].platform == "cpu" and self.tensor is None
        for axes, numbers in over.items():
            some = [out[number] for number in numbers]
            joins = slow and any(mesh.shape[axis] > 1 for axis in axes)
            added = self._sum_of_one(some, axes) if joins else [self._sum(x, axes) for x in some]
            for number, x in zip(numbers, added, strict=True):
                out[number] = x
        return jax.tree.unflatten(tree, out)

    def _sum_of_one(self, arrays: Sequence[jax.Array], axes: tuple[str, ...]) -> list[jax.Array]:
        """The arrays, all of one dtype, summed as one vector."""
        total = self._sum(jnp.concatenate([x.reshape(-1) for x in arrays]), axes)
        parts = jnp.split(total, np.cumsum([x.size for x in arrays])[:-1])
        return [part.reshape(x.shape) for part, x in zip(parts, arrays, strict=True)]

    def _sum(self, x: Any, axes: tuple[str, ...]) -> Any:
        """Over those of the axes that have several devices: the partitioner refuses a sum over one."""
        several = () if (mesh := self.mesh) is None else tuple(axis for axis in axes if mesh.shape[axis] > 1)
        return jax.lax.psum(x, several) if several else x


ONE_DEVICE = Layout()


def gathered(leaf: Any) -> tuple[int, ...]:
    """Sizes of what a device computes with of a parameter's shape: all that `fsdp` cuts, see `Layout.whole`."""
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


def require_fitting(config: MeshConfig, num_heads: int, hidden_size: int) -> None:
    """Refuses, with a ConfigError, a model that does not divide over the mesh."""
    for sentence in config.misfits(num_heads, hidden_size):
        raise ConfigError(sentence)


def require_one_device(config: MeshConfig, what: str) -> None:
    """Refuses, with a ConfigError, a mesh where there is none of: what is done is said by `what`."""
    if config.devices > 1:
        sizes = " x ".join(f"mesh.{axis} {size}" for axis, size in config.sizes.items())
        raise ConfigError(f"{what} is of one device, and the config has {sizes}; expected mesh to be left out")


def _tensor_parts() -> int:
    """Devices of `tensor` that the program being traced is cut over: 1 outside `Layout.by_prompts`."""
    return jax.sharding.get_abstract_mesh().shape.get(TENSOR, 1)


def over_tensor(x: jax.Array, axis: int | None) -> jax.Array:
    """The array with one axis (None: no axis) cut over `tensor` and the others whole, where such a mesh divides the axis."""
    if (parts := _tensor_parts()) == 1:
        return x
    cut: list[str | None] = [None] * x.ndim
    if axis is not None:
        cut[axis] = TENSOR if x.shape[axis] % parts == 0 else None
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*cut))


def by_heads(tree: Any) -> Any:
    """Keys and values [P, ..., N, tokens, D] cut over `tensor`, where there is such a mesh; what is less deep whole."""
    return jax.tree.map(lambda x: over_tensor(x, axis=x.ndim - HEADS_AXIS if x.ndim > HEADS_AXIS else None), tree)


def anywhere(holds: jax.Array) -> jax.Array:
    """Whether it holds on some device of `data` and `fsdp`, bool scalar, where the program is cut over `tensor`; else as it is.

    For loops whose trip counts depend on a device's own prompts. Exchanges that the partitioner puts into them for `tensor`
    meet all devices (a collective permute has no groups): one that has left the loop would be waited for without end.
    """
    return _agreed(holds, jax.lax.pmax)


def everywhere(holds: jax.Array) -> jax.Array:
    """Whether it holds on all of them: see `anywhere`."""
    return _agreed(holds, jax.lax.pmin)


def _agreed(holds: jax.Array, over: Callable[..., jax.Array]) -> jax.Array:
    axes = jax.sharding.get_abstract_mesh().shape
    several = tuple(axis for axis in OF_PROMPTS if axes.get(axis, 1) > 1)
    return holds if _tensor_parts() == 1 or not several else over(holds.astype(jnp.int32), several) > 0


def looked_up(table_VH: jax.Array, ids: jax.Array) -> jax.Array | None:
    """Rows of a table whose rows are cut over `tensor`, [..., H]; None where they are not.

    Each device gives the rows that it has, and zeros. The partitioner would gather the table.
    """
    if (parts := _tensor_parts()) == 1:
        return None
    count = table_VH.shape[0] // parts

    def own_rows(table_VH: jax.Array, first_1: jax.Array, ids: jax.Array) -> jax.Array:
        row = ids - first_1[0]
        own = (row >= 0) & (row < count)
        rows = jnp.where(own[..., None], table_VH[jnp.where(own, row, 0)], 0)
        return jax.lax.psum(rows, TENSOR)

    cut, whole = PartitionSpec(TENSOR), PartitionSpec()
    lookup = jax.shard_map(own_rows, in_specs=(cut, cut, whole), out_specs=whole, axis_names={TENSOR}, check_vma=False)
    return lookup(table_VH, jnp.arange(parts, dtype=ids.dtype) * count, ids)

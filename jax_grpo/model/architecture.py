"""Sizes of a decoder, and the switches that tell families apart. Data alone: who reads and writes it is `families`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jax_grpo.config.sections import VOCAB_MULTIPLE

SIZES = ("vocab_size", "num_layers", "num_heads", "hidden_size", "max_position_embeddings")
_NAMES_IN_MANIFESTS = {"norm_epsilon": "layer_norm_epsilon"}  # as checkpoints have named it since there was only GPT-2


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions (Su et al. 2021) and how their angles are scaled, in the names of config.json's `rope_parameters`."""

    rope_theta: float = 10_000.0
    rope_type: Literal["default", "linear", "llama3"] = "default"
    factor: float | None = None  # of `linear` and `llama3`
    low_freq_factor: float | None = None  # of `llama3`, as what follows
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A decoder's sizes and switches; the defaults are GPT-2's (Radford et al. 2019).

    Raises:
        ValueError: a size is not positive, or one does not divide another.
    """

    vocab_size: int
    num_layers: int
    num_heads: int
    hidden_size: int
    max_position_embeddings: int
    norm_epsilon: float = 1e-5
    family: str = "gpt2"  # a key of `families.FAMILIES`: how files name the parameters
    num_kv_heads: int | None = (
        None  # groups of heads share keys and values (Ainslie et al. 2023); None: each has its own
    )
    head_size: int | None = None  # None: hidden_size / num_heads
    inner_size: int | None = None  # of the MLP; None: 4 * hidden_size
    rms_norm: bool = False  # (Zhang and Sennrich 2019); else layer norm
    norm_offset: float = 0.0  # added to a norm's stored scale
    post_norms: bool = False  # norms of what attention and MLP give back, too
    qk_norm: bool = False  # RMS norm of each head's queries and keys
    activation: Literal["gelu_tanh", "silu"] = "gelu_tanh"
    gated: bool = False  # activation(gate) * up (Shazeer 2020); else activation(up)
    qkv_bias: bool = True
    output_bias: bool = True  # of attention's projection back
    mlp_bias: bool = True
    rope: Rope | None = None  # None: learned positions
    window_rope: Rope | None = None  # of layers with a window; None: `rope`
    window: int | None = None  # tokens that one sees, itself included, in layers that have a window; None: none has
    window_layers: tuple[bool, ...] | None = None  # which layers have it; None: all
    query_scale: float | None = None  # scores are divided by its square root; None: by that of a head's size
    embedding_scaled: bool = False  # embeddings are multiplied by sqrt(hidden_size)
    tied: bool = True  # the head is the embedding

    def __post_init__(self) -> None:
        optional = ("num_kv_heads", "head_size", "inner_size", "window")
        for name in (*SIZES, *(name for name in optional if getattr(self, name) is not None)):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise ValueError(f"Architecture.{name} is {value!r}; expected a whole number of at least 1")
        if self.head_size is None and self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}")
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.kv_heads}")
        if self.rope is not None and self.head_dim % 2:
            raise ValueError(f"head_size {self.head_dim} is odd; rotary positions turn pairs of numbers")

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding parameter. Rows >= vocab_size are zero and never enter a softmax."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads if self.head_size is None else self.head_size

    @property
    def inner(self) -> int:
        return 4 * self.hidden_size if self.inner_size is None else self.inner_size

    @property
    def block_matrices(self) -> int:
        """Numbers in the matrices of one block."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.kv_heads)
        return attention + self.hidden_size * self.inner * (2 + self.gated)

    @property
    def score_divisor(self) -> float:
        """What query-key products are divided by."""
        return float(self.head_dim if self.query_scale is None else self.query_scale) ** 0.5

    @property
    def qkv(self) -> tuple[int, int, int]:
        """Columns of queries, keys and values."""
        return self.num_heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer."""
        layers = self.window_layers or (True,) * self.num_layers
        return tuple(self.window if has_it else None for has_it in layers)

    def rope_of(self, window: int | None) -> Rope | None:
        """Rotary positions of the layers with this window."""
        return self.rope if window is None else self.window_rope or self.rope

    def as_json(self) -> dict[str, Any]:
        """Sizes and what differs from a GPT-2, as manifests and reports hold it: of a GPT-2 what they have always held."""
        usual = {field.name: field.default for field in dataclasses.fields(self)}
        out = {name: x for name, x in dataclasses.asdict(self).items() if name == "norm_epsilon" or x != usual[name]}
        return {_NAMES_IN_MANIFESTS.get(name, name): list(x) if isinstance(x, tuple) else x for name, x in out.items()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Architecture":
        """The inverse of `as_json`."""
        ours = {theirs: name for name, theirs in _NAMES_IN_MANIFESTS.items()}
        given: dict[str, Any] = {ours.get(name, name): x for name, x in content.items()}
        given |= {name: Rope(**x) for name, x in given.items() if isinstance(x, Mapping)}
        given |= {name: tuple(x) for name, x in given.items() if isinstance(x, list)}
        return cls(**given)

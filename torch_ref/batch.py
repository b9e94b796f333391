"""The sequences of one optimiser step as tensors, and how to read them from a recorded .npz.

A recorded batch has arrays [B, T] input_ids, attention_mask, completion_mask, old_logp, and optionally ref_logp, sampling_logp
and entropy; and [B] advantages, or rewards with group_ids; optionally stopped. Column t of a [B, T] array belongs to
input_ids[:, t]; column 0 is never a completion token.
"""

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from jax_grpo.config.learning import AdvantageConfig, Learning
from torch_ref.advantages import group_advantages, settings_of


class BatchError(ValueError):
    """A recorded batch cannot be used; the message names the file, the array and what was expected."""


@dataclass(frozen=True)
class Batch:
    """B sequences of T tokens; masks and log-probabilities have the dtype of the computation."""

    input_ids_BT: Tensor
    attention_mask_BT: Tensor
    completion_mask_BT: Tensor
    """1 on completion tokens up to and including the stop token."""
    advantages_B: Tensor
    old_logp_BT: Tensor | None = None
    ref_logp_BT: Tensor | None = None
    sampling_logp_BT: Tensor | None = None
    entropy_BT: Tensor | None = None
    """Of the policy that made the rollout, nats; for the top-entropy mask."""
    stopped_B: Tensor | None = None
    """Bool: ended by itself, not by the cap."""

    def rows(self, which: slice | Tensor) -> "Batch":
        """The same batch with some of its sequences."""
        present = {
            field.name: getattr(self, field.name) for field in fields(self) if getattr(self, field.name) is not None
        }
        return replace(self, **{name: value[which] for name, value in present.items()})

    def loss_mask_BT(self, mask_truncated: bool) -> Tensor:
        """The tokens that are trained on: all of the completions, or only of those that stopped by themselves."""
        if not mask_truncated:
            return self.completion_mask_BT
        assert self.stopped_B is not None, "objective.mask_truncated needs the batch's `stopped`"
        return self.completion_mask_BT * self.stopped_B[:, None].to(self.completion_mask_BT.dtype)


def read_batch(path: str | Path, learning: Learning, *, dtype: torch.dtype, device: str = "cpu") -> Batch:
    """Batch of a recorded .npz. Recorded advantages are taken as they are; without them they follow from the rewards.

    Recorded rewards are what the advantages are taken of: whatever penalty the run had is in them.

    Raises:
        BatchError: unreadable file; else see `from_arrays`.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise BatchError(f"{path}: not a readable .npz batch ({error})") from error
    return from_arrays(arrays, learning, dtype=dtype, device=device, source=str(path))


def from_arrays(
    arrays: Mapping[str, np.ndarray],
    learning: Learning,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    source: str = "batch",
) -> Batch:
    """Batch of a recorded file's arrays; log-probabilities and advantages in `dtype`.

    Raises:
        BatchError: an array is missing, has another shape, or marks column 0 as completion; names `source`.
    """
    tensors = {name: torch.from_numpy(np.array(array)).to(device) for name, array in arrays.items()}
    required = ["input_ids", "attention_mask", "completion_mask"]
    required += [] if "advantages" in tensors else ["rewards", "group_ids"]
    required += ["stopped"] if learning.objective.mask_truncated else []
    required += ["sampling_logp"] if learning.objective.mismatch_cap is not None else []
    missing = [name for name in required if name not in tensors]
    if missing:
        raise BatchError(f"{source}: no array {', '.join(missing)}; it has {', '.join(sorted(tensors))}")
    B, T = tensors["input_ids"].shape
    for name, array in tensors.items():
        expected = (B,) if name in VECTORS else (B, T)
        if name in VECTORS | MATRICES and array.shape != expected:
            raise BatchError(
                f"{source}: {name} has shape {list(array.shape)}, expected {list(expected)} beside input_ids"
            )
    if bool(tensors["completion_mask"][:, 0].any()):
        raise BatchError(f"{source}: completion_mask is 1 in column 0, a token that nothing predicts")

    def real(name: str) -> Tensor | None:
        return tensors[name].to(dtype) if name in tensors else None

    return Batch(
        input_ids_BT=tensors["input_ids"].long(),
        attention_mask_BT=tensors["attention_mask"].long(),
        completion_mask_BT=tensors["completion_mask"].to(dtype),
        advantages_B=_advantages(tensors, learning.advantage, dtype),
        old_logp_BT=real("old_logp"),
        ref_logp_BT=real("ref_logp"),
        sampling_logp_BT=real("sampling_logp"),
        entropy_BT=real("entropy"),
        stopped_B=tensors["stopped"].bool() if "stopped" in tensors else None,
    )


def write_batch(path: str | Path, batch: Batch, rewards_B: np.ndarray, group_ids_B: Tensor, vocabulary: int) -> None:
    """Writes what `read_batch` reads, and of how many tokens the log-probabilities' softmax is."""
    arrays = {
        "input_ids": batch.input_ids_BT,
        "attention_mask": batch.attention_mask_BT,
        "completion_mask": batch.completion_mask_BT.int(),
        "advantages": batch.advantages_B,
        "group_ids": group_ids_B,
        "stopped": batch.stopped_B,
        "old_logp": batch.old_logp_BT,
        "ref_logp": batch.ref_logp_BT,
        "sampling_logp": batch.sampling_logp_BT,
        "entropy": batch.entropy_BT,
    }
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    present = {name: tensor.cpu().numpy() for name, tensor in arrays.items() if tensor is not None}
    np.savez(path, allow_pickle=False, rewards=rewards_B, vocabulary=vocabulary, **present)


VECTORS = {"advantages", "rewards", "group_ids", "stopped"}
MATRICES = {"input_ids", "attention_mask", "completion_mask", "old_logp", "ref_logp", "sampling_logp", "entropy"}


def _advantages(tensors: dict[str, Tensor], settings: AdvantageConfig, dtype: torch.dtype) -> Tensor:
    if "advantages" in tensors:
        return tensors["advantages"].to(dtype)
    if settings.components != "sum_first":
        raise BatchError(
            f"advantage.components {settings.components} needs each component, and a recorded batch holds only "
            "their sum: record `advantages`"
        )
    rewards_B, lengths_B = tensors["rewards"].to(dtype), tensors["completion_mask"].sum(1).to(dtype)
    if settings.scale == "maxrl" and bool((rewards_B < 0).any()):
        raise BatchError(f"rewards go down to {float(rewards_B.min()):g}; advantage.scale maxrl needs at least 0")
    return group_advantages(rewards_B, tensors["group_ids"], **settings_of(settings), lengths_B=lengths_B)

"""`python -m torch_ref.replay --config C --weights HF_DIR --batch B.npz --out O.npz`: exactly one optimiser step.

The whole file is one optimiser step's batch, at step 0 of the schedule, cut into `update.micro_batches`. The same
command of `jax_grpo` writes the same arrays, so two implementations can be compared number by number.
"""

import argparse
import dataclasses
import sys

import numpy as np
import torch

from jax_grpo.config import ConfigError, load_config
from jax_grpo.config.files import weights_directory
from jax_grpo.config.learning import Learning
from torch_ref import options as choices
from torch_ref.adapters import with_adapters
from torch_ref.batch import Batch, read_batch
from torch_ref.entropy_control import in_force
from torch_ref.model import LanguageModel
from torch_ref.update import accumulate, apply, score_batch, start
from torch_ref.weights import load_hf

# dtype of the master parameters, by compute dtype
STORAGE = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.float32}


def replay(learning: Learning, model: LanguageModel, batch: Batch, adamw: str = "definition") -> dict[str, np.ndarray]:
    """Arrays by name: loss and every metric (scalars), logp [B, T], advantages [B], grad/<name> and param/<name>.

    grad/ is before clipping, param/ after the step, names Hugging Face's with `transformer.`; logp is 0 outside the
    completion mask. The model is changed.
    """
    state = start(model, learning, adamw)
    coefficient = in_force(state.entropy_coefficient, state.entropy_before, learning.objective)
    gradients = accumulate(model, batch, learning, state.beta, coefficient)
    arrays = {f"grad/{name}": _array(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    metrics = apply(state, gradients, learning)
    arrays |= {f"param/{name}": _array(p) for name, p in model.named_parameters()}
    arrays |= {name: np.asarray(value) for name, value in metrics.items()}
    return arrays | {"logp": _array(gradients.logp_BT), "advantages": _array(batch.advantages_B)}


def with_logp(batch: Batch, model: LanguageModel, learning: Learning) -> Batch:
    """The batch with a reference, if beta asks for one and it has none: the given weights."""
    if learning.kl.beta == 0 or batch.ref_logp_BT is not None:
        return batch
    return dataclasses.replace(batch, ref_logp_BT=score_batch(model, batch, learning)[0])


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy().copy()


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m torch_ref.replay", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--weights", required=True, help="packaged:NAME, run folder or Hugging Face folder")
    parser.add_argument("--batch", required=True, help="recorded .npz")
    parser.add_argument("--out", required=True, help=".npz to write")
    parser.add_argument("--dtype", choices=sorted(STORAGE), help="compute dtype; float64 also stores in it")
    choices.add_arguments(parser)
    arguments, overrides = parser.parse_known_args(argv)
    if arguments.dtype:
        overrides += ["--model.compute_dtype", arguments.dtype]
    try:
        config = load_config(arguments.config, [*overrides, "--model.weights", arguments.weights])
        learning, chosen = config.learning(), choices.options(arguments)
        storage = STORAGE[config.model.compute_dtype]
        with choices.computing(chosen):
            weights = weights_directory(arguments.weights, tensors=True)
            loaded = load_hf(weights, dtype=storage, remat=bool(config.model.remat))
            model = choices.prepare(with_adapters(loaded, config.model, config.seed), chosen)
            batch = read_batch(arguments.batch, learning, dtype=storage, device=chosen.device)
            with np.load(arguments.batch) as recorded:
                model.vocabulary = int(recorded.get("vocabulary", model.vocabulary))
            low, high = int(batch.input_ids_BT.min()), int(batch.input_ids_BT.max())
            if low < 0 or high >= model.config.vocab_size:
                raise ValueError(
                    f"{arguments.batch}: input_ids are {low} to {high}, not 0 to {model.config.vocab_size - 1}"
                )
            arrays = replay(learning, model, with_logp(batch, model, learning), chosen.adamw)
        np.savez(arguments.out, allow_pickle=False, **arrays)
    except (ConfigError, OSError, ValueError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(f"{arguments.out}: loss {float(arrays['loss']):.6g}, grad_norm {float(arrays['grad_norm']):.6g}")


if __name__ == "__main__":
    main()

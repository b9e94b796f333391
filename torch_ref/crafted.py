"""A recorded batch made up for comparisons: unequal prompts and completions, and ratios beyond both clip bounds."""

import numpy as np
import torch

from torch_ref.model import LanguageModel, score

Arrays = dict[str, np.ndarray]
GROUPS, GROUP, PROMPT, NEW = 2, 4, 6, 7


def crafted_batch(
    model: LanguageModel,
    temperature: float = 0.8,
    *,
    noise: float = 0.4,
    seed: int = 3,
    full_prompts: bool = False,
    shared_prompts: bool = False,
) -> Arrays:
    """2 groups of 4 texts of up to 13 tokens: prompts padded on the left, completions on the right; in float64.

    Args:
        model: in float64; the old and the reference policy's log-probabilities are its own with noise.
        full_prompts: none is padded.
        shared_prompts: a group's texts have one prompt, as a rollout's have.

    Masked places of the log-probabilities hold garbage: no implementation may look at it.
    """
    rng = np.random.default_rng(seed)
    rows, length = GROUPS * GROUP, PROMPT + NEW
    attention, completion = np.zeros((2, rows, length), np.int32)
    for row in range(rows):
        prompt, new = rng.integers(1, PROMPT + 1), rng.integers(1, NEW + 1) if row else 1  # row 0: one token
        prompt = PROMPT if full_prompts else prompt
        attention[row, PROMPT - prompt : PROMPT + new] = 1
        completion[row, PROMPT : PROMPT + new] = 1
    ids = rng.integers(0, model.config.vocab_size, (rows, length)).astype(np.int32)
    if shared_prompts:
        for array in (attention, ids):
            array[:, :PROMPT] = np.repeat(array[::GROUP, :PROMPT], GROUP, axis=0)
    tensors = (torch.from_numpy(array) for array in (ids, attention, completion))
    ids_BT, attention_BT, completion_BT = (tensor.long() for tensor in tensors)
    with torch.no_grad():
        logp, _ = score(model, ids_BT, attention_BT, completion_BT.double(), temperature)
    # Rows drift as a whole too, else the sequence level's mean ratio would stay within the clip bounds.
    near = [logp.numpy() + noise * (rng.normal(size=logp.shape) + rng.normal(size=(rows, 1))) for _ in range(3)]
    old_logp, ref_logp, sampling_logp = (np.where(completion, x, 77.0) for x in near)
    return {
        "input_ids": ids,
        "attention_mask": attention,
        "completion_mask": completion,
        "old_logp": old_logp,
        "ref_logp": ref_logp,
        "sampling_logp": sampling_logp,
        "rewards": rng.normal(size=rows),
        "group_ids": np.repeat(np.arange(GROUPS), GROUP),
        "stopped": np.arange(rows) % 3 != 1,
    }

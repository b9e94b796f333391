"""Completions with a KV cache, greedy or sampled, with the log-probability of each token.

Stopping is a byte-level automaton compiled to tokens: a table of next states. Knows no task, text or tokenizer.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from torch_ref.model import KVCache, LanguageModel
from torch_ref.sampling import PLAIN, Sampling, allowed_distribution


@dataclass(frozen=True)
class StopTable:
    """state, token -> next state; a row that reaches `accept` has ended with that token."""

    next_SV: Tensor
    accept: int
    start_B: Tensor
    """State of each row after its prompt."""


@dataclass(frozen=True)
class Generation:
    """Completions [B, C], C at most max_new_tokens; what follows a stop is 0 in all three."""

    tokens_BC: Tensor
    logp_BC: Tensor
    """Under softmax(logits / temperature), before any penalty or truncation, sampled or greedy; at least float32."""
    mask_BC: Tensor
    """1 up to and including the stop token."""
    stopped_B: Tensor
    """Bool: ended by the table, not by the cap."""


def end_of_text(eos_id: int, vocab_size: int, batch: int) -> StopTable:
    """Stops at one token."""
    next_SV = torch.zeros(2, vocab_size, dtype=torch.long)
    next_SV[0, eos_id] = next_SV[1, :] = 1
    return StopTable(next_SV, 1, torch.zeros(batch, dtype=torch.long))


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompt_ids_BT: Tensor,
    prompt_mask_BT: Tensor,
    *,
    max_new_tokens: int | Tensor,
    sampling: Sampling = PLAIN,
    stop: StopTable,
    generator: torch.Generator | None = None,
) -> Generation:
    """Continues left-padded prompts; greedily without a generator, else drawing as `sampling` says.

    max_new_tokens is the cap, one for all rows or one a row.

    Only the tokens that the stop table knows are ever chosen: a model may have more rows than its tokenizer tokens.

    Raises:
        ValueError: a prompt does not end in a real token: generated tokens would be separated from it by padding.
    """
    if not bool(prompt_mask_BT[:, -1].all()):
        raise ValueError("prompts must be padded on the left: the last column of prompt_mask_BT must be 1 in every row")
    cache = KVCache(model.config.num_layers)
    mask_BS, state_B = prompt_mask_BT.long(), stop.start_B
    alive_B = state_B != stop.accept
    vocabulary = stop.next_SV.shape[1]
    seen_BV = None
    if sampling.repetition_penalty != 1.0:
        seen_BV = torch.zeros(len(prompt_ids_BT), vocabulary, dtype=torch.bool, device=prompt_ids_BT.device)
        for row, (ids_T, mask_T) in enumerate(zip(prompt_ids_BT, prompt_mask_BT, strict=True)):
            seen_BV[row, ids_T[mask_T.bool()].long()] = True
    ids_BT, columns = prompt_ids_BT, []
    cap_B = torch.as_tensor(max_new_tokens, device=state_B.device).expand_as(state_B)
    for count in range(1, int(cap_B.max()) + 1):
        logits_BV = model.logits(model(ids_BT, mask_BS, cache)[:, -1])[:, :vocabulary]
        logp_BV = torch.log_softmax(logits_BV / sampling.temperature, dim=-1)
        allowed_BV = allowed_distribution(logits_BV, sampling, seen_BV)
        token_B = allowed_BV.argmax(-1)
        if generator is not None:
            token_B = torch.multinomial(allowed_BV, 1, generator=generator)[:, 0]
        if seen_BV is not None:
            seen_BV[torch.arange(len(token_B)), token_B] = True
        columns.append((token_B * alive_B, logp_BV.gather(1, token_B[:, None])[:, 0] * alive_B, alive_B))
        state_B = torch.where(alive_B, stop.next_SV[state_B, token_B], state_B)
        alive_B = alive_B & (state_B != stop.accept) & (count < cap_B)
        if not bool(alive_B.any()):
            break
        ids_BT, mask_BS = token_B[:, None], torch.cat([mask_BS, torch.ones_like(mask_BS[:, :1])], 1)
    tokens_BC, logp_BC, mask_BC = (torch.stack(column, 1) for column in zip(*columns, strict=True))
    return Generation(tokens_BC, logp_BC, mask_BC.long(), state_B == stop.accept)

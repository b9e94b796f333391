"""Between texts and tensors: prompts encoded and padded, completions generated, decoded and cut where they stop."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jax_grpo.config import Config
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.tasks.base import Prompt, Task
from jax_grpo.tasks.checked import caps
from torch_ref.generate import StopTable, generate
from torch_ref.model import LanguageModel
from torch_ref.sampling import Sampling
from torch_ref.update import precision


class PromptTooLong(ValueError):
    """A prompt has more tokens than `prompts.max_prompt_tokens`, or none; it is never cut."""


@dataclass(frozen=True)
class Rollout:
    """B completions of B prompts, aligned to token positions; T is prompt and completion."""

    completions: list[str]
    """Decoded, without what follows the stop."""
    input_ids_BT: Tensor
    attention_mask_BT: Tensor
    completion_mask_BT: Tensor
    sampling_logp_BT: Tensor
    stopped_B: Tensor

    def completion_ids(self) -> list[list[int]]:
        """Tokens of each completion, the one that ended it included."""
        rows = zip(self.input_ids_BT, self.completion_mask_BT.bool(), strict=True)
        return [ids_T[mask_T].tolist() for ids_T, mask_T in rows]


@dataclass(frozen=True)
class Texts:
    """Completes prompts with a model, by the task's stop rule and the config's sampling settings."""

    model: LanguageModel
    tokenizer: Tokenizer
    task: Task
    config: Config

    @functools.cached_property
    def _limit(self) -> int:
        return self.config.prompt_limit()  # reads the model's config.json

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def complete(
        self, prompts: Sequence[Prompt], generator: torch.Generator | None, *, temperature_alone: bool = False
    ) -> Rollout:
        """One completion a prompt; greedy without a generator. By the config's sampling settings, or its temperature alone."""
        ids_BT, mask_BT = self._encode([prompt.text for prompt in prompts])
        table_SV = torch.from_numpy(self.task.stop_rule.token_table(self.tokenizer)).long().to(self.device)
        start_B = torch.tensor([prompt.start_state for prompt in prompts], device=self.device)
        settings = self.config.rollout
        sampling = Sampling(
            settings.temperature, settings.top_k, settings.top_p, settings.min_p, settings.repetition_penalty
        )
        with precision(self.config.model.compute_dtype, self.device.type):
            made = generate(
                self.model,
                ids_BT,
                mask_BT,
                max_new_tokens=torch.from_numpy(caps(prompts, settings.max_new_tokens)).to(self.device),
                sampling=Sampling(settings.temperature) if temperature_alone else sampling,
                stop=StopTable(table_SV, self.task.stop_rule.accept, start_B),
                generator=generator,
            )
        ids_BC = [ids[keep.bool()].tolist() for ids, keep in zip(made.tokens_BC.cpu(), made.mask_BC.cpu(), strict=True)]
        return Rollout(
            completions=[
                self.task.stop_rule.text(ids, prompt.start_state, self.tokenizer)
                for ids, prompt in zip(ids_BC, prompts, strict=True)
            ],
            input_ids_BT=torch.cat([ids_BT, made.tokens_BC], 1),
            attention_mask_BT=torch.cat([mask_BT, made.mask_BC], 1),
            completion_mask_BT=torch.cat([torch.zeros_like(mask_BT), made.mask_BC], 1),
            sampling_logp_BT=torch.cat([torch.zeros(mask_BT.shape, device=self.device), made.logp_BC], 1),
            stopped_B=made.stopped_B,
        )

    def _encode(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Ids and mask [B, T], padded on the left to the longest."""
        encoded, limit = self.tokenizer.encode_prompts(texts), self._limit
        for text, ids in zip(texts, encoded, strict=True):
            if not 0 < len(ids) <= limit:
                raise PromptTooLong(
                    f"prompt {text[:80]!r} has {len(ids)} tokens; expected 1 to prompts.max_prompt_tokens = {limit}"
                )
        longest = max(map(len, encoded))
        ids_BT = torch.full((len(texts), longest), self.tokenizer.pad_id, device=self.device)
        mask_BT = torch.zeros_like(ids_BT)
        for row, ids in enumerate(encoded):
            ids_BT[row, longest - len(ids) :] = torch.tensor(ids, device=self.device)
            mask_BT[row, longest - len(ids) :] = 1
        return ids_BT, mask_BT

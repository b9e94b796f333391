"""How to prompt a model, for its card: code that runs as it stands, and prompts like those that it was trained on, and no others.

They come from its run, or from its provenance and config.json.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.names import CARDS, by_name

LOAD = """{also}from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{folder}")
tokenizer = AutoTokenizer.from_pretrained("{folder}")
"""
ANSWER = """tokens = tokenizer({prompt}, return_tensors="pt"{arguments})
answer = model.generate(**tokens, max_new_tokens={new_tokens}, do_sample=False)
{name} = tokenizer.decode(answer[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True)
"""


def recipe(
    source: Path, run: Mapping[str, Any], shown: Sequence[str], tokenizer: Tokenizer, folder: str
) -> dict[str, str]:
    """Fields of the card: `code`, `prompts` and `tags`.

    `source` is the folder of the weights, `run` the config of the run that made them ({}: no run), `shown` prompts of it, and
    `folder` the name that the code loads.
    """
    cap = run.get("rollout", {}).get("max_new_tokens", 64)
    if chess := by_name(CARDS).recipe(source, run, shown, tokenizer, folder, cap):
        return chess
    prompts = (
        f"The prompt is one that its run showed; the task was `{run.get('task', {}).get('name')}`."
        if shown
        else "Put a prompt there."
    )
    prompt = shown[0] if shown else "..."
    # A prompt from a chat template has its special tokens already.
    special = {tokenizer.bos_id, *tokenizer.eos_ids} & set(tokenizer.encode(prompt))
    arguments = ", add_special_tokens=False" if special else ""
    return {"code": answers(prompt, arguments, cap, folder), "prompts": prompts, "tags": ""}


def answers(prompt: str, arguments: str, cap: int, folder: str) -> str:
    """Code that answers one prompt."""
    answer = ANSWER.format(prompt="prompt", arguments=arguments, new_tokens=cap, name="text")
    return LOAD.format(also="", folder=folder) + f"prompt = {json.dumps(prompt)}\n{answer}print(text)\n"

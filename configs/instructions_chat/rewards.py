"""Rewards of configs/instructions_chat.yaml: instructions followed by an answer that is an answer.

A text that repeats the prompt, one word or a few words satisfies many a check of form. `counts` is what stands against that; the
rewards are 0 where it does not hold.
"""

import re

from jax_grpo.rewards.texts import content
from jax_grpo.tasks.instructions import share, strict

LEAST_WORDS = 10
COPIED, VARIED = 0.2, 0.8  # of the prompt's runs of three words, at most; of the answer's, that differ, at least
EXAMPLE = "<<name>>"  # what the prompt gives as an example of a title


def _runs(text):
    words = re.findall(r"\w+", text.casefold())
    return list(zip(words, words[1:], words[2:], strict=False))


def on_topic(completions, topic, **columns):
    """Whether the topic's word, or its plural, stands in the answer."""
    words = [set(re.findall(r"\w+", content(one).casefold())) for one in completions]
    return [float(not {wanted, f"{wanted}s"}.isdisjoint(own)) for own, wanted in zip(words, topic, strict=True)]


def copied(prompts, completions, **columns):
    """The share of the prompt's runs of three words that the answer has too."""
    pairs = [
        (set(_runs(content(asked))), set(_runs(content(one)))) for asked, one in zip(prompts, completions, strict=True)
    ]
    return [len(asked & own) / len(asked) for asked, own in pairs]


def counts(prompts, completions, topic, **columns):
    """1.0 for an answer on its topic, of some length, that neither copies the prompt nor repeats itself."""
    verdicts = zip(completions, on_topic(completions, topic), copied(prompts, completions), strict=True)
    return [
        float(bool(topical) and share <= COPIED and EXAMPLE not in content(one) and _is_text(content(one)))
        for one, topical, share in verdicts
    ]


def _is_text(text):
    runs = _runs(text)
    return len(runs) + 2 >= LEAST_WORDS and len(set(runs)) >= VARIED * len(runs)


def followed(**columns):
    """1.0 where all instructions are followed by an answer that counts."""
    return [a * b for a, b in zip(strict(**columns), counts(**columns), strict=True)]


def partly(**columns):
    """The share of the instructions that are followed, by an answer that counts."""
    return [a * b for a, b in zip(share(**columns), counts(**columns), strict=True)]


def form(**columns):
    """1.0 where all instructions are followed, by whatever text."""
    return strict(**columns)

"""Rewards of configs/instructions_chat.yaml: an instruction counts in a text that is about something.

A checker alone pays for echoes: "I think Do not use commas." uses no comma and begins as it should.
"""

import re

from jax_grpo.tasks.instructions import share, strict

LEAST_WORDS, MOST_COPIED = 8, 0.25


def _words(text):
    return re.findall(r"[a-z']+", text.lower())


def copied(completion, prompt):
    """Share of a text's runs of three words that stand in the prompt."""
    runs, known = ([*zip(words, words[1:], words[2:], strict=False)] for words in map(_words, (completion, prompt)))
    return sum(run in known for run in runs) / max(len(runs), 1)


def _about(prompts, completions, topic):
    """1.0 for at least eight words with the topic's among them, a mark at the end, and little of the prompt in them."""
    for prompt, completion, word in zip(prompts, completions, topic, strict=True):
        text, request = completion[-1]["content"].strip(), prompt[-1]["content"]
        words = _words(text)
        whole = len(words) >= LEAST_WORDS and text[-1] in ".!?\"*'>"
        yield float(whole and bool({word, word + "s"} & {*words}) and copied(text, request) <= MOST_COPIED)


def honest(prompts, completions, topic, **columns):
    """1.0 where all instructions are followed, in a text that is about the topic."""
    followed = strict(prompts, completions, **columns)
    return [a * b for a, b in zip(followed, _about(prompts, completions, topic), strict=True)]


def partly(prompts, completions, topic, **columns):
    """The share of instructions that are followed, in a text that is about the topic; else 0."""
    followed = share(prompts, completions, **columns)
    return [a * b for a, b in zip(followed, _about(prompts, completions, topic), strict=True)]


def about(prompts, completions, topic, **columns):
    """1.0 for a text about the topic, whatever it follows."""
    return [*_about(prompts, completions, topic)]


def copies(prompts, completions, **columns):
    """Share of a text's runs of three words that stand in its prompt."""
    return [copied(c[-1]["content"], p[-1]["content"]) for p, c in zip(prompts, completions, strict=True)]

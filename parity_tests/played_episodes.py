"""Episodes of a task that answers anything, played by small programs of the model's: what tests of episodes begin with."""

import functools
import zlib
from typing import NamedTuple

import jax
import numpy as np
import pytest
from both import jax_policy, weights
from conftest import config

from jax_grpo.batch import Batch, GroupedTokens
from jax_grpo.config import Config
from jax_grpo.model.architecture import Architecture
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.programs import unscored
from jax_grpo.rollout import decoding
from jax_grpo.rollout.episodes import Episodes
from jax_grpo.rollout.generate import EpisodeCache, Rollout, decoding_settings, encode_prompts, make_generate
from jax_grpo.rollout.sampling import Sampling
from jax_grpo.rollout.turns import make_next_turn, past_columns
from jax_grpo.system.phases import Phases
from jax_grpo.tasks.base import Prompt
from jax_grpo.tasks.episodes import EpisodicTask
from jax_grpo.tasks.stop import StopRule

CHESS = Tokenizer.load("chess")
SIZES = Architecture(vocab_size=585, num_layers=2, num_heads=2, hidden_size=16, max_position_embeddings=96)
TURNS, OBSERVED, GROUP = 3, 6, 2
CAPS = [20, 3, 20, 5]  # of the prompts: half of them go on, into a second chunk of the cache
PROMPTS = [Prompt(text, 0, max_new_tokens=cap) for text, cap in zip(["a", "b c d", "e2e4 w", "9"], CAPS, strict=True)]
STATE_7 = np.zeros((2, 256), np.int32)
STATE_7[0, ord("7")], STATE_7[1] = 1, 1
SEVENS = StopRule(STATE_7, 1, np.zeros((2, 256), bool))  # one token in ten has a 7, and ends a completion
PENALISED = Sampling(temperature=0.7, repetition_penalty=1.3)


class Answering:
    """Answers with one to six letters, and ends an episode in one of `ends` cases."""

    def __init__(self, ends: int, draw: tuple[int, ...] = ()):
        self.ends, self.draw = ends, draw

    def step(self, completion: str) -> tuple[str, bool]:
        number = zlib.crc32(completion.encode())
        return " answer"[: 2 + number % 5], number // 7 % self.ends == 0


class Talk(EpisodicTask):
    """A prompt's own text says nothing of how long its episodes are."""

    name, component_weights, stop_rule = "talk", {"turns": 1.0}, SEVENS

    def __init__(self, ends: int = 4, over=()):
        self.ends, self.over, self.begun = ends, over, 0

    def reset(self, prompt):
        self.begun += 1
        # 1: the first answer is the last
        return Answering(1 if self.begun - 1 in self.over else self.ends, prompt.draw)

    def score(self, prompts, episodes):
        return {"turns": np.array([len(episode.turns) for episode in episodes], np.float32)}


class Made(NamedTuple):
    played: Rollout
    tokens: GroupedTokens
    batch: Batch
    cache: EpisodeCache


def episodes_config(turns: int = TURNS, cap: int = 20, observed: int = OBSERVED, **sections) -> Config:
    base: dict = {"task": {"name": "guess", "episode": {"turns": turns, "max_observation_tokens": observed}}}
    base |= {"rollout": {"max_new_tokens": cap, "group_size": GROUP, "temperature": PENALISED.temperature}}
    model = {"tokenizer": "chess", "max_position_embeddings": 96} | sections.pop("model", {})
    return config(**base, model=model, prompts={"per_iteration": len(PROMPTS), "max_prompt_tokens": 16}, **sections)


@functools.cache
def program(dtype: str, compacts: bool):
    """The programs of both kinds of turn, and what they compute with."""
    windows = episodes_config().windows()
    policy = jax_policy(weights(4.0, SIZES), dtype, SIZES)
    given = policy.graphdef, decoding_settings(CHESS, SEVENS, PENALISED, compacts=compacts)
    generate = make_generate(
        *given, group_size=GROUP, max_new_tokens=windows.completion, past_columns=past_columns(windows)
    )
    return policy, windows, (generate, make_next_turn(*given, group_size=GROUP, windows=windows))


def play(task, dtype: str = "float64", compacts: bool = True) -> Made:
    with jax.enable_x64(dtype == "float64"), pytest.MonkeyPatch.context() as patched:
        patched.setattr(decoding, "LEAST_CHUNK", decoding.CHUNK_MULTIPLE)  # two chunks of the cache, and compaction
        policy, windows, (generate, next_turn) = program(dtype, compacts)
        last = []

        def spied(*arguments):
            last[:] = next_turn(*arguments)
            return last

        player = Episodes(task, CHESS, windows, GROUP, generate, spied)
        tokens = encode_prompts([prompt.text for prompt in PROMPTS], CHESS, 16)
        played = player.play(policy.params, PROMPTS, tokens, np.arange(4, dtype=np.int32), 5, 2, Phases())
        batch = unscored(*tokens, played)
        return Made(played, batch.tokens, batch, last[1])

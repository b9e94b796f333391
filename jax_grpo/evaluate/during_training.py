"""Scores of a policy on fixed prompts, one completion a prompt: greedy, and sampled at the training temperature.

Every number is a function of (weights, prompts, seed). Of training it knows the config alone.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_grpo.config import Config, ConfigError
from jax_grpo.evaluate import MODES
from jax_grpo.evaluate.yardsticks import yardsticks
from jax_grpo.mesh import ONE_DEVICE, Layout, processes
from jax_grpo.model.named import Policy
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.rollout.episodes import Episodes, Partner
from jax_grpo.rollout.generate import PromptTokens, completion_ids, encode_prompts
from jax_grpo.rollout.sampling import Sampling
from jax_grpo.rollout.texts import BATCH, Texts
from jax_grpo.system.phases import Phases
from jax_grpo.tasks.base import Prompt, Task, TrainerState, applicable, total_reward
from jax_grpo.tasks.episodes import Episode, EpisodicTask
from jax_grpo.tasks.policy import in_style
from jax_grpo.tasks.shared import shared_score

LATER_TURNS = ", later turns"  # end of the names of programs that go on with an episode


def make_programs(
    graphdef: Any, tokenizer: Tokenizer, task: Task, config: Config, layout: Layout = ONE_DEVICE
) -> dict[str, Callable[..., Any]]:
    """The compiled generation of each mode, by name; the memory report compiles these very ones, for `BATCH` prompts.

    Raises:
        ConfigError: `BATCH` prompts do not divide over the mesh.
    """
    if BATCH % (parts := config.mesh.prompt_parts):
        raise ConfigError(
            f"evaluation.positions {config.evaluation.positions} are asked {BATCH} at a time, which mesh.data {config.mesh.data} x "
            f"mesh.fsdp {config.mesh.fsdp} = {parts} devices must divide; set it to 0 or change the mesh"
        )
    texts, programs = _texts(tokenizer, task, config), {}
    for mode, temperature in zip(MODES, (0.0, config.rollout.temperature), strict=True):
        programs[mode], later = texts.episode_programs(graphdef, config.windows(), Sampling(temperature), layout=layout)
        programs |= {} if later is None else {mode + LATER_TURNS: later}
    return programs


def _texts(tokenizer: Tokenizer, task: Task, config: Config) -> Texts:
    return Texts(tokenizer, task.stop_rule, config.rollout.max_new_tokens)


class Evaluation(NamedTuple):
    """`metrics` holds `eval/<mode>/<component>` means, `eval/<mode>/reward` and `yardsticks`; completions by mode."""

    metrics: dict[str, float]
    completions: dict[str, list[str]]
    components: dict[str, dict[str, np.ndarray]]

    def moves(self, prompts: Sequence[Prompt], style: str) -> list[tuple[Prompt, str]]:
        """The prompts of labelled positions that ask for a move in a style, with the last word of their greedy completions.

        A move is as on the position's board. There are none where no task asks for one.
        """
        if not any(name.endswith("legal") for name in self.components["greedy"]):
            return []
        pairs = zip(prompts, self.completions["greedy"], strict=True)
        return [
            (p, in_style(style, (text.split() or [""])[-1], p.position.fen))
            for p, text in pairs
            if p.task in ("", "policy") and p.position and p.position.moves
        ]


class Evaluator:
    """Compiled once for the task's prompts, called with the parameters of the moment."""

    def __init__(
        self,
        policy: Policy,
        task: Task,
        prompts: Sequence[Prompt],
        config: Config,
        partner: Partner | None = None,
        layout: Layout = ONE_DEVICE,
    ):
        self.prompts, self._partner = list(prompts), partner
        self._task, self._seed, self._tokenizer = task, config.seed, policy.tokenizer
        self._iterations, self._windows = config.iterations, config.windows()
        self._texts = _texts(policy.tokenizer, task, config)
        self._generate = make_programs(policy.graphdef, policy.tokenizer, task, config, layout)
        self._batches = []
        for start in range(0, len(self.prompts), BATCH):
            batch = self.prompts[start : start + BATCH]
            texts = [prompt.text for prompt in batch]
            tokens = encode_prompts(texts, policy.tokenizer, config.prompts.max_prompt_tokens)
            self._batches.append((batch, tokens, range(start, start + len(batch))))

    def __call__(self, params: Any, iteration: int = 0) -> Evaluation:
        """Generates and scores every prompt in both modes, with the weights after so many iterations."""
        metrics, completions, components = {}, {}, {}
        for mode in MODES:
            said, ids = (
                self._play(mode, params) if isinstance(self._task, EpisodicTask) else self._complete(mode, params)
            )
            state, rows = TrainerState(iteration, self._iterations), processes.own(len(self.prompts))
            texts, scores, _ = shared_score(self._task, self.prompts[rows], said[rows], ids[rows], state)
            metrics[f"eval/{mode}/reward"] = float(total_reward(scores, self._task.component_weights).mean())
            for name, values in applicable(scores, self.prompts).items():
                metrics[f"eval/{mode}/{name}"] = float(values.mean())
            completions[mode], components[mode] = texts, scores
        return Evaluation(metrics | self._yardsticks, completions, components)

    @functools.cached_property
    def _yardsticks(self) -> dict[str, float]:
        return yardsticks(self._task, self.prompts)

    def _complete(self, mode: str, params: Any) -> tuple[list[str], list[list[int]]]:
        """A completion of each prompt, and its tokens."""
        program, texts = self._generate[mode], []
        for prompts, tokens, numbers in self._batches:
            texts += self._texts.complete(program, params, prompts, tokens, numbers, self._seed)
        return texts, self._tokenizer.encode_batch(texts)  # of the texts: the tokens that were drawn may be others

    def _play(self, mode: str, params: Any) -> tuple[list[Episode], list[list[int]]]:
        """An episode of each prompt, and the tokens that the model wrote in it.

        As in `Texts.complete`, a batch that is not full is filled up by repeating its prompts.
        """
        assert isinstance(self._task, EpisodicTask), "asked of such a task alone"
        turns = self._generate[mode], self._generate.get(mode + LATER_TURNS)
        player = Episodes(self._task, self._tokenizer, self._windows, 1, *turns, self._partner)
        episodes: list[Episode] = []
        ids: list[list[int]] = []
        for prompts, tokens, numbers in self._batches:
            rows = np.resize(np.arange(len(prompts)), BATCH)
            asked, numbers_P = [prompts[int(row)] for row in rows], np.array(numbers, np.int32)[rows]
            filled = asked, PromptTokens(tokens.ids_PT[rows], tokens.mask_PT[rows]), numbers_P
            own = processes.own(len(self.prompts))  # those that this process scores
            own_P = (numbers_P >= own.start) & (numbers_P < own.stop)
            played = player.play(params, *filled, self._seed, 0, Phases(), own_P=own_P)
            episodes += played.episodes[: len(prompts)]
            ids += completion_ids(played.completion_ids_PGC, played.completion_mask_PGC)[: len(prompts)]
        return episodes, ids

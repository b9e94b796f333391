"""Scores of a policy on fixed prompts, one completion a prompt: greedy, and sampled at the training temperature.

Every number is a function of (weights, prompts, seed). Of training it knows the config alone.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_grpo.config import Config, ConfigError
from jax_grpo.evaluate import MODES
from jax_grpo.mesh import ONE_DEVICE, Layout, processes
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.policy.named import Policy
from jax_grpo.rollout.episodes import Episodes, TaskPolicy
from jax_grpo.rollout.generate import PromptTokens, completion_ids, decoding_settings, encode_prompts, make_generate
from jax_grpo.rollout.sampling import Sampling
from jax_grpo.rollout.texts import BATCH, TextProgram
from jax_grpo.rollout.turns import make_next_turn, past_columns
from jax_grpo.system.phases import Phases
from jax_grpo.tasks.base import Component, Prompt, Task, TrainerState, held_out_means
from jax_grpo.tasks.episodes import Episode, EpisodicTask
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
    windows, programs, sizes = config.windows(), {}, {"group_size": 1, "layout": layout}
    for mode, temperature in zip(MODES, (0.0, config.rollout.temperature), strict=True):
        settings, cap = decoding_settings(tokenizer, task.stop_rule, Sampling(temperature)), windows.completion
        programs[mode] = make_generate(
            graphdef, settings, max_new_tokens=cap, past_columns=past_columns(windows), **sizes
        )
        if windows.turns > 1:
            programs[mode + LATER_TURNS] = make_next_turn(graphdef, settings, windows=windows, **sizes)
    return programs


class Evaluation(NamedTuple):
    """`metrics` holds `eval/<mode>/<component>` means, `eval/<mode>/reward` and `yardsticks`; completions by mode."""

    metrics: dict[str, float]
    completions: dict[str, list[str]]


class Evaluator:
    """Compiled once for the task's prompts, called with the parameters of the moment."""

    def __init__(
        self,
        policy: Policy,
        task: Task,
        prompts: Sequence[Prompt],
        config: Config,
        task_policy: TaskPolicy | None = None,
        layout: Layout = ONE_DEVICE,
    ):
        self.prompts, self._task_policy = list(prompts), task_policy
        self._task, self._seed, self._tokenizer = task, config.seed, policy.tokenizer
        self._iterations, self._windows = config.iterations, config.windows()
        self._generate = make_programs(policy.graphdef, policy.tokenizer, task, config, layout)
        # Of each prompt, the number of the one whose answer it has.
        self._rows = {mode: list(range(len(self.prompts))) for mode in MODES}
        if not isinstance(task, EpisodicTask):  # equal prompts have one greedy answer
            first: dict[tuple, int] = {}
            self._rows["greedy"] = [
                first.setdefault((prompt.text, prompt.start_state, prompt.max_new_tokens), number)
                for number, prompt in enumerate(self.prompts)
            ]
        limit = config.prompt_limit()
        self._batches = {mode: list(self._encoded(sorted(set(rows)), limit)) for mode, rows in self._rows.items()}

    def __call__(self, params: Any, iteration: int = 0) -> Evaluation:
        """Generates and scores every prompt in both modes, with the weights after so many iterations."""
        metrics, completions = {}, {}
        for mode in MODES:
            completions[mode], scores = self.scores(mode, params, iteration)
            means = held_out_means(scores, self.prompts, self._task.component_weights)
            metrics |= {f"eval/{mode}/{name}": mean for name, mean in means.items()}
        return Evaluation(metrics | self._yardsticks, completions)

    def scores(self, mode: str, params: Any, iteration: int = 0) -> tuple[list[str], Mapping[str, Component]]:
        """The completions of one mode, and their components."""
        answers, ids = (
            self._play(mode, params) if isinstance(self._task, EpisodicTask) else self._complete(mode, params)
        )
        state, rows = TrainerState(iteration, self._iterations), processes.own(len(self.prompts))
        texts, scores, _ = shared_score(self._task, self.prompts[rows], answers[rows], ids[rows], state)
        return texts, scores

    @functools.cached_property
    def _yardsticks(self) -> dict[str, float]:
        return self._task.yardsticks(self.prompts)

    def _encoded(
        self, numbers: Sequence[int], limit: int
    ) -> Iterator[tuple[list[Prompt], PromptTokens, Sequence[int]]]:
        """Batches of the prompts of these numbers."""
        for start in range(0, len(numbers), BATCH):
            batch = [self.prompts[number] for number in numbers[start : start + BATCH]]
            tokens = encode_prompts([prompt.text for prompt in batch], self._tokenizer, limit)
            yield batch, tokens, numbers[start : start + BATCH]

    def _complete(self, mode: str, params: Any) -> tuple[list[str], list[list[int]]]:
        """A completion of each prompt, and its tokens."""
        texts, ids, cap = {}, {}, self._windows.completion
        program = TextProgram(self._generate[mode], self._tokenizer, self._task.stop_rule, cap)
        for prompts, tokens, numbers in self._batches[mode]:
            written, sampled = program.complete(params, prompts, tokens, numbers, self._seed)
            texts |= zip(numbers, written, strict=True)
            ids |= zip(numbers, sampled, strict=True)
        return [texts[number] for number in self._rows[mode]], [ids[number] for number in self._rows[mode]]

    def _play(self, mode: str, params: Any) -> tuple[list[Episode], list[list[int]]]:
        """An episode of each prompt, and the tokens that the model wrote in it.

        As in `TextProgram.complete`, a batch that is not full is filled up by repeating its prompts.
        """
        assert isinstance(self._task, EpisodicTask), "asked of such a task alone"
        turns = self._generate[mode], self._generate.get(mode + LATER_TURNS)
        player = Episodes(self._task, self._tokenizer, self._windows, 1, *turns, self._task_policy)
        episodes: list[Episode] = []
        ids: list[list[int]] = []
        for prompts, tokens, numbers in self._batches[mode]:
            rows = np.resize(np.arange(len(prompts)), BATCH)
            filled_prompts, numbers_P = [prompts[int(row)] for row in rows], np.array(numbers, np.int32)[rows]
            filled = filled_prompts, PromptTokens(tokens.ids_PT[rows], tokens.mask_PT[rows]), numbers_P
            own = processes.own(len(self.prompts))  # those that this process scores
            own_P = (numbers_P >= own.start) & (numbers_P < own.stop)
            played = player.play(params, *filled, self._seed, 0, Phases(), own=own_P)
            assert played.episodes is not None, "what `play` returns"
            episodes += played.episodes[: len(prompts)]
            ids += completion_ids(played)[: len(prompts)]
        return episodes, ids

"""Episodes of several turns: the model completes, the task answers, and so on, until every episode is over.

Owns the columns that an episode's tokens stand in (`config.tasks.Windows`) and the two masks of them: what is read, and what the
model wrote itself. A completion's tokens stay those that were sampled, and an observation is encoded alone: nothing is ever
decoded and encoded again, so that what is trained on is what was sampled. Knows nothing of rewards.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_grpo.config.tasks import Windows
from jax_grpo.mesh import processes
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.rollout.generate import PromptTokens, Rollout, decode_completions, encode_prompts, left_padded
from jax_grpo.rollout.texts import TextProgram
from jax_grpo.system.phases import Phases
from jax_grpo.tasks.base import Prompt
from jax_grpo.tasks.checked import caps
from jax_grpo.tasks.episodes import Elsewhere, Episode, EpisodicTask, Turn, Write, checked_reset, checked_steps

ALL = slice(None)


class ObservationTooLong(ValueError):
    """An observation has no token, or more than the config allows; it is never cut silently."""


class TaskPolicy(NamedTuple):
    """The policy that a task queries between turns (`EpisodicTask.asks`): each prompt by itself."""

    program: TextProgram  # of one completion a prompt
    max_prompt_tokens: int  # all prompts are padded to them: one program serves all turns
    frozen: Any = None  # its parameters; None: those of the policy that plays

    def write(self, params: Any, seed: int, step: int) -> Write:
        """How the task queries it in one batch of episodes, which a policy of these parameters plays."""

        def write(prompts: Sequence[Prompt], numbers: Sequence[int]) -> list[str]:
            texts, most = [prompt.text for prompt in prompts], self.max_prompt_tokens
            tokens = encode_prompts(texts, self.program.tokenizer, most, least=most)
            own = params if self.frozen is None else self.frozen
            return self.program.complete(own, prompts, tokens, numbers, seed, step)[0]

        return write


class Episodes(NamedTuple):
    """What plays a task's episodes: its compiled programs, and how long anything may be."""

    task: EpisodicTask
    tokenizer: Tokenizer
    windows: Windows
    group_size: int
    generate: Callable[..., Any]  # see `rollout.generate.make_generate`
    next_turn: Callable[..., Any] | None  # see `rollout.turns.make_next_turn`; None: there is one turn
    task_policy: TaskPolicy | None = None

    def play(
        self,
        params: Any,
        prompts: Sequence[Prompt],
        tokens: PromptTokens,
        numbers_P: np.ndarray,
        seed: int,
        step: int,
        phases: Phases,
        prepare: Callable[[], object] = lambda: None,
        own: slice | np.ndarray = ALL,
    ) -> Rollout:
        """All turns of the prompts' episodes; those that are over wait, and generate nothing.

        `numbers_P` are as in `make_generate`; `prepare` is called while the first turn is generated. Phases are `rollout` and
        `environment`. Of several processes each answers the episodes of its `own` prompts (a slice of them, or bool [P]), and
        gets the others' answers. Where the task queries a policy, which all devices are, each answers all of them.

        Raises:
            ObservationTooLong: names the task, the sample, the tokens and the limit.
            RewardError, EngineError: the task's own failures.
        """
        if self.task_policy is not None:
            self.task.meet(self.task_policy.write(params, seed, step))
        rows = [
            dataclasses.replace(prompt, draw=(seed, step, int(number), sample))
            for prompt, number in zip(prompts, numbers_P, strict=True)
            for sample in range(self.group_size)
        ]
        windows, states_P = self.windows, np.array([prompt.start_state for prompt in prompts], np.int32)
        sampled_by = states_P, numbers_P, seed, jnp.int32(step), caps(prompts, windows.completion)
        everybody = processes.count() == 1 or self.task.asks is not None
        episodes = phases.run("environment", lambda: self._begun(rows, ALL if everybody else own))
        live = dict(enumerate(episodes))

        def first_turn() -> Any:
            made = self.generate(params, *tokens, *sampled_by)
            prepare()
            return made

        made = phases.run("rollout", first_turn)
        rollout, cache = (made, None) if self.next_turn is None else made
        written: list[Rollout] = []
        observed: list[PromptTokens] = []
        for turn in range(windows.turns):
            written.append(jax.device_get(processes.gathered(rollout)))
            answers = phases.run("environment", partial(self._answers, rows, live, written[-1]))
            live = {row: episode for row, episode in live.items() if not episode.done}
            if self.next_turn is None or not live or turn + 1 == windows.turns:
                break
            observed.append(self._encoded(rows, {row: answers[row] for row in live}))
            goes_on_PG = np.isin(np.arange(len(rows)), list(live)).reshape(len(prompts), -1)
            inputs = tokens.mask_PT, *observed[-1], goes_on_PG, *sampled_by, jnp.int32(turn + 1)
            rollout, cache = phases.run("rollout", partial(self.next_turn, params, cache, rollout, *inputs))
        return _in_columns(windows, self.tokenizer.pad_id, episodes, written, observed)

    def _begun(self, rows: Sequence[Prompt], own: slice | np.ndarray) -> list[Episode]:
        """A fresh episode of each row; its environment is where it is answered."""
        own_P = np.zeros(len(rows) // self.group_size, bool)
        own_P[own] = True
        own_B = np.repeat(own_P, self.group_size)
        begun = iter(checked_reset(self.task, [row for row, own in zip(rows, own_B, strict=True) if own]))
        return [next(begun) if own else Episode(Elsewhere()) for own in own_B]

    def _answers(self, rows: Sequence[Prompt], live: Mapping[int, Episode], rollout: Rollout) -> dict[int, str]:
        """Observations by row. Episodes have a turn more, and know whether they are done and were cut."""
        stopped_B, states_B = np.asarray(rollout.stopped_PG).reshape(-1), [prompt.start_state for prompt in rows]
        texts = decode_completions(rollout, self.tokenizer, self.task.stop_rule, states_B)
        here = {row: episode for row, episode in live.items() if not isinstance(episode.environment, Elsewhere)}
        steps = checked_steps(self.task, rows, here, [texts[row] for row in here]) if here else []
        everybodys = processes.exchanged([[row, *answer] for row, answer in zip(here, steps, strict=True)])
        answers = {row: (observation, done) for own in everybodys for row, observation, done in own}
        for row, episode in live.items():
            observation, done = answers[row]
            episode.turns.append(Turn(texts[row], observation))
            episode.done, episode.cut = bool(done), episode.cut or not stopped_B[row]
        return {row: answers[row][0] for row in live}

    def _encoded(self, rows: Sequence[Prompt], observations: Mapping[int, str]) -> PromptTokens:
        """Ids and mask [P, G, O], padded on the left; rows without an observation are padding alone."""
        limit, encoded = self.windows.observation, self.tokenizer.encode_batch(list(observations.values()))
        for (row, text), ids in zip(observations.items(), encoded, strict=True):
            if not 1 <= len(ids) <= limit:
                raise ObservationTooLong(
                    f"task {self.task.name!r}, sample {row}: prompt {rows[row].text[:80]!r}, observation {text[:80]!r} has "
                    f"{len(ids)} tokens; expected 1 to task.episode.max_observation_tokens = {limit}"
                )
        ids_of = dict(zip(observations, encoded, strict=True))
        padded = left_padded([ids_of.get(row, []) for row in range(len(rows))], limit, self.tokenizer.pad_id)
        return PromptTokens(*(x_BO.reshape(-1, self.group_size, limit) for x_BO in padded))


def require_fitting_observations(
    task: EpisodicTask, prompts: Sequence[Prompt], tokenizer: Tokenizer, windows: Windows
) -> None:
    """Refuses, with an ObservationTooLong, what would be too long in the middle of a run, as far as the task can tell before."""
    texts = [text for prompt in prompts if (text := task.observation(prompt)) is not None]
    lengths = [len(ids) for ids in tokenizer.encode_batch(texts)] if windows.turns > 1 else []
    if lengths and (longest := max(lengths)) > windows.observation:
        raise ObservationTooLong(
            f"task {task.name!r}: an observation such as {texts[lengths.index(longest)]!r} has {longest} tokens; "
            f"task.episode.max_observation_tokens is {windows.observation}, expected at least {longest}, and some to spare"
        )


def _in_columns(
    windows: Windows,
    pad_id: int,
    episodes: list[Episode],
    written: Sequence[Rollout],
    observed: Sequence[PromptTokens],
) -> Rollout:
    """Each turn's arrays in its columns; turns that no episode reached are padding.

    An episode is stopped where every completion ended by its stop, and the task ended the episode.
    """
    rows = (*written[0].completion_ids_PGC.shape[:2], windows.columns)
    ids_PGC, (mask_PGC, read_PGC) = np.full(rows, pad_id, np.int32), np.zeros((2, *rows), np.int32)
    logp_PGC = np.zeros(rows, written[0].sampling_logp_PGC.dtype)
    for turn, rollout in enumerate(written):
        columns = slice(windows.begin(turn), windows.begin(turn) + windows.completion)
        ids_PGC[..., columns], logp_PGC[..., columns] = rollout.completion_ids_PGC, rollout.sampling_logp_PGC
        mask_PGC[..., columns] = read_PGC[..., columns] = rollout.completion_mask_PGC
    for turn, observation in enumerate(observed):
        columns = slice(windows.begin(turn) + windows.completion, windows.begin(turn + 1))
        ids_PGC[..., columns], read_PGC[..., columns] = observation.ids_PT, observation.mask_PT
    stopped_PG = np.array([episode.done and not episode.cut for episode in episodes]).reshape(rows[:2])
    ids, mask, logp, stopped, read = map(jnp.asarray, (ids_PGC, mask_PGC, logp_PGC, stopped_PG, read_PGC))
    return Rollout(ids, mask, logp, stopped, read, episodes)

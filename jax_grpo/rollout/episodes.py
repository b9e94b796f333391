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
from jax_grpo.rollout.generate import PromptTokens, Rollout, decode_completions, encode_prompts, padded_length
from jax_grpo.rollout.texts import BATCH, Texts
from jax_grpo.system.phases import Phases
from jax_grpo.tasks.base import Prompt, caps
from jax_grpo.tasks.episodes import Elsewhere, Episode, EpisodicTask, Turn, Write, checked_reset, checked_steps


class ObservationTooLong(ValueError):
    """An observation has no token, or more than the config allows; it is never cut silently."""


class Played(NamedTuple):
    """Episodes of P prompts, G each: the arrays of a `Rollout` over all windows, C columns, and what was said."""

    completion_ids_PGC: jax.Array  # int32, observations among them
    completion_mask_PGC: jax.Array  # int32, 1 on what the model wrote
    sampling_logp_PGC: jax.Array  # 0 where it did not
    stopped_PG: jax.Array  # every completion ended by its stop, and the task ended the episode
    read_mask_PGC: jax.Array  # int32, 1 on what the model wrote and on observations
    episodes: list[Episode]  # one a row


class Partner(NamedTuple):
    """The policy that a task asks between turns (`EpisodicTask.asks`): each prompt by itself, in batches of `texts.BATCH`."""

    texts: Texts
    program: Callable[..., Any]  # of one completion a prompt
    max_prompt_tokens: int  # all prompts are padded to them: one program serves all turns
    frozen: Any = None  # its parameters; None: those of the policy that plays

    def writing(self, params: Any, seed: int, step: jax.typing.ArrayLike) -> Write:
        """How the task asks in one batch of episodes, which a policy of these parameters plays."""

        def write(prompts: Sequence[Prompt], numbers: Sequence[int]) -> list[str]:
            width, texts = padded_length(self.max_prompt_tokens), []
            asked = [prompt.text for prompt in prompts]
            ids_PT, mask_PT = encode_prompts(asked, self.texts.tokenizer, self.max_prompt_tokens, least=width)
            for start in range(0, len(prompts), BATCH):
                rows = slice(start, start + BATCH)
                batch = prompts[rows], PromptTokens(ids_PT[rows], mask_PT[rows]), numbers[rows]
                used = params if self.frozen is None else self.frozen
                texts += self.texts.complete(self.program, used, *batch, seed, step)  # pyright: ignore[reportArgumentType]
            return texts

        return write


class Episodes(NamedTuple):
    """What plays a task's episodes: its compiled programs, and how long anything may be."""

    task: EpisodicTask
    tokenizer: Tokenizer
    windows: Windows
    group_size: int
    generate: Callable[..., Any]  # see `rollout.generate.make_generate`
    next_turn: Callable[..., Any] | None  # see `rollout.turns.make_next_turn`; None: there is one turn
    partner: Partner | None = None  # where the task asks a policy

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
        own_P: np.ndarray | None = None,
    ) -> Played:
        """All turns of the prompts' episodes; those that are over wait, and generate nothing.

        `numbers_P` are as in `make_generate`; `prepare` is called while the first turn is generated. Phases are `rollout` and
        `environment`. Of several processes each answers the episodes of its `own_P` (bool; None: its share of the prompts), and
        is told what the others answered. Where the task asks a policy, which all devices are, each answers all of them.

        Raises:
            ObservationTooLong: names the task, the sample, the tokens and the limit.
            RewardError, EngineError: the task's own failures.
        """
        if self.partner is not None:
            self.task.meet(self.partner.writing(params, seed, step))
        rows = [
            dataclasses.replace(prompt, draw=(seed, step, int(number), sample))
            for prompt, number in zip(prompts, numbers_P, strict=True)
            for sample in range(self.group_size)
        ]
        windows, step = self.windows, jnp.int32(step)
        states_P = np.array([prompt.start_state for prompt in prompts], np.int32)
        caps_P = caps(prompts, windows.completion)
        episodes = phases.run("environment", lambda: self._begun(rows, own_P))
        live = dict(enumerate(episodes))

        def first() -> Any:
            made = self.generate(params, *tokens, states_P, numbers_P, seed, step, caps_P)
            prepare()
            return made

        made = phases.run("rollout", first)
        rollout, kept = (made, None) if self.next_turn is None else made
        written: list[Rollout] = []
        observed: list[PromptTokens] = []
        for turn in range(windows.turns):
            written.append(_on_host(rollout))
            answers = phases.run("environment", partial(self._answers, rows, live, written[-1]))
            live = {row: episode for row, episode in live.items() if not episode.done}
            if self.next_turn is None or not live or turn + 1 == windows.turns:
                break
            observed.append(self._encoded(rows, {row: answers[row] for row in live}))
            goes_on_PG = np.isin(np.arange(len(rows)), list(live)).reshape(len(prompts), -1)
            asked = (*observed[-1], goes_on_PG, states_P, numbers_P, seed, step, caps_P, jnp.int32(turn + 1))
            go_on = partial(self.next_turn, params, kept, rollout, tokens.mask_PT, *asked)
            rollout, kept = phases.run("rollout", go_on)
        return _in_columns(windows, self.tokenizer.pad_id, episodes, written, observed)

    def _begun(self, rows: Sequence[Prompt], own_P: np.ndarray | None) -> list[Episode]:
        """A fresh episode of each row, its environment where it is answered."""
        if self._answers_all:
            return checked_reset(self.task, rows)
        if own_P is None:
            own_P = np.zeros(len(rows) // self.group_size, bool)
            own_P[processes.own(len(own_P))] = True
        own_B = np.repeat(own_P, self.group_size)
        begun = iter(checked_reset(self.task, [row for row, own in zip(rows, own_B, strict=True) if own]))
        return [next(begun) if own else Episode(Elsewhere()) for own in own_B]

    @property
    def _answers_all(self) -> bool:
        return processes.count() == 1 or self.task.asks is not None

    def _answers(self, rows: Sequence[Prompt], live: Mapping[int, Episode], rollout: Rollout) -> dict[int, str]:
        """Observations by row. Episodes have a turn more, and know whether they are done and were cut."""
        stopped_B, states_B = np.asarray(rollout.stopped_PG).reshape(-1), [prompt.start_state for prompt in rows]
        texts = decode_completions(rollout, self.tokenizer, self.task.stop_rule, states_B)
        here = {row: episode for row, episode in live.items() if not isinstance(episode.environment, Elsewhere)}
        steps = checked_steps(self.task, rows, here, [texts[row] for row in here]) if here else []
        answers = dict(zip(here, steps, strict=True))
        if not self._answers_all:
            told = processes.exchanged([[row, *answer] for row, answer in answers.items()])
            answers = {row: (observation, done) for own in told for row, observation, done in own}
        for row, episode in live.items():
            observation, done = answers[row]
            episode.turns.append(Turn(texts[row], observation))
            episode.done, episode.cut = bool(done), episode.cut or not stopped_B[row]
        return {row: answers[row][0] for row in live}

    def _encoded(self, rows: Sequence[Prompt], observations: Mapping[int, str]) -> PromptTokens:
        """Ids and mask [P, G, O], padded on the left; rows without an observation are padding alone."""
        limit = self.windows.observation
        ids_BO = np.full((len(rows), limit), self.tokenizer.pad_id, np.int32)
        mask_BO = np.zeros_like(ids_BO)
        encoded = self.tokenizer.encode_batch(list(observations.values()))
        for (row, text), ids in zip(observations.items(), encoded, strict=True):
            if not 1 <= len(ids) <= limit:
                raise ObservationTooLong(
                    f"task {self.task.name!r}, sample {row}: prompt {rows[row].text[:80]!r}, observation {text[:80]!r} has "
                    f"{len(ids)} tokens; expected 1 to task.episode.max_observation_tokens = {limit}"
                )
            ids_BO[row, limit - len(ids) :], mask_BO[row, limit - len(ids) :] = ids, 1
        shape = (-1, self.group_size, limit)
        return PromptTokens(ids_BO.reshape(shape), mask_BO.reshape(shape))


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


def _on_host(rollout: Rollout) -> Rollout:
    return Rollout(*jax.device_get(tuple(processes.gathered(rollout))))


def _in_columns(
    windows: Windows,
    pad_id: int,
    episodes: list[Episode],
    written: Sequence[Rollout],
    observed: Sequence[PromptTokens],
) -> Played:
    """Each turn's arrays in its columns; turns that nobody came to are padding."""
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
    return Played(ids, mask, logp, stopped, read, episodes)

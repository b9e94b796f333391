"""Procedural data sets of the library reasoning-gym (Stojanovski et al. 2025): its questions, its own scores of answers.

A row is only a number: the seed says which data set asks, and which of its instances. A tenth of all questions is held out by a
hash of the text, as the prompts of a file are, so that no text that is asked in evaluations is ever trained on.
"""

import importlib
import importlib.metadata
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from jax_grpo.config import ConfigError
from jax_grpo.config.loading import did_you_mean
from jax_grpo.config.sections import Count, Positive, PromptsConfig, Section, Text
from jax_grpo.config.tasks import Settings
from jax_grpo.prompts.chat import ChatTemplateError, messages_of
from jax_grpo.prompts.table import Rows, is_heldout
from jax_grpo.prompts.template import PromptTemplate, TemplateError
from jax_grpo.rewards.texts import between_tags, last_figures_of
from jax_grpo.rewards.worker import NoReply, Worker
from jax_grpo.tasks.base import Component, Headline, Prompt, Task, component, with_overrides
from jax_grpo.tasks.stop import text_stop

LIBRARY = "reasoning_gym"
DEFAULT_ASK = [{"role": "user", "content": "{{ question }}"}]
LIMIT_S = 10.0  # for an instance to be made, or an answer scored
MOST_UNFINISHED = 3  # of one prompt
TRIES = 1000  # instances that are looked at for one of the wanted split


def _last_word(text: str) -> str | None:
    words = text.split()
    return words[-1].strip(".,;:!?\"'*()") if words else None


def _after_answer(text: str) -> str | None:
    """What stands behind the last `Answer:` up to the end of its line."""
    _, marked, after = text.rpartition("Answer:")
    return after.strip().partition("\n")[0].strip() if marked else None


ANSWERS: dict[str, Callable[[str], str | None]] = {
    "whole": str.strip,
    "last_number": last_figures_of,
    "last_word": _last_word,
    "tags": lambda text: between_tags(text, "answer"),
    "after_answer": _after_answer,
}


class DatasetSettings(Section):
    """One data set of the library."""

    weight: Positive = 1.0
    """Of the prompts, relative to the other data sets' weights; met on average."""
    answer: Literal["whole", "last_number", "last_word", "tags", "after_answer"] = "tags"
    """What of a completion is the answer: all of it; its last number or word; what stands in the last <answer>...</answer>; what
    stands behind the last `Answer:` in its line. Without one the score is 0."""
    settings: dict[str, Any] = Field(default={})
    """The library's own, such as {max_terms: 3} of chain_sum."""


class ReasoningGymSettings(Settings):
    """`reasoning_gym`: questions of the library reasoning-gym."""

    datasets: Annotated[dict[str, DatasetSettings], Field(min_length=1)]
    """By the library's names, such as {chain_sum: {answer: last_number, settings: {max_terms: 3}}, leg_counting: {weight: 2}}."""
    instances: Count = 10_000
    """Of each data set, a tenth of them held out."""
    ask: Text | list[dict[str, Text]] | None = None
    """What makes a prompt of the column `question`, as prompts.template; null: one message of the user's, the question."""


class ReasoningGymTask(Task[int]):
    """Components (raw values in [0, 1]):

    score: the library's own of the answer.  right: whether that is 1.  and the score of each data set, about its own prompts.

    Raises:
        ConfigError: the library is missing, or a data set or its settings are not as it has them.
    """

    name, noun, reads, Settings = "reasoning_gym", "prompts", "positions", ReasoningGymSettings
    headlines = (Headline("right", "right_fraction", "right", "answers that are right", "share"),)
    shown = ("score", "right")

    def __init__(self, settings: ReasoningGymSettings):
        self._settings, self._chosen = settings, settings.datasets
        arguments = {name: _arguments(name, one, settings.instances) for name, one in settings.datasets.items()}
        self._library = Worker("jax_grpo.rewards.gym_worker", arguments)
        try:
            self._ask = PromptTemplate(DEFAULT_ASK if settings.ask is None else settings.ask)
        except TemplateError as error:
            raise ConfigError(str(error).replace("prompts.template", "task.ask")) from error
        self._template_arguments: Mapping[str, Any] = {}
        weights = {"score": 1.0, "right": 0.0} | dict.fromkeys(settings.datasets, 0.0)
        self.component_weights = with_overrides(self.name, weights, settings.rewards)
        self.stop_rule = text_stop()

    def read(self, prompts: PromptsConfig, seed: int, cache: str | None) -> Rows[int]:
        """As many rows as instances; they have numbers alone."""
        for key in ("source", "template"):
            if getattr(prompts, key) != getattr(PromptsConfig(), key):
                remedy = "; expected task.ask" if key == "template" else ""
                raise ConfigError(
                    f"prompts.{key} is {getattr(prompts, key)!r}, which does nothing: task reasoning_gym makes its prompts{remedy}"
                )
        self._template_arguments = prompts.chat_template_kwargs
        if prompts.chat_template_kwargs and self._made_of("?")[1] is None:
            raise ConfigError(
                f"prompts.chat_template_kwargs {prompts.chat_template_kwargs} do nothing: task.ask makes texts, which go through "
                "no chat template"
            )
        version = importlib.metadata.version("reasoning-gym")
        made_of = self._settings.model_dump(include={"datasets", "instances", "ask"})
        return _Numbers(self._settings.instances, f"reasoning-gym {version} {json.dumps(made_of, sort_keys=True)}")

    def prompt(self, row: Any, seed: int) -> Prompt:
        return self._first_of_split(seed, heldout=False)

    def heldout_prompt(self, row: Any, seed: int) -> Prompt:
        return self._first_of_split(seed, heldout=True)

    def _first_of_split(self, seed: int, *, heldout: bool) -> Prompt:
        """The first instance that the seed gives whose question is in this split."""
        rng = random.Random(f"reasoning_gym/{seed}")
        (name,) = rng.choices([*self._chosen], [one.weight for one in self._chosen.values()])
        unfinished = 0
        for _ in range(TRIES):
            number = rng.randrange(self._settings.instances)
            try:
                question = self._library.ask(name, number, seconds=LIMIT_S)
            except NoReply:
                if (unfinished := unfinished + 1) < MOST_UNFINISHED:
                    continue  # the library's number_sequence never finishes one instance in 2,000
                raise ConfigError(
                    f"task.datasets.{name} with {self._chosen[name].settings}: the library did not finish {unfinished} "
                    f"instances in {LIMIT_S:g} s each, such as {number}, or failed (see above)"
                ) from None
            if is_heldout(question, 1, 9) == heldout:
                text, messages = self._made_of(question)
                return Prompt(text, 0, number, answer=json.dumps([name, number]), messages=messages)
        split = "held out" if heldout else "trained on"
        raise ConfigError(
            f"task.datasets.{name} with {self._chosen[name].settings} has so few different questions that none of {TRIES} is "
            f"{split}; give it settings with more"
        )

    def _made_of(self, question: str) -> tuple[str, list[dict[str, Any]] | None]:
        """The prompt's text, and the messages that it is of."""
        try:
            made = self._ask({"question": question})
            if isinstance(made, str):
                return made, None
            if self.chat is None:
                raise ChatTemplateError("messages need a chat template, and there is no tokenizer here that has one")
            messages = messages_of(made)
            return self.chat.render(messages, arguments=self._template_arguments), messages
        except (ChatTemplateError, TemplateError) as error:
            text = 'for a model without one give a text, such as task.ask: "{{ question }}\\n"'
            raise ConfigError(f"task.ask: {error}; {text}") from error

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> dict[str, Component]:
        names, scores = [], []
        for prompt, text in zip(prompts, completions, strict=True):
            name, number = json.loads(prompt.answer or "")
            answer = ANSWERS[self._chosen[name].answer](text)
            names.append(name)
            scores.append(0.0 if answer is None else self._score(name, number, answer))
        own = {
            name: [s if other == name else None for other, s in zip(names, scores, strict=True)]
            for name in self._chosen
        }
        values = {"score": scores, "right": [float(score == 1) for score in scores], **own}
        return {name: component(values[name]) for name in self.component_weights}

    def _score(self, name: str, number: int, answer: str) -> float:
        """The library's score; 0 where its scorer cannot read the answer, or does not come to an end."""
        try:
            return self._library.ask(name, number, answer, seconds=LIMIT_S)
        except NoReply:
            return 0.0

    def close(self) -> None:
        self._library.close()


class _Numbers(Rows[int]):
    """Rows that are their own numbers."""

    noun, apart = "prompts", None

    def __init__(self, count: int, identity: str):
        self._count, self.identity = count, identity

    def __len__(self) -> int:
        return self._count

    def row(self, index: int) -> int:
        return index


def _arguments(name: str, chosen: DatasetSettings, instances: int) -> dict[str, Any]:
    """What the library makes the data set of this name of; it has made one."""
    try:
        factory = importlib.import_module(f"{LIBRARY}.factory")
        importlib.import_module(LIBRARY)
    except ImportError as error:
        raise ConfigError(
            f"task.name reasoning_gym needs the library: pip install 'jax_grpo[reasoning-gym]' ({error})"
        ) from None
    if name not in factory.DATASETS:
        known = [*factory.DATASETS]
        raise ConfigError(
            f"task.datasets has {name!r}; expected one of reasoning-gym's {len(known)}.{did_you_mean(name, known)}"
        )
    if clash := {"seed", "size"} & chosen.settings.keys():
        raise ConfigError(
            f"task.datasets.{name}.settings has {min(clash)!r}; expected seed and task.instances of the run"
        )
    arguments = chosen.settings | {"seed": 0, "size": instances}
    try:
        factory.create_dataset(name, **arguments)
        return arguments
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"task.datasets.{name}.settings {chosen.settings}: {error}") from error

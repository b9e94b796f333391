"""The user's reward functions: their names, what they take, and how they are called, side by side and for so long at most.

Each call is given copies: a function that changes a list changes it for nobody else, in this call or a later one. Knows nothing
of prompts or of what an answer means.
"""

import asyncio
import concurrent.futures
import contextlib
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax_grpo.config.imported import source_file
from jax_grpo.tasks.copies import copied

Function = Callable[..., Any]


class RewardFunction(NamedTuple):
    """A function under the name of its component."""

    name: str
    function: Function

    @property
    def file(self) -> str | None:
        """The file that it was written in."""
        return source_file(self.function)

    @property
    def place(self) -> str:
        """As errors name it: file, line and name."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        code = code or getattr(type(self.function).__call__, "__code__", None)
        return f"{code.co_filename}:{code.co_firstlineno}: {self.name}" if code else self.name

    @property
    def is_async(self) -> bool:
        """Whether it is a coroutine function, or an object whose call is one."""
        return any(map(inspect.iscoroutinefunction, (self.function, type(self.function).__call__)))

    def parameters(self) -> list[inspect.Parameter]:
        """What it takes; `**anything` where it does not say, as some builtins."""
        try:
            return list(inspect.signature(self.function).parameters.values())
        except ValueError:
            return [inspect.Parameter("anything", inspect.Parameter.VAR_KEYWORD)]

    def taken(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the arguments that it can be called with."""
        parameters = self.parameters()
        if any(each.kind is each.VAR_KEYWORD for each in parameters):
            return dict(arguments)
        names = {each.name for each in parameters}
        return {name: value for name, value in arguments.items() if name in names}

    def required(self) -> list[str]:
        """Names of the arguments that it cannot be called without."""
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return [each.name for each in self.parameters() if each.kind in kinds and each.default is each.empty]


def named(functions: Sequence[Function]) -> list[RewardFunction]:
    """Functions under names of their own: `reward`, and `reward_2` where two are called so."""
    rewards: dict[str, RewardFunction] = {}
    for function in functions:
        base = getattr(function, "__name__", type(function).__name__)
        names = itertools.chain([base], (f"{base}_{number}" for number in itertools.count(2)))
        name = next(name for name in names if name not in rewards)
        rewards[name] = RewardFunction(name, function)
    return list(rewards.values())


class Calls:
    """Calls of reward functions, each with a time limit.

    A function runs in a thread, since one that hangs can be neither named nor left behind in its caller's; the thread ends with the
    process at the latest. Coroutines share one event loop for the whole run, as in TRL: a client that one opened stays usable.
    """

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None

    def answers(
        self, rewards: Sequence[RewardFunction], arguments: Mapping[str, Any]
    ) -> Iterator[tuple[RewardFunction, concurrent.futures.Future]]:
        """Each function with what it answered or raised: plain functions one after another, then coroutines together.

        An answer is given before the next plain function is called, which may write into the same array.

        Raises:
            TimeoutError: names the first that has not answered in time.
        """
        for reward in rewards:
            if not reward.is_async:
                yield from self._wait([(reward, self._start(reward, arguments))])
        yield from self._wait([(reward, self._start(reward, arguments)) for reward in rewards if reward.is_async])

    def close(self) -> None:
        """Ends the event loop."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    def _wait(
        self, started: Sequence[tuple[RewardFunction, concurrent.futures.Future]]
    ) -> Iterator[tuple[RewardFunction, concurrent.futures.Future]]:
        concurrent.futures.wait([future for _, future in started], self._timeout_s)
        for reward, future in started:
            if not future.done():
                future.cancel()
                raise TimeoutError(f"{reward.place} has not answered within task.timeout_s {self._timeout_s:g} s")
            yield reward, future

    def _start(self, reward: RewardFunction, arguments: Mapping[str, Any]) -> concurrent.futures.Future:
        taken = {name: value if callable(value) else copied(value) for name, value in reward.taken(arguments).items()}
        future: concurrent.futures.Future = concurrent.futures.Future()

        @contextlib.contextmanager
        def answering() -> Iterator[None]:
            try:
                yield
            except concurrent.futures.InvalidStateError:  # cancelled: it answered after its time
                pass
            except BaseException as error:  # who waits for it reports it; a SystemExit would end the event loop
                with contextlib.suppress(concurrent.futures.InvalidStateError):
                    future.set_exception(error)

        def run() -> None:
            with answering():
                future.set_result(reward.function(**taken))

        async def wait_for() -> None:
            with answering():
                future.set_result(await reward.function(**taken))

        if not reward.is_async:
            threading.Thread(target=run, daemon=True).start()
            return future
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True).start()
        waiting = asyncio.run_coroutine_threadsafe(wait_for(), self._loop)
        future.add_done_callback(lambda done: done.cancelled() and waiting.cancel())
        return future

"""The process that scores texts: what a text does there, the next one is scored, and the run goes on."""

import os
import resource
import subprocess
import sys

import pytest

from jax_grpo.rewards import worker
from jax_grpo.rewards.worker import NoReply, TooSlow, Worker

EVALUATES = """
from jax_grpo.rewards.worker import serve

if __name__ == "__main__":
    serve(lambda settings: lambda text: [settings["name"], eval(text)])
"""


@pytest.fixture
def module(tmp_path, monkeypatch) -> str:
    """A module that evaluates its texts as Python."""
    (tmp_path / "evaluates.py").write_text(EVALUATES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return "evaluates"


@pytest.fixture
def process(module):
    process = Worker(module, {"name": "sums"})
    yield process
    process.close()


def test_replies_belong_to_their_requests(process):
    assert [process.ask(text, seconds=60) for text in ("1 + 1", "print(3)", "None")] == [
        ["sums", 2], ["sums", None], ["sums", None],
    ]  # fmt: skip


def test_a_run_with_more_than_1024_files_open_has_replies(process):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(2048, hard)), hard))
    opened = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while opened[-1] < 1024:
            opened.append(os.dup(opened[0]))
        assert process.ask("1 + 1", seconds=60) == ["sums", 2]
    finally:
        for number in opened:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_every_process_has_the_same_order_of_sets(module):
    texts = []
    for _ in range(2):
        process = Worker(module, {"name": "sums"})
        texts.append(process.ask("list({'one', 'two', 'three', 'four', 'five', 'six', 'seven'})", seconds=60))
        process.close()
    assert texts[0] == texts[1]


@pytest.mark.parametrize("text", ["exit()", "__import__('os')._exit(0)", "input()", "while", "9**9**9"])
def test_a_text_that_ends_the_process_or_never_ends_has_no_reply_and_the_next_one_has(process, text):
    assert process.ask("2", seconds=60) == ["sums", 2]
    with pytest.raises(NoReply) as raised:
        process.ask(text, seconds=2.0)
    assert isinstance(raised.value, TooSlow) == (text == "9**9**9")
    assert process.ask("3", seconds=60) == ["sums", 3]


def test_a_process_that_cannot_start_is_named(monkeypatch):
    with pytest.raises(RuntimeError, match=r"-m jax_grpo\.rewards\.absent: not ready within 60 s, or ended"):
        Worker("jax_grpo.rewards.absent").ask("1", seconds=60)
    monkeypatch.setattr(worker, "START_S", 0.0)
    with pytest.raises(RuntimeError, match=r"not ready within 0 s"):
        Worker("this").ask("1", seconds=60)


def test_ctrl_c_reaches_the_run_alone(module):
    """A terminal sends the signal to the whole group; the iteration that is to be finished needs the process."""
    code = """if True:
        import os, signal, time
        from jax_grpo.rewards.worker import Worker
        signal.signal(signal.SIGINT, lambda *_: None)
        process = Worker("evaluates", {"name": "sums"})
        before = process.ask("1", seconds=60)
        os.killpg(0, signal.SIGINT)
        time.sleep(0.5)
        print(before, process.ask("2", seconds=60))
        process.close()"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, start_new_session=True, check=False
    )
    assert ended.stdout == "['sums', 1] ['sums', 2]\n" and not ended.stderr, ended.stderr

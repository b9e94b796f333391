"""`python -m jax_grpo.evaluate RUN`: a run's held-out prompts by its own rewards, the same numbers as its last evaluation."""

import json
import shutil

import pytest
from test_own_runs import CONFIG, folder, mended  # noqa: F401 - a fixture

from jax_grpo import __main__ as doors
from jax_grpo import train as training
from jax_grpo.evaluate import MODES, own_rewards
from jax_grpo.evaluate.__main__ import main
from jax_grpo.evaluate.statistics import cluster_bootstrap_mean
from jax_grpo.report.records import read_records
from jax_grpo.run.files import read_manifest, write_manifest


def test_a_runs_held_out_prompts_have_the_means_of_its_last_evaluation_and_intervals(folder, capsys, monkeypatch):  # noqa: F811
    mended(folder)
    (folder / "config.yaml").write_text(CONFIG.replace("iterations: 5", "iterations: 1"))
    held = [{"prompt": f"{a}+9=", "answer": a + 9} for a in range(3)] * 3
    (folder / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held))
    training.main(["--config", "config.yaml", "--evaluation.positions", "9", "--evaluation.source", "held.jsonl"])
    last = read_records(folder / "run" / "metrics.jsonl")[-1]
    assert "next:\n    python -m jax_grpo.evaluate run\n" in capsys.readouterr().out
    asked = []
    monkeypatch.setattr(
        own_rewards, "cluster_bootstrap_mean", lambda *given: asked.append(given) or cluster_bootstrap_mean(*given)
    )
    made, table_of = [], own_rewards.table_of
    monkeypatch.setattr(own_rewards, "table_of", lambda run: made.append(table_of(run)) or made[-1])
    main(["run"])
    printed = capsys.readouterr().out
    title, (_, *modes), rows = made[0]
    assert "iteration 1: 9 held-out prompts" in title and modes == ["greedy", "sampled at 1"]
    assert [name for name, *_ in rows] == ["reward", "right", "short"]
    for name, *shown in rows:
        for mode, text in zip(MODES, shown, strict=True):
            value, *interval = map(float, text.replace("[", " ").replace("]", " ").replace(",", " ").split())
            assert value == pytest.approx(last[f"eval/{mode}/{name}"], abs=6e-4), (name, mode)
            assert interval == [] if name == "right" else interval[0] <= value <= interval[1], "right is of one prompt"
    # Of a prompt that is there three times the answers are no three observations.
    (_, all_of_them, _), (_, even, _) = asked[:2]
    assert all_of_them == ["0+9=", "1+9=", "2+9="] * 3 and even == ["1+9="] * 3, "right is None where the sum is odd"
    assert all(word in printed for word in ("iteration 1", *rows[0], *rows[1], *rows[2]))

    # What cannot be scored is one line.
    place = folder / "run" / "checkpoints" / "000001"
    for number, (part, change, words) in enumerate(
        [
            ("identity", {"task": "mine.Task"}, "Python gave its task, mine.Task; expected"),
            ("config", {"evaluation": {"positions": 0}}, "its evaluation.positions is 0; expected"),
        ]
    ):
        shutil.copytree(place, copy := folder / f"{number}")
        content = read_manifest(copy)
        write_manifest(copy, content | {part: content[part] | change})
        with pytest.raises(SystemExit, match=rf"EvaluationError: RUN {copy}: {words}"):
            main([str(copy)])
    with pytest.raises(
        SystemExit, match=r"RUN elsewhere: no checkpoint; expected a run's folder with one in checkpoints"
    ):
        doors.main(["evaluate", "elsewhere"])
    with pytest.raises(SystemExit, match="RUN run: expected alone"):
        main(["run", "--seed", "1"])

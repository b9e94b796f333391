"""Files of a run that continues hold each iteration once."""

import json

import numpy as np
from conftest import config

from jax_grpo.report.log import MetricsLog
from jax_grpo.report.records import read_records


def test_records_from_the_first_iteration_to_come_are_written_again_and_only_once(tmp_path):
    settings = config(logging={"tensorboard": False})
    with MetricsLog(tmp_path, settings) as log:
        for iteration in range(4):
            log.histograms(iteration, {"legal": np.full(2, iteration / 4)})
            log.samples(iteration, [{"prompt": str(iteration)}])
    with MetricsLog(tmp_path, settings, first_iteration=2) as log:  # a checkpoint after two iterations
        for iteration in range(2, 5):
            log.histograms(iteration, {"legal": np.full(2, iteration / 4)})
            log.samples(iteration, [{"prompt": f"again {iteration}"}])
    for name in ("histograms.jsonl", "samples.jsonl"):
        assert [record["iteration"] for record in read_records(tmp_path / name)] == [0, 1, 2, 3, 4], name
    prompts = [
        json.loads(line)["samples"][0]["prompt"] for line in (tmp_path / "samples.jsonl").read_text().splitlines()
    ]
    assert prompts == ["0", "1", "again 2", "again 3", "again 4"]

"""docs/experiments/scaling.py: exponents are fitted as they say, and a small run's memory grows as its formula."""

import json

import pytest
from conftest import experiment

scaling = experiment("scaling")


def test_exponents_are_those_of_the_powers():
    points = [
        {
            "program": "update",
            "over": "width",
            "size": n,
            "min_ms": 3 * n**2,
            "flops": 5 * n**2,
            "bytes": n,
            "expected_bytes": n**0.5,
        }
        for n in (1, 2, 4)
    ]
    time_fit, memory_fit = scaling.exponents(points)
    assert (time_fit["found"], time_fit["expected"]) == pytest.approx((2, 2))
    assert (memory_fit["found"], memory_fit["expected"]) == pytest.approx((1, 0.5))


@pytest.mark.slow
def test_scaling_gives_exponents_and_pictures(tmp_path, capsys):
    scaling.main(["--over", "length", "--out", str(tmp_path)])
    record, shown = json.loads((tmp_path / "scaling.json").read_text()), capsys.readouterr().out
    print(shown)
    memory = next(fit for fit in record["exponents"] if fit["what"] == "memory" and fit["program"] == "update")
    assert memory["found"] == pytest.approx(memory["expected"], abs=0.25)
    assert f"update's memory over length 8 to 128: {memory['found']:.2f}" in shown
    assert {path.name for path in tmp_path.glob("*.png")} == {"scaling.png", "throughput.png", "roofline.png"}

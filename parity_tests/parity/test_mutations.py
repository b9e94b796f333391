"""The list of faults stands on the code as it is, and its record on the list: a fault whose line has changed was not tried."""

import json

import pytest
from mutations import FAULTS, ROOT

RECORD = ROOT / "docs" / "results" / "parity" / "mutations.json"


@pytest.mark.parametrize("name", FAULTS)
def test_the_line_of_a_fault_stands_in_its_file_once(name):
    fault = FAULTS[name]
    assert (ROOT / fault.path).read_text().count(fault.right) == 1, fault.path
    assert fault.wrong != fault.right


def test_the_record_is_of_these_faults_and_each_was_seen():
    record = json.loads(RECORD.read_text())
    assert list(record) == list(FAULTS)
    for name, fault in FAULTS.items():
        seen = tuple(record[name][part] for part in ("file", "right", "wrong"))
        assert seen == (fault.file, fault.right, fault.wrong), f"{name}: run it again"
        assert record[name]["red"], f"{name}: no test was red"

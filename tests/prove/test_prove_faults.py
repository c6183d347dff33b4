"""The table of faults is made of real runs; here with the harness that needs no installing."""

from pathlib import Path

import harness_faults
import pytest
from fault_lab import fault_lab, troubles

from forge_server.app import load_specs
from forge_server.settings import Settings


@pytest.mark.sandbox
def test_what_a_harness_meets_becomes_a_row(tmp_path: Path) -> None:
    chosen = [one for one in troubles(1.0) if one.name in ("drop once", "500 for good", "swap, drained")]
    with fault_lab(tmp_path, keepalive_after_s=0.2, every_s=0.2) as lab:
        seen = harness_faults.prove(lab, lab, load_specs(Settings())["react"], chosen, 1.0)
    assert not any(one.wrong for one in seen), [one.explain() for one in seen if one.wrong]
    assert harness_faults.table(seen).splitlines() == [
        "| harness | drop once | swap, drained | 500 for good |",
        "| --- | --- | --- | --- |",
        "| react | goes on | goes on | engine_error, rc 1 |",
    ]

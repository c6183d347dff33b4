"""The table of harnesses is made of real runs; here with the one that needs no installing."""

from pathlib import Path

import harnesses
import pytest
from harness_lab import harness_lab

from forge_server.app import load_specs
from forge_server.settings import Settings


@pytest.mark.sandbox
def test_the_standard_task_becomes_a_row(tmp_path: Path) -> None:
    spec = load_specs(Settings())["react"]
    with harness_lab(tmp_path) as lab:
        plain = harnesses.run(lab, "react", "record", spec, plain=True)
        rough = harnesses.run(lab, "react", "record", spec)
    assert plain.result.reward == rough.result.reward == 1.0, rough.result.explain()
    assert plain.result.violations == rough.result.violations == []
    assert plain.cells()[:9] == ["react", "record", "5", "1", "1", "1", "5.00", "-", "-"]
    # what a model says is not what the chat template writes: rendered again, each turn breaks
    assert rough.cells()[:9] == ["react", "record", "5", "1", "5", "1", "1.00", "template 4", "-"]
    head, rule, *rows = harnesses.table([plain, rough]).splitlines()
    assert len(rows) == 2 and head.count("|") == rule.count("|") == rows[0].count("|")

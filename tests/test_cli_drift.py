"""What `forge-server drift` says to a person."""

import pytest
from test_trajectory_codec import rows_of
from test_trajectory_samples import SYSTEM, call, grow

from forge_server.commands import drift
from forge_server.commands import show as out
from forge_server.domain.call import Call
from forge_server.domain.sample import BreakReason
from forge_server.domain.states import Untrainable
from forge_server.trajectory.attempt import cut
from forge_server.trajectory.drift import DriftReport


def said(attempts: list[list[Call]], monkeypatch: pytest.MonkeyPatch, limit: int = 4096) -> str:
    report = DriftReport()
    for calls in attempts:
        report.add(cut(rows_of(calls), limit))
    with out.console.capture() as capture:
        monkeypatch.setattr(out.console, "width", 160)
        drift.show("first", report)
    return capture.get()


def appended() -> list[Call]:
    return [call(i, p, c) for i, (p, c) in enumerate(grow(3, SYSTEM))]


def test_every_reason_is_explained() -> None:
    assert set(drift.MEANING) == set(BreakReason)


def test_conversations_that_only_grow_need_no_explanation(monkeypatch: pytest.MonkeyPatch) -> None:
    text = said([appended(), appended()], monkeypatch)
    assert "2 attempts made 6 calls; 6 of them are trained, in 2 samples" in text
    assert "3.00 calls per sample; 1.00 samples per attempt, 1 at most" in text
    assert "held 1.00 times" in text
    assert [line.split()[3] for line in text.splitlines() if "each has one" in line] == ["first"]
    assert "not trained" not in text and "broke" not in text and "beyond" not in text


def test_each_break_is_named_with_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    nonce = [
        call(seq, [7, 100 + seq, *range(200, 300), *range(900, 900 + 9 * seq)], [seq + 1]) for seq in range(3)
    ]
    text = said([nonce, [call(0, [1], [2], untrainable=Untrainable.CONSTRAINED)]], monkeypatch)
    (line,) = [line for line in text.splitlines() if "changed what had been said" in line]
    assert line.split()[:4] == ["2", str(102 + 9 + 1 + 102 + 18 + 1), "2", "history_edited"]
    assert "2 conversations broke within the first tenth" in text
    assert "calls not trained: constrained=1" in text


def test_what_was_cut_off_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    text = said([appended()], monkeypatch, limit=len(SYSTEM) + 5)
    assert "sampled tokens lie beyond max_sample_tokens" in text


def test_a_run_without_samples_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    text = said([], monkeypatch)
    assert "0 attempts made 0 calls; 0 of them are trained, in 0 samples" in text and "per sample" not in text

"""The drift report and the data check of a run, read from the store attempt by attempt."""

from forge_server.domain.states import AttemptState
from forge_server.export.records import Reader, Run, attempts
from forge_server.trajectory.attempt import cut
from forge_server.trajectory.check import DataReport
from forge_server.trajectory.drift import DriftReport


def drift(reader: Reader, run: Run) -> DriftReport:
    """Over every attempt of the run that has ended and made a call."""
    report = DriftReport()
    for attempt in attempts(reader, run):
        if attempt.state == AttemptState.ENDED and attempt.calls:
            report.add(cut([call.row for call in attempt.calls], run.limit))
            for call in attempt.calls:
                report.forwarded(call.spliced, call.fallback)
    return report


def check(reader: Reader, run: Run) -> DataReport:
    """Invariants I1 to I4 over every attempt of the run, live ones included."""
    report = DataReport()
    for attempt in attempts(reader, run):
        report.add(attempt, run.limit)
    return report

"""``forge-server drift``: why a run has more samples than conversations, and what that costs, for a person."""

from rich.table import Table

from forge_server.commands import show as out
from forge_server.domain.sample import BreakReason
from forge_server.trajectory.drift import DriftReport

MEANING = {
    BreakReason.FIRST: "the first call of an attempt: each has one",
    BreakReason.ROOT: "another conversation, of a sub-agent for example",
    BreakReason.FORK: "a conversation went on twice from the same place",
    BreakReason.TEMPLATE: "the same text in other tokens; forwarding by splice keeps them",
    BreakReason.REASONING_STRIPPED: "the prompt left out earlier reasoning; splice with keep_reasoning keeps it",
    BreakReason.HISTORY_EDITED: "the harness changed what had been said before",
    BreakReason.COMPACTION: "the harness summed up the conversation to make room",
    BreakReason.RETRY: "the same question was asked again",
    BreakReason.MODEL: "another model, tokenizer or template",
    BreakReason.UNDELIVERED_PARENT: "it goes on from an answer that is not known to have arrived",
    BreakReason.OTHER: "calls of one conversation at another temperature",
}
"""What each reason means to someone who wonders, and what can be done."""


def show(run: str, report: DriftReport) -> None:
    """Print the report."""
    whole = report.attempts - sum(report.faults.values())
    print_line = out.console.print
    print_line(
        f"[bold]{out.text(run)}[/]: {whole} attempts made {report.calls} calls; {report.trained_calls} of them are "
        f"trained, in {report.samples} samples"
    )
    if report.samples:
        print_line(
            f"{report.merge_ratio:.2f} calls per sample; {report.samples_per_attempt:.2f} samples per attempt, "
            f"{report.most_samples} at most"
        )
        print_line(
            f"what the calls said is held {report.overhead:.2f} times: 1 is when no history is repeated\n"
        )
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("samples", "tokens", "trained", "begin as", "which means"):
            left = column in ("begin as", "which means")
            table.add_column(column, justify="left" if left else "right", overflow="fold")
        for reason, cost in sorted(report.reasons.items(), key=lambda item: -item[1].tokens):
            table.add_row(
                str(cost.samples),
                str(cost.tokens),
                str(cost.trained_tokens),
                reason.value,
                MEANING[reason],
            )
        print_line(table)
    if report.volatile_prefixes:
        print_line(
            f"\n{report.volatile_prefixes} conversations broke within the first tenth of their prompt and went on "
            "behind it: something there changes with every call, such as the time. `normalise` rules of the "
            "harness spec can strip it."
        )
    if report.clipped_tokens:
        print_line(
            f"\n{report.clipped_tokens} sampled tokens lie beyond max_sample_tokens and are not trained"
        )
    if report.spliced or report.fallbacks:
        print_line(f"\n{report.spliced} calls were served with the tokens that had been sampled (splice)")
    for what, counts in (
        ("not spliced", report.fallbacks),
        ("calls not trained", report.untrained),
        ("attempts not trained", report.faults),
    ):
        if counts:
            print_line(f"\n{what}: {out.text(dict(counts))}")

"""``forge-server eval``: how often a run's rollouts pass, by harness and over all tasks."""

from forge_server.commands import show as out
from forge_server.commands.source import reading

COLUMNS = (
    "name",
    "rollouts",
    "valid",
    "reward",
    "pass_at_1",
    "pass_at_k",
    "pass_hat_k",
    "calls",
    "completion_tokens",
    "seconds",
    "failures",
)


def evaluate(
    run: str, k: int | None, mode: str | None, by: str, url: str | None, key: str | None, as_json: bool
) -> None:
    with reading(url, key) as source:
        rows = source.compare(run, "task" if by == "task" else "harness", mode, k)
    if rows and not as_json:
        out.console.print(f"[bold]{out.text(run)}[/], k is {rows[0].k}")
    out.rows(rows, COLUMNS, as_json, empty="no such rollouts yet")

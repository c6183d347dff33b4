"""What a run has cost and where its time went, for a person."""

from collections.abc import Mapping

from rich.table import Table

from forge_server.client.cost import Cost
from forge_server.commands import show as out
from forge_server.services.analysis.words import lives, phases, seconds


def show(cost: Cost) -> None:
    """Print it."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("what", "hours", "price", cost.currency):
        table.add_column(column, justify="left" if column == "what" else "right")
    for line in cost.lines:
        table.add_row(line.what, f"{line.hours:.4g} {line.unit}", f"{line.price:.4g}", money(line.cost))
    table.add_row("total", "", "", money(cost.total))
    out.console.print("\n[bold]cost[/]")
    out.console.print(table)
    each = [f"{cost.ended} of {cost.rollouts} rollouts ended, {cost.solved} solved"]
    for what, price in (("rollout", cost.per_rollout), ("solved", cost.per_solved)):
        if price is not None and cost.total:
            each.append(f"{money(price)} {cost.currency} per {what}")
    out.console.print("; ".join(each))
    start = cost.start_up
    if start.attempts:
        out.console.print(
            f"start-up of {start.attempts} attempts: half within {seconds(start.p50_s)}, 90 % within "
            f"{seconds(start.p90_s)}, 99 % within {seconds(start.p99_s)}, the slowest {seconds(start.most_s)}"
        )
    out.console.print(f"\n[bold]where its {seconds(cost.wall_s)} went[/]")
    out.console.print(_shares(phases(cost), cost.wall_s))
    out.console.print(f"\n[bold]where the {seconds(cost.time.total_s)} of its rollouts went[/]")
    out.console.print(_shares(lives(cost), cost.time.total_s))


def _shares(parts: Mapping[str, float], whole: float) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    for name, part in parts.items():
        if part > 0:
            table.add_row(name, seconds(part), f"{part / whole:.1%}")
    return table


def money(amount: float) -> str:
    return f"{amount:.2f}" if amount >= 10 else f"{amount:.3g}"

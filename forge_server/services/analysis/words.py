"""How figures of cost and time are told to people, on the console and in reports."""

from forge_server.client.cost import Cost


def seconds(amount: float | None) -> str:
    """As a person says it."""
    if amount is None:
        return "-"
    if amount < 100:
        return f"{amount:.3g} s"
    minutes, rest = divmod(round(amount), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def phases(cost: Cost) -> dict[str, float]:
    """Where the run's wall-clock went."""
    loop = cost.loop
    return {
        "generate": loop.generate_s,
        "train": loop.train_s,
        "both": loop.both_s,
        "swap": loop.swap_s,
        "wait": loop.wait_s,
        "paused": loop.paused_s,
        "down": loop.down_s,
    }


def lives(cost: Cost) -> dict[str, float]:
    """Where the time of its rollouts went."""
    time = cost.time
    return {
        "idle": time.idle_s,
        "startup": time.startup_s,
        "agent: engine": time.engine_s,
        "agent: held": time.held_s,
        "agent: harness": max(0.0, time.agent_s - time.engine_s - time.held_s),
        "verify": time.verify_s,
    }

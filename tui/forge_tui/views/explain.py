"""The summary of a rollout: what became of it and why, when what happened, and which agents took part. Pure."""

from collections import Counter
from collections.abc import Sequence

from forge_server.client import schemas as s
from forge_tui import ink, words
from forge_tui.ink import Line, Span
from forge_tui.plot import number
from forge_tui.views import talk


def summary(
    detail: s.RolloutDetail,
    calls: Sequence[s.CallView],
    turns: Sequence[s.Turn],
    segments: s.SegmentsView | None,
    now: float,
    width: int,
) -> list[Line]:
    blocks = [
        _trained(detail, segments, width),
        _reward(detail, width),
        _attempts(detail, calls, now, width),
        _agents(turns, width),
        _task(detail, width),
    ]
    return [line for block in blocks if block for line in (*block, [])]


def why(detail: s.RolloutDetail, segments: s.SegmentsView | None) -> list[Span]:
    """Whether its tokens are trained, and what decides it: one sentence per span."""
    row, group = detail.rollout, detail.group
    if row.mode != "train":
        return [(f"Not trained: it is of mode {row.mode}.", "muted")]
    if row.state != "ended":
        return [("Not decided: it has not ended.", "info")]
    if row.outcome not in ("completed", "policy_failure"):
        return [
            (f"✖ Not trained: {row.outcome or '-'} is no result of the policy.".replace("_", " "), "warn")
        ]
    if row.not_trained:
        return [(f"✖ Not trained: {row.not_trained.replace('_', ' ')}.", "warn")]
    if segments is not None and segments.fault:
        return [(f"✖ Not trained: {segments.fault.replace('_', ' ')}: {segments.detail}", "warn")]
    if group is None:
        return [("✖ Not trained: it belongs to no group.", "warn")]
    if group.dropped:
        return [(f"✖ Not trained: its group was dropped, {group.dropped.replace('_', ' ')}.", "warn")]
    if group.batch_k is None:
        return [("Not yet: its group is in no batch.", "info")]
    return [(f"✔ Trained in batch {group.batch_k}.", "good")]


def _trained(detail: s.RolloutDetail, segments: s.SegmentsView | None, width: int) -> list[Line]:
    out: list[Line] = [ink.rule("Trained?", width)]
    for text, style in why(detail, segments):
        out += [[(row, style)] for row in ink.wrap(text, width)]
    if segments is not None and segments.segments:
        trained, tokens = sum(x.trained for x in segments.segments), sum(x.length for x in segments.segments)
        count = len(segments.segments)
        out.append(
            [(f"{count} segment{'s' * (count > 1)}: {number(trained)} of {number(tokens)} tokens", "text")]
        )
    if segments is not None and segments.untrained:
        for reason, count in Counter(segments.untrained.values()).most_common():
            out.append([(f"{count} call{'s' * (count > 1)} not trained: {reason.replace('_', ' ')}", "warn")])
    if segments is not None and segments.clipped:
        out.append([(f"{sum(segments.clipped.values())} tokens beyond the limit", "warn")])
    return out


def _reward(detail: s.RolloutDetail, width: int) -> list[Line]:
    value, style = words.reward(detail.rollout.reward)
    out: list[Line] = [
        ink.rule("Reward and evidence", width),
        [("reward ", "muted"), (value, f"{style} bold")],
    ]
    if detail.group is not None:
        out[-1].append(("   group ", "muted"))
        for each in detail.group.rewards:
            out[-1] += [words.reward(each), (" ", "")]
    for reward in detail.rewards:
        text = f"{reward.source} said {reward.value:g}"
        if reward.call_id is not None:
            text += " for one call"
        out.append([(text, "text")])
        if reward.detail:
            out += [[("  ", ""), (row, "muted")] for row in ink.wrap(words.data(reward.detail), width - 2)]
    final = next((a for a in detail.attempts if a.id == detail.rollout.final_attempt_id), None)
    final = final or (detail.attempts[-1] if detail.attempts else None)
    if final is not None and final.evidence:
        for key, found in final.evidence.items():
            if found not in (None, "", {}, []):
                text = words.data(found) if isinstance(found, dict) else str(found)
                rows = ink.wrap(f"{key.replace('_', ' ')}: {text}", width)
                out += [[(row, "muted")] for row in rows[:4]]
    return out


def _attempts(detail: s.RolloutDetail, calls: Sequence[s.CallView], now: float, width: int) -> list[Line]:
    out: list[Line] = [ink.rule("Attempts", width)]
    if not detail.attempts:
        return [*out, [("none yet", "muted")]]
    made = Counter(call.attempt_id for call in calls)
    for attempt in detail.attempts:
        state = attempt.outcome or attempt.state
        line: Line = [(f"{attempt.number} ", "text bold"), words.told(state)]
        if attempt.kind not in (None, "ok", attempt.outcome):
            line.append((f" {str(attempt.kind).replace('_', ' ')}", "muted"))
        out.append([*line, (f"  {attempt.backend}, {made[attempt.id]} calls", "muted")])
        phases: Line = [("  ", "")]
        times = (
            ("start", attempt.created_at, attempt.running_at),
            ("agent", attempt.running_at, attempt.sealed_at),
            ("verify", attempt.sealed_at, attempt.ended_at),
        )
        for name, begin, end in times:
            if begin is not None:
                going = end is None and attempt.ended_at is None
                phases += [
                    (f"{name} ", "muted"),
                    (words.span_of((end or attempt.ended_at or now) - begin), "info" if going else "text"),
                    ("  ", ""),
                ]
                if end is None:
                    break
        if attempt.exit_code is not None:
            phases.append((f"exit {attempt.exit_code}", "text" if attempt.exit_code == 0 else "warn"))
        out.append(phases)
    return out


def _agents(turns: Sequence[s.Turn], width: int) -> list[Line]:
    """The tree of sub-agents, by the names that their harness gives them."""
    names = talk.agents_of(turns)
    if len(names) < 2:
        return []
    parents = {turn.agent: turn.parent_agent for turn in turns}
    counts = Counter(turn.agent for turn in turns)
    out: list[Line] = [ink.rule("Agents", width)]

    def tell(name: str, depth: int) -> None:
        out.append(
            [
                ("  " * depth + ("└ " if depth else ""), "muted"),
                (f"◆ {name or 'main'}", talk.agent_style(name, names)),
                (f"  {counts[name]} call{'s' * (counts[name] > 1)}", "muted"),
            ]
        )
        for child in names:
            if child and child != name and parents[child] == name and depth < 8:
                tell(child, depth + 1)

    roots = [name for name in names if not name or parents[name] not in names or parents[name] == name]
    for root in roots:
        tell(root, 0)
    return out


def _task(detail: s.RolloutDetail, width: int) -> list[Line]:
    row = detail.rollout
    out: list[Line] = [
        ink.rule("Task", width),
        [
            (row.task or "none", "text"),
            (f"  {row.harness}, {row.mode}, policy v{row.policy_version}", "muted"),
        ],
    ]
    if detail.group is not None:
        group = detail.group
        out.append([(f"group {words.short(group.id)}, step {group.step}, round {group.round}", "muted")])
    return out + [[(text, "text")] for text in ink.wrap(detail.instruction.strip(), width)[:12] if text]

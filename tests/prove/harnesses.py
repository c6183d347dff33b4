"""The standard task in every harness that is installed, in record and in splice mode, and a table of what it became.

    python -m tests.prove.harnesses [--plain] [--reasoning] [HARNESS …]

Harnesses that are named are installed when missing; without names those that are there are run. The model speaks as a
sampled one does: JSON without spaces, escapes, blank lines, odd tokens; with ``--plain`` as the chat template would
write it, with ``--reasoning`` it thinks before each answer.
"""

import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness_lab import Lab, Result, harness_lab, installed
from harness_policies import HANDS, INSTRUCTION, STANDARD, TEXT, rough, standard
from sample_oracle import Found, minimum

from forge_server import environments
from forge_server.app import load_specs
from forge_server.harness.spec import Spec
from forge_server.settings import Settings

MODES = ("record", "splice")


@dataclass(frozen=True)
class Row:
    """One harness in one mode."""

    harness: str
    mode: str
    result: Result
    least: Found

    def cells(self) -> list[str]:
        result = self.result
        fallbacks: dict[str, int] = {}
        for call in result.calls:
            if reason := (call.flags or {}).get("fallback"):
                fallbacks[reason] = fallbacks.get(reason, 0) + 1
        drift = {reason: count for reason, count in result.drift.items() if reason != "first"}
        return [
            self.harness,
            self.mode,
            str(len(result.calls)),
            str(conversations(self.least)),
            str(len(result.samples)),
            str(self.least.samples),
            f"{result.merge_ratio:.2f}",
            "; ".join(f"{reason} {count}" for reason, count in sorted(drift.items())) or "-",
            "; ".join(f"{reason} {count}" for reason, count in sorted(fallbacks.items())) or "-",
            f"{result.reward}" + (f", {len(result.violations)} violations" if result.violations else ""),
            ", ".join(result.looked_up) or "-",
            f"{result.seconds:.1f}",
        ]


HEAD = [
    "harness",
    "mode",
    "calls",
    "conversations",
    "samples",
    "least",
    "calls/sample",
    "drift",
    "fallbacks",
    "reward",
    "looked up",
    "s",
]


def conversations(least: Found) -> int:
    """Requests that go on from no other and are not merely asked again."""
    return sum(
        parent is None and not least.breaks.get(at, "").startswith("the same")
        for at, parent in least.parents.items()
    )


def oracle(result: Result, spec: Spec) -> Found:
    """The least number of samples, by the harness's own requests."""
    return minimum(result.askings(), [removal.pattern for removal in spec.normalise.remove])


def table(rows: Iterable[Row]) -> str:
    """As Markdown."""
    lines = [HEAD, ["---"] * len(HEAD), *(row.cells() for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def run(
    lab: Lab, harness: str, mode: str, spec: Spec, *, plain: bool = False, reasoning: bool = False
) -> Row:
    """The standard task. ``plain``: said as a tokenizer and a chat template would write it."""
    said = standard(harness, reasoning=reasoning)
    result = lab.run(
        harness,
        said if plain else rough(said),
        instruction=INSTRUCTION,
        expect=STANDARD,
        max_seconds=180.0,
        forwarding=mode,
    )
    return Row(harness, mode, result, oracle(result, spec))


def main(words: list[str]) -> int:
    names = [word for word in words if not word.startswith("--")]
    plain, reasoning = "--plain" in words, "--reasoning" in words
    specs = load_specs(Settings())
    known = [name for name in sorted(specs) if name in HANDS or name in TEXT]
    chosen = names or [name for name in known if installed(specs[name])]
    for name in names:
        if (install := specs[name].install) is not None:
            environments.ensure_harness(name, install)
    rows = []
    with tempfile.TemporaryDirectory(prefix="forge-lab-") as folder, harness_lab(Path(folder)) as lab:
        for name in chosen:
            for mode in MODES:
                row = run(lab, name, mode, specs[name], plain=plain, reasoning=reasoning)
                rows.append(row)
                if row.result.reward != 1.0 or row.result.violations:
                    print(row.result.explain(), file=sys.stderr)
                for at, why in row.least.breaks.items():
                    print(f"{name} {mode}: request {at} begins a sample: {why}", file=sys.stderr)
    print(table(rows))
    return 0 if all(row.result.reward == 1.0 and not row.result.violations for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Every harness that is installed in every trouble that a model server can make, and a table of what became of it.

    python -m tests.prove.harness_faults [--slow SECONDS] [--only WORD] [HARNESS …]

``--only``: troubles with the word in their name. Without ``--slow`` a first byte takes 120 s, with the server's own
keep-alives. Harnesses that are named are installed when missing.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fault_lab import Seen, Trouble, blind, fault_lab, meet, troubles
from harness_lab import Lab, installed
from harness_policies import HANDS, TEXT

from forge_server import environments
from forge_server.app import load_specs
from forge_server.harness.spec import Spec
from forge_server.settings import Settings

SLOW_S = 120.0
MAX_SECONDS = 180.0
"""The clock of an attempt. Some harnesses would ask a dead engine for longer."""


def prove(lab: Lab, spanning: Lab, spec: Spec, chosen: Sequence[Trouble], slow_s: float) -> list[Seen]:
    """One harness. ``spanning``: a lab that does not wait for calls when weights change."""
    samples = {
        mode: len(meet(lab, spec, Trouble("none", mode)).result.samples) for mode in {t.mode for t in chosen}
    }
    seen = []
    for trouble in chosen:
        place = spanning if trouble.swap == "spans" else lab
        one = meet(place, spec, trouble, samples=samples[trouble.mode], max_seconds=MAX_SECONDS + 2 * slow_s)
        print(
            f"{spec.name}, {trouble.name}: {one.how}, {one.result.seconds:.0f} s {one.wrong}", file=sys.stderr
        )
        if one.wrong:
            print(one.explain(), file=sys.stderr)
        seen.append(one)
    return seen


def table(seen: Sequence[Seen]) -> str:
    """As Markdown: a row for each harness, a column for each trouble."""
    names = list(dict.fromkeys(one.trouble.name for one in seen))
    cells = {(one.harness, one.trouble.name): one.how + (" **WRONG**" if one.wrong else "") for one in seen}
    lines = [["harness", *names], ["---"] * (1 + len(names))]
    lines += [
        [h, *(cells.get((h, n), "") for n in names)] for h in dict.fromkeys(one.harness for one in seen)
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("harnesses", nargs="*")
    parser.add_argument("--slow", type=float, default=SLOW_S)
    parser.add_argument("--only", default="")
    given = parser.parse_args(words)
    specs = load_specs(Settings())
    known = [name for name in sorted(specs) if name in HANDS or name in TEXT or name == "browser-use"]
    names = given.harnesses or [name for name in known if installed(specs[name])]
    for name in given.harnesses:
        if (install := specs[name].install) is not None:
            environments.ensure_harness(name, install)
    chosen = [trouble for trouble in troubles(given.slow) if given.only in trouble.name]
    after, every = (60.0, 15.0) if given.slow > 60.0 else (given.slow / 6, given.slow / 6)
    own = (blind(specs["browser-use"]),)
    seen: list[Seen] = []
    with (
        tempfile.TemporaryDirectory(prefix="forge-faults-") as folder,
        fault_lab(Path(folder) / "a", keepalive_after_s=after, every_s=every, specs=own) as lab,
        fault_lab(
            Path(folder) / "b", keepalive_after_s=after, every_s=every, drain_s=0.2, specs=own
        ) as spanning,
    ):
        for name in names:
            seen += prove(lab, spanning, specs[name], chosen, given.slow)
            print(table(seen), flush=True)
    return 1 if any(one.wrong for one in seen) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

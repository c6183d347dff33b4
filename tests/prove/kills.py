"""Random SIGKILLs of server, engine, trainer and runners during one long run; then nothing may be wrong.

    python tests/prove/kills.py [--kills 40] [--steps 30] [--seed 0] [--folder FOLDER]

The run is real (vLLM, veRL, sandboxes) with a tiny random model. Between two kills pass 1 to 20 seconds, so
that they fall into every phase: starting, sampling, verifying, assembling, training, exporting, swapping. The
killed server is started again after up to 5 seconds, everything else must be healed by the server. Then:

- the run completed; every batch was trained, none twice; no rollout is in two batches
- every rollout and attempt ended exactly once (counted in the event log), and in a valid outcome
- what was trained comes from the one attempt that counts for its rollout
- `check --data` finds no violation of I1 to I4; no call is without its end
- no attempt ended by a clock whose limit had not passed once holds and downtime are taken off
- nothing is left running after the orderly stop

Prints the counts; exit status 1 when anything of this does not hold. About an hour on two cores.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from whole_loop import Lab, report, run_settings

from forge_server import environments
from forge_server.client.http import ServerUnreachable
from forge_server.client.schemas import RunPatch, RunView
from forge_server.controller.processes import start_time
from forge_server.domain.errors import ForgeError
from forge_server.engine import process
from forge_server.engine.managed import Record

TESTS = Path(__file__).resolve().parents[1]
RUN = "kills"
AGENT_S = 120.0
GAP_S = (1.0, 20.0)
DOWN_S = 5.0
CLOCK_SLACK_S = 2.5
"""The server knows a downtime to the precision of its liveness beat, always in the attempt's favour."""


def tiny_model(folder: Path) -> Path:
    """A random tiny model; its Hugging Face folder."""
    python = environments.ensure("engine") / "bin" / "python"
    script = TESTS / "tiny_model.py"
    subprocess.run([str(python), str(script), str(folder), "0"], check=True, timeout=300, capture_output=True)
    return folder / "step_00000" / "huggingface"


class Killer:
    """Kills one thing at a time; ``done`` counts the kills that hit something."""

    def __init__(self, lab: Lab, run_id: str, rng: random.Random) -> None:
        self._lab, self._run_id, self._rng = lab, run_id, rng
        self.done: Counter[str] = Counter()
        self._victims: dict[str, Callable[[], bool]] = {
            "server": self._server,
            "engine": self._engine,
            "trainer": self._trainer,
            "runner": self._runner,
        }

    def strike(self) -> str:
        """Kill something that is there; its name, or an empty string when there was nothing."""
        for name in self._rng.sample(list(self._victims), len(self._victims)):
            if self._victims[name]():
                self.done[name] += 1
                return name
        return ""

    def _server(self) -> bool:
        self._lab.kill()
        time.sleep(self._rng.uniform(0.0, DOWN_S))
        self._lab.up(limit_s=120.0)
        return True

    def _engine(self) -> bool:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            text = (self._lab.data / "engine" / "engine.json").read_bytes()
            identity = msgspec.json.decode(text, type=Record).identity
            if identity is not None and process.is_alive(identity):
                return _kill([identity.pid])
        return False

    def _trainer(self) -> bool:
        return _kill(self._lab.trainer_pids(self._run_id))

    def _runner(self) -> bool:
        rows = self._lab.query("SELECT handle FROM attempts WHERE state <> 'ended' AND handle IS NOT NULL")
        handles = [json.loads(row.handle) for row in rows]
        pids = [handle["pid"] for handle in handles if start_time(handle["pid"]) == handle["started"]]
        return _kill([self._rng.choice(pids)]) if pids else False


def _kill(pids: list[int]) -> bool:
    hit = False
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            hit = True
    return hit


def disturb(lab: Lab, killer: Killer, kills: int, rng: random.Random, limit_s: float) -> int:
    """Let the run go on to its end, with ``kills`` kills on the way; how often it had to be resumed."""
    began = time.monotonic()
    next_kill, left, resumed = began + rng.uniform(*GAP_S), kills, 0
    while True:
        if time.monotonic() - began > limit_s:
            raise TimeoutError(f"the run did not complete within {limit_s:g} s\n{lab.log()}")
        view = _view(lab)
        if view is not None and view.state == "completed":
            return resumed
        if view is not None and view.state == "paused":
            # an engine or trainer that died time and again pauses the run with its reason: a person resumes it
            print(f"  paused: {view.reason}", flush=True)
            with contextlib.suppress(ForgeError), lab.client() as client:
                client.patch_run(RUN, RunPatch(action="resume"))
                resumed += 1
        elif view is not None and view.state != "active":
            raise AssertionError(f"the run is {view.state}: {view.reason}")
        if left and time.monotonic() >= next_kill:
            name = killer.strike()
            if name:
                left -= 1
                step = view.step if view is not None else "?"
                print(f"  step {step}: killed {name}, {left} to go", flush=True)
            next_kill = time.monotonic() + rng.uniform(*GAP_S)
        time.sleep(0.5)


def _view(lab: Lab) -> RunView | None:
    """The run, or None while the server is too busy with its recovery to answer."""
    view: RunView | None = None
    with contextlib.suppress(ServerUnreachable):
        view = lab.run(RUN)
    return view


def findings(lab: Lab, run_id: str, steps: int) -> list[str]:
    """Everything that is wrong with the data; empty when all holds."""
    wrong = []

    def must(what: str, found: Any) -> None:
        if found:
            wrong.append(f"{what}: {found}")

    mine = f"r.run_id = '{run_id}'"
    batches = lab.query(f"SELECT k, rollout_ids, state FROM batches WHERE run_id = '{run_id}' ORDER BY k")
    if [batch.k for batch in batches] != list(range(1, steps + 1)):
        wrong.append(f"batches are {[batch.k for batch in batches]}, not 1 to {steps}")
    must("batches not trained", [batch.k for batch in batches if batch.state != "trained"])
    trained = Counter(rollout for batch in batches for rollout in json.loads(batch.rollout_ids))
    must("rollouts in two batches", [rollout for rollout, count in trained.items() if count > 1])
    rollouts = lab.query(f"SELECT id, state, outcome, kind, final_attempt_id FROM rollouts r WHERE {mine}")
    must("rollouts not ended", [row.id for row in rollouts if row.state != "ended"])
    valid = {row.id for row in rollouts if row.outcome in ("completed", "policy_failure")}
    must("rollouts lost for good", [f"{r.id} {r.outcome}/{r.kind}" for r in rollouts if r.id not in valid])
    must("trained, but not valid", sorted(trained.keys() - valid))
    for kind, column, known in (
        ("rollout_ended", "rollout_id", {row.id for row in rollouts}),
        (
            "attempt_ended",
            "attempt_id",
            {
                row.id
                for row in lab.query(
                    f"SELECT a.id FROM attempts a JOIN rollouts r ON r.id = a.rollout_id WHERE {mine}"
                )
            },
        ),
    ):
        events = lab.query(f"SELECT {column} AS id FROM events WHERE kind = '{kind}' AND run_id = '{run_id}'")
        ends = Counter(row.id for row in events)
        must(f"{kind} more than once", [i for i, count in ends.items() if count > 1])
        must(f"{kind} never", sorted(known - ends.keys()))
    finals = {row.id: row.final_attempt_id for row in rollouts}
    samples = lab.query(
        f"SELECT s.rollout_id, s.attempt_id FROM samples s JOIN rollouts r ON r.id = s.rollout_id WHERE {mine}"
    )
    must(
        "samples of dead attempts",
        sorted({s.attempt_id for s in samples if finals[s.rollout_id] != s.attempt_id}),
    )
    must(
        "calls without an end",
        [
            row.id
            for row in lab.query(
                "SELECT c.id FROM calls c JOIN attempts a ON a.id = c.attempt_id "
                f'JOIN rollouts r ON r.id = a.rollout_id WHERE {mine} AND c."end" IS NULL'
            )
        ],
    )
    must("charged for time that was not theirs", charged(lab, mine))
    return wrong


def charged(lab: Lab, mine: str) -> list[str]:
    """Attempts ended by the agent clock before their time, holds and downtime taken off."""
    holds = lab.query("SELECT begin_at, end_at FROM holds WHERE end_at IS NOT NULL ORDER BY begin_at")
    rows = lab.query(
        "SELECT a.id, a.running_at, COALESCE(a.sealed_at, a.ended_at) AS until FROM attempts a "
        f"JOIN rollouts r ON r.id = a.rollout_id WHERE {mine} AND a.kind = 'agent_timeout'"
    )
    early = []
    for row in rows:
        free, reached = 0.0, row.running_at
        for hold in holds:
            begin, end = max(hold.begin_at, reached), min(hold.end_at, row.until)
            if end > begin:
                free, reached = free + end - begin, end
        own = row.until - row.running_at - free
        if own < AGENT_S - CLOCK_SLACK_S:
            early.append(f"{row.id} after {own:.1f} s of {AGENT_S:g}")
    return early


def told(lab: Lab, run_id: str, counts: dict[str, Any]) -> None:
    """The counts, for people."""
    kinds = lab.query(
        "SELECT a.outcome, a.kind, COUNT(*) AS n FROM attempts a JOIN rollouts r ON r.id = a.rollout_id "
        f"WHERE r.run_id = '{run_id}' GROUP BY a.outcome, a.kind ORDER BY n DESC"
    )
    ends = lab.query(
        'SELECT c."end" AS how, COUNT(*) AS n FROM calls c JOIN attempts a ON a.id = c.attempt_id '
        f"JOIN rollouts r ON r.id = a.rollout_id WHERE r.run_id = '{run_id}' GROUP BY c.\"end\""
    )
    holds = lab.query("SELECT reason, COUNT(*) AS n, SUM(end_at - begin_at) AS s FROM holds GROUP BY reason")
    print("attempts  " + ", ".join(f"{row.n} {row.outcome}/{row.kind}" for row in kinds))
    print("calls     " + ", ".join(f"{row.n} {row.how}" for row in ends))
    print("holds     " + ", ".join(f"{row.n} {row.reason} {row.s:.0f} s" for row in holds))
    print("checked   " + ", ".join(f"{value} {name}" for name, value in sorted(counts.items())))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-minutes", type=float, default=180.0)
    parser.add_argument("--folder", type=Path, help="work here (default: a new temporary folder)")
    options = parser.parse_args()
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="forge-kills-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    environments.ensure("trainer")
    rng = random.Random(options.seed)
    (folder / "lab").mkdir()
    lab = Lab(folder / "lab", tiny_model(folder / "model"))
    print(f"working in {folder}, seed {options.seed}", flush=True)
    began = time.monotonic()
    try:
        lab.up()
        lab.import_tasks()
        lab.wait("the engine is ready", lambda: lab.client().ready().ready, 600.0)
        settings = run_settings(RUN, steps=options.steps, groups=2, n=4, max_seconds=AGENT_S, max_attempts=30)
        with lab.client() as client:
            run_id = client.create_run(settings).id
        killer = Killer(lab, run_id, rng)
        resumed = disturb(lab, killer, options.kills, rng, options.limit_minutes * 60)
        counts = report(lab, RUN)
    finally:
        lab.down()
    wrong = findings(lab, run_id, options.steps)
    if left := lab.leftovers():
        wrong.append(f"left running: {left}")
    kills = ", ".join(f"{count} {name}" for name, count in sorted(killer.done.items()))
    print(f"\n{(time.monotonic() - began) / 60:.1f} min; killed {kills}; resumed {resumed} times")
    told(lab, run_id, counts)
    for line in wrong:
        print(f"WRONG: {line}")
    made = sum(killer.done.values())
    if made < options.kills:
        print(f"the run was over after {made} of {options.kills} kills: raise --steps")
    print("nothing is wrong" if not wrong else f"{len(wrong)} findings")
    return 1 if wrong or made < options.kills else 0


if __name__ == "__main__":
    raise SystemExit(main())

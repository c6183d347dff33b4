"""One attempt, from joining to the last word.

    join -> sandbox -> relay -> harness -> every agent process dead -> seal
         -> verifier files -> verify in a fresh sandbox -> reward -> finish

The server decides; the runner obeys heartbeats and reports. It never runs the harness before the server has
written that it started, and gives the verifier's files no place while an agent process lives (I10).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time

from .confine import FORGE, HOME, Box, Child, kill_user, oom_kills
from .control import Control, Offline, Refused, Unreachable
from .disk import EXCESS, LOOK_S, PAUSE_S, Disk
from .place import PATH, fill, folder, make_folders, remove_tree, write_files
from .relay import Relay
from .scrub import scrub
from .verify import Verdict, unpack, verdict

TYPE_CHECKING = False  # without importing typing: every attempt would pay for it
if TYPE_CHECKING:
    from typing import Any

TAIL = 64 * 1024
FINISHED = 0  # exit codes: everything was said,
DISMISSED = 3  # the server would not have us or is gone,
BROKEN = 4  # trouble of our own
FINAL_PATIENCE_S = 30.0
RECEIPTS_S = 1.0  # the connections of a dead harness are closed by then


def main() -> int:
    """Read the launch order (environment ``FORGE_RUNNER``, else one line of stdin) and run the attempt.

    With the order on stdin, the end of stdin means that the server is gone: the attempt dies with it. An order
    may name a file that holds the join token: what is in the environment can be read by whoever may list pods.
    """
    text = os.environ.pop("FORGE_RUNNER", "")
    in_environment = bool(text)
    if not in_environment:
        text = sys.stdin.readline()
    order = json.loads(text)
    if "token_file" in order:
        with open(order["token_file"]) as file:
            order["token"] = file.read().strip()
    attempt = Attempt(order)
    if not in_environment:
        threading.Thread(target=_die_with_server, args=(attempt.box,), daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: attempt.stop.dismiss("runner_stopped"))
    code = attempt.run()
    if code == FINISHED and order.get("tidy"):  # else the server needs to see the code, and tidies up
        sys.stderr.flush()
        os.execv("/bin/rm", ["rm", "-rf", "--one-file-system", attempt.box.root])
    return code


def _die_with_server(box: Box) -> None:
    while os.read(0, 4096):
        pass
    if not box.wrapped and box.own_user:
        kill_user(box.uid)
    os._exit(DISMISSED)  # a sandbox of bubblewrap dies with its parent


class Stop:
    """The wish to stop what runs now. ``dismissed``: stop for good, nothing follows."""

    def __init__(self) -> None:
        self.reason = ""
        self.dismissed = False
        self.wake, self._wake_write = os.pipe()

    def set(self, reason: str) -> None:
        if not self.reason:
            self.reason = reason
            os.write(self._wake_write, b"!")

    def dismiss(self, reason: str) -> None:
        self.dismissed = True
        self.set(reason)

    def clear(self) -> None:
        """The thing has stopped; what runs next has not been told to."""
        if self.reason and not self.dismissed:
            self.reason = ""
            os.read(self.wake, 1)


class Tail:
    """Reads a pipe to its end and keeps the last ``TAIL`` bytes."""

    def __init__(self, fd: int) -> None:
        self._fd, self._kept = fd, bytearray()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while data := os.read(self._fd, 65536):
            self._kept += data
            if len(self._kept) > 4 * TAIL:
                del self._kept[:-TAIL]
        os.close(self._fd)

    def text(self) -> str:
        """All of it once every writer is dead."""
        self._thread.join(5.0)
        return bytes(self._kept[-TAIL:]).decode("utf-8", "replace")


class Attempt:
    """What one runner is about."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.box = Box(order)
        self.id: str = order["attempt"]
        self.url: str = order["url"]
        self.token: str = order["token"]
        trial = order.get("trial")
        self.control = Offline(trial) if trial else Control(self.url, self.id)
        self.disk = Disk(self.box.root, self.box.uid, order.get("disk_mb", 0) << 20)
        self.stop = Stop()
        self.phase = "starting"
        self.child: Child | None = None
        self.exit_code: int | None = None
        self.stopped_by = ""
        self.plan: dict[str, Any] = {}
        self.values: dict[str, str] = {}

    def run(self) -> int:
        """The whole attempt; returns the exit code. Whatever happens, no process of it is left."""
        try:
            self._join()
            self._run_harness()
            if self.stop.dismissed:
                return DISMISSED
            self.control.post("seal", {"reason": self.stopped_by})
            said = self._verify()
            if self.stop.dismissed:  # who stopped the runner may have stopped the verifier, too
                return DISMISSED
            self._finish(said)
            return FINISHED
        except (Refused, Unreachable) as error:
            print(f"runner: {error}", file=sys.stderr)
            return DISMISSED
        except Exception:
            import traceback  # costs start-up time, seldom needed

            trouble = traceback.format_exc()
            print(trouble, file=sys.stderr)
            self._kill()
            try:
                self._finish(Verdict("none"), trouble[-2000:], patience=FINAL_PATIENCE_S)
            except (Refused, Unreachable):
                return DISMISSED
            return BROKEN
        finally:
            self._kill()

    def _join(self) -> None:
        start = self.control.post("start", {"token": self.token, "nonce": os.urandom(16).hex()})
        self.control.key = start["runner_key"]
        self.plan = plan = start["plan"]
        wrapped = self.box.wrapped
        self.box.settle(plan["workdir"])
        self.values = {
            "agent_key": start["agent_key"],
            "model": plan["model"],
            "instruction": plan["instruction"],
            "workdir": plan["workdir"] if wrapped else self.box.path("work"),
            "home": HOME if wrapped else self.box.path("home"),
            "env": self.box.env,
            "python": self.box.python,
            "forge": FORGE if wrapped else self.box.forge,
        }

    def _run_harness(self) -> None:
        """Run the harness to its end or to the stop; on return every agent process is dead."""
        plan, values = self.plan, self.values
        threading.Thread(target=self._heartbeats, args=(plan["heartbeat_s"],), daemon=True).start()
        make_folders(self.box)  # may take long: all that is in a pod's work folder becomes the agent's
        self.disk.begin()
        threading.Thread(target=self._watch_disk, daemon=True).start()
        binds = [(self.box.path("work"), values["workdir"], True), (self.box.path("home"), HOME, True)]
        self.child = child = Child(self.box, binds, door=True)
        assert child.listener is not None
        values["base_url"] = f"http://127.0.0.1:{child.listener.getsockname()[1]}/a/{self.id}"
        write_files(self.box, plan, values)
        if self.stop.dismissed:  # meanwhile: nothing has begun yet
            return
        relay = Relay(child.listener, self.url, self.id)
        relay.start()
        self._tell({"kind": "harness_started"})
        self.phase = "running"
        tail = Tail(child.output)
        env = self._environment(values["home"]) | {k: fill(v, values) for k, v in plan["env"].items()}
        argv = [fill(part, values) for part in plan["argv"]]
        stdin = None if plan["stdin"] is None else fill(plan["stdin"], values).encode()
        pids, max_file = plan["limits"]["pids"], self.disk.most
        child.go(argv, env, values["workdir"], stdin=stdin, max_processes=pids, max_file=max_file)
        status = child.wait(None, self.stop.wake)
        if status is None and not self.stop.dismissed and self.stop.reason != EXCESS:
            child.terminate()
            child.wait(plan["grace_s"])
        self.exit_code = self._kill()
        excess = self._empty("work", "home") or self.stop.reason == EXCESS
        self.phase, self.stopped_by = "sealed", EXCESS if excess else self.stop.reason
        read, lost = relay.receipts.final(RECEIPTS_S)
        relay.close()
        if self.stop.dismissed:
            return
        receipts = {"kind": "receipts", "read": read, "lost": lost}
        exited = {"kind": "harness_exited", "exit_code": self.exit_code, "stopped_by": self.stopped_by}
        log = {"kind": "log", "stream": "harness", "tail": tail.text()}
        oom = [{"kind": "oom"}] if oom_kills(self.box) else []
        self._tell(receipts, exited, *oom, log)
        self.stop.clear()

    def _verify(self) -> Verdict:
        """Fetch the verifier's files and run it over the work folder, in a sandbox of its own."""
        archive = self.control.get("verifier")
        if archive is None:
            return Verdict("none")
        box, plan, inside = self.box, self.plan, self.values["workdir"]
        self.phase = "verifying"
        tests, logs = folder(box, "tests", owned=False), folder(box, "logs", owned=False)
        unpack(archive, tests)
        home, out = folder(box, "verifier-home", owned=True), folder(box, "logs/verifier", owned=True)
        removed = scrub(box.path("work"), inside, tuple(box.read_only))
        binds = [(box.path("work"), inside, True), (home, HOME, True)]
        binds += [(tests, "/tests", False), (logs, "/logs", True)]
        self.child = child = Child(box, binds, door=False)
        tail = Tail(child.output)
        env = self._environment(HOME if box.wrapped else home)
        env["FORGE_TESTS"] = "/tests" if box.wrapped else tests
        env["FORGE_LOGS"] = "/logs/verifier" if box.wrapped else out
        argv = plan["verify_argv"]
        if not (box.wrapped or box.in_place):  # without mounts of its own, /tests is somewhere else
            argv = [tests + a.removeprefix("/tests") if a.startswith("/tests/") else a for a in argv]
        pids, max_file = plan["limits"]["pids"], self.disk.most
        child.go(argv, env, inside, stdin=None, max_processes=pids, max_file=max_file)
        status = child.wait(plan["verify_s"], self.stop.wake)
        killed = self._kill()
        if status is None:
            error = self.stop.reason or f"not done after {plan['verify_s']} s"
            said = Verdict("timeout", killed, error=error)
        else:
            said = verdict(out, status, removed)
        self._empty("work", "verifier-home", "logs")
        self._tell({"kind": "log", "stream": "verifier", "tail": tail.text()})
        return said

    def _finish(self, said: Verdict, trouble: str = "", *, patience: float = 300.0) -> None:
        if said.status == "ok":
            body = {"value": said.value, "source": "verifier", "call_id": None, "detail": said.detail}
            try:
                self.control.post("reward", body, patience=patience)
            except Refused as error:
                said.status, said.error = "invalid", f"the server refuses the reward: {error}"
        code = self.exit_code
        body = {
            "exit_code": code,
            "signal": code - 128 if code is not None and code > 128 else None,
            "stopped_by": self.stopped_by,
            "verifier": {"status": said.status, "exit_code": said.exit_code, "error": said.error[:2000]},
            "runner_error": trouble,
        }
        self.control.post("finish", body, patience=patience)

    def _tell(self, *events: dict[str, Any]) -> None:
        self.control.post("events", {"events": list(events)})

    def _heartbeats(self, every: float) -> None:
        """Thread: ask whether to go on, at least every ``every`` seconds and when the clock is about to
        pass.
        """
        control, pause = self.control.clone(), every
        while True:
            time.sleep(pause)
            phase = self.phase
            try:
                reply = control.post("heartbeat", {"phase": phase})
            except (Refused, Unreachable) as error:
                self.stop.dismiss(f"dismissed: {error}")
                return
            if reply["action"] == "stop" and phase == self.phase:
                self.stop.set(reply["reason"] or "stopped")
            left = reply.get("left_s")
            pause = every if left is None else min(every, max(left + 0.05, 0.2))

    def _watch_disk(self) -> None:
        """Thread: stop what runs when the attempt takes more of the disk than it may."""
        pause = LOOK_S
        while True:
            time.sleep(pause)
            began, phase = time.monotonic(), self.phase
            if phase in ("running", "verifying") and self.disk.exceeded() and phase == self.phase:
                self.stop.set(EXCESS)
            # on a disk that others have filled each look adds up: that must not keep the machine busy
            pause = min(LOOK_S + 20 * (time.monotonic() - began), PAUSE_S)

    def _empty(self, *names: str) -> bool:
        """If the attempt holds more than it may, empty these folders, whose processes are dead; returns whether.

        Before the server is told anything: it may have no room left to write it down.
        """
        if not self.disk.exceeded():
            return False
        for name in names:
            remove_tree(self.box.path(name))
            folder(self.box, name, owned=True)
        return True

    def _environment(self, home: str) -> dict[str, str]:
        path = f"{self.box.env}/bin:{PATH}" if self.box.env else PATH
        python = os.path.dirname(self.box.python)
        return {"PATH": f"{path}:{python}", "HOME": home, "LANG": "C.UTF-8", "USER": "agent"}

    def _kill(self) -> int | None:
        return None if self.child is None else self.child.kill()

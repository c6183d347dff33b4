"""How the harness and the verifier are confined: the levels, and what each one is made of.

    namespaces  bubblewrap: own mounts, processes, network, ipc; with root also a user of its own
    pod         a user of its own inside a pod, which is the sandbox: everything is in its real place
    user        a user of its own, nothing else; needs root
    none        nothing: for trusted harnesses only

Invariant I10: from ``user`` upwards the agent can neither read the runner's memory or environment nor
signal it, and every process it left behind is dead when ``Child.kill`` returns.
"""

from __future__ import annotations

import contextlib
import json
import marshal
import os
import select
import signal
import socket
import sys
import time

from . import stage

TYPE_CHECKING = False  # without importing typing: every attempt would pay for it
if TYPE_CHECKING:
    from typing import Any

LEVELS = ("none", "user", "pod", "namespaces")
RELAY_PORT = 41000
SCRATCH_BYTES = 1 << 30  # of /tmp, which is memory
HOME = "/forge-attempt/home"  # as in pods; no task's work folder may be there or above it
FORGE = "/forge"
_HUNTER = 65521  # a user id that no process has: what it is, it may signal
_POD_CGROUPS = ("/sys/fs/cgroup/memory", "/sys/fs/cgroup")  # a container's own, version 1 and 2
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types", "ssl")
_ETC_OWN = ("passwd", "group", "hosts")
_SOURCES = ("/usr/src", "/usr/local/src")  # of the system's folders those that nothing runs from


class Box:
    """What the backend decided about one attempt's confinement (part of the launch order).

    ``python`` is the interpreter, ``forge`` the folder with the packed programs, ``env`` the harness's
    environment ("" when it needs none), ``read_only`` the folders to show (the interpreter's prefix,
    ``env``), ``root`` the attempt's own folder, ``cgroups`` the cgroup folders to put the processes into.
    """

    def __init__(self, order: dict[str, Any]) -> None:
        self.level: str = order["level"]
        self.uid: int = order.get("uid", -1)
        if self.level not in LEVELS or (self.level in ("user", "pod") and self.uid < 0):
            raise ValueError(f"impossible sandbox level {self.level!r} with uid {self.uid}")
        self.python: str = order["python"]
        self.forge: str = order["forge"]
        self.env: str = order.get("env", "")
        self.read_only: list[str] = order.get("read_only", [])
        self.root: str = order["root"]
        self.cgroups: list[str] = order.get("cgroups", [])
        self.bwrap: str = order.get("bwrap", "bwrap")
        self._places: dict[str, str] = {}

    @property
    def wrapped(self) -> bool:
        """Whether bubblewrap gives the processes their own view of files, processes and network."""
        return self.level == "namespaces"

    @property
    def in_place(self) -> bool:
        """Whether the work folder, the tests and the logs are where the plan and the verifier call them."""
        return self.level == "pod"

    def settle(self, workdir: str) -> None:
        """The plan is known: in a pod the work folder is ``workdir`` itself."""
        if self.in_place:
            self._places = {"work": workdir, "tests": "/tests", "logs": "/logs"}

    @property
    def own_user(self) -> bool:
        """Whether they get a user id of their own (``uid``); else they keep the server's."""
        return self.uid >= 0

    def path(self, name: str) -> str:
        """A folder or file of the attempt on this side of the sandbox."""
        first, _, rest = name.partition("/")
        place = self._places.get(first, os.path.join(self.root, first))
        return os.path.join(place, rest) if rest else place

    def give(self, path: str) -> None:
        """Make the agent's user the owner."""
        if self.own_user:
            os.chown(path, self.uid, self.uid, follow_symlinks=False)

    def give_all(self, path: str) -> None:
        """Make the agent's user the owner of a folder and of all that is in it."""
        self.give(path)
        for folder, folders, files in os.walk(path):
            for name in (*folders, *files):
                self.give(os.path.join(folder, name))


class Child:
    """One program and everything it starts. Made blocked; ``go`` lets it run."""

    def __init__(self, box: Box, binds: list[tuple[str, str, bool]], *, door: bool) -> None:
        """``binds``: (source, place inside, writable); ``door``: whether a relay listener is opened."""
        self.box = box
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # before anything can be sent
        out_read, out_write = os.pipe()
        info_read, info_write = os.pipe()
        # In its own network namespace the port may be fixed; else any free one.
        port = -1 if not door else RELAY_PORT if box.wrapped else 0
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _become(box, binds, theirs.fileno(), out_write, info_write, port)
            finally:
                os._exit(126)
        theirs.close()
        os.close(out_write)
        os.close(info_write)
        self.output = out_read
        self._channel = ours
        self._pidfds = [os.pidfd_open(self.pid)]
        self._status: int | None = None
        ours.settimeout(60.0)
        self.listener: socket.socket | None = None
        try:
            self._meet(info_read)
        except BaseException:
            self.kill()
            raise
        finally:
            os.close(info_read)

    def _meet(self, info: int) -> None:
        """Learn who the first process is, and get the listener."""
        data, ancillary, _, _ = self._channel.recvmsg(16, 256)
        if not data:
            why = drain(self.output, 2000).decode("utf-8", "replace")
            raise ChildFailed(f"the sandbox did not start: {why}")
        self._main = self.pid
        for level, kind, payload in ancillary:
            if level != socket.SOL_SOCKET:
                continue
            if kind == socket.SCM_RIGHTS:
                self.listener = socket.socket(fileno=int.from_bytes(payload[:4], sys.byteorder))
            elif kind == socket.SCM_CREDENTIALS:
                self._main = int.from_bytes(payload[:4], sys.byteorder)
        # The program waits for its order, so neither pid can have been used again yet.
        self._main_fd = os.pidfd_open(self._main)
        self._pidfds.append(self._main_fd)
        if self.box.wrapped:
            self._pidfds.append(os.pidfd_open(json.loads(os.read(info, 4096))["child-pid"]))

    def go(
        self,
        argv: list[str],
        env: dict[str, str],
        cwd: str,
        *,
        stdin: bytes | None,
        max_processes: int,
        max_file: int = 0,
    ) -> None:
        """Let it become ``argv``, with ``stdin`` (None: empty); no file longer than ``max_file`` bytes (0: any).

        Raises ``OSError`` when it is gone.
        """
        import resource

        uid = self.box.uid if self.box.own_user else -1
        resource.prlimit(self._main, resource.RLIMIT_CORE, (0, 0))
        if uid >= 0 and max_processes:  # counted per user of the machine; the user is the attempt's own
            resource.prlimit(self._main, resource.RLIMIT_NPROC, (max_processes, max_processes))
        if max_file:
            resource.prlimit(self._main, resource.RLIMIT_FSIZE, (max_file, max_file))
        # Memory runs out: the agent dies, not its runner. What a process with CAP_SYS_RESOURCE writes is a floor, which
        # the agent cannot go below again.
        with contextlib.suppress(OSError), open(f"/proc/{self._main}/oom_score_adj", "w") as score:
            score.write("1000")
        order = marshal.dumps((argv, env, cwd, uid, stdin))
        self._channel.sendall(len(order).to_bytes(4, "big") + order)
        self._channel.close()

    def wait(self, timeout: float | None, wake: int = -1) -> int | None:
        """Exit status of the program (128 + signal when killed); None at the timeout or when ``wake`` is
        readable.
        """
        if self._status is not None:
            return self._status
        poll = select.poll()
        poll.register(self._pidfds[0], select.POLLIN)
        if wake >= 0:
            poll.register(wake, select.POLLIN)
        ready = [fd for fd, _ in poll.poll(None if timeout is None else max(0, int(timeout * 1000) + 1))]
        if self._pidfds[0] in ready:
            _, raw = os.waitpid(self.pid, 0)
            code = os.waitstatus_to_exitcode(raw)
            self._status = code if code >= 0 else 128 - code
        return self._status

    def terminate(self) -> None:
        """Ask the program (not its children) to end."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._main_fd, signal.SIGTERM)

    def kill(self) -> int:
        """End every process that there is; returns the exit status once all are dead. May be called again.

        In a pid namespace the death of its first process, which the kernel reports only after it has killed
        and reaped the rest, is the proof. Without one, the processes of the attempt's own user are hunted
        down.
        """
        for fd in reversed(self._pidfds):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        status = self.wait(None)
        assert status is not None
        for fd in self._pidfds:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            poll.poll()
            os.close(fd)
        self._pidfds = []
        if not self.box.wrapped:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            if self.box.own_user:
                kill_user(self.box.uid)
        return status


class ChildFailed(Exception):
    """The sandbox could not be made."""


def _become(
    box: Box, binds: list[tuple[str, str, bool]], channel: int, output: int, info: int, port: int
) -> None:
    """In the forked child: enter the cgroups, then bubblewrap or the stage directly."""
    os.setsid()
    for folder in box.cgroups:
        fd = os.open(os.path.join(folder, "cgroup.procs"), os.O_WRONLY)
        os.write(fd, b"0")
        os.close(fd)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if not box.wrapped:
        stage.enter(channel, port)
    os.set_inheritable(channel, True)  # everything else is closed by exec
    os.set_inheritable(info, True)
    argv = bwrap_argv(box, binds, info=info)
    argv += [box.python, "-I", "-S", f"{FORGE}/stage.py", str(channel), str(port)]
    os.execvpe(argv[0], argv, {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"})


def bwrap_argv(box: Box, binds: list[tuple[str, str, bool]], *, info: int) -> list[str]:
    """The bubblewrap command line up to the program: read-only system, private rest, no way out."""
    argv = [box.bwrap, "--ro-bind", "/usr", "/usr"]
    for name in _SYSTEM:
        if os.path.islink(name):
            argv += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            argv += ["--ro-bind", name, name]
    argv += ["--perms", "0755", "--dir", "/etc"]  # bubblewrap would make it, and every parent, for root only
    for name in _ETC:
        if os.path.exists(f"/etc/{name}"):
            argv += ["--ro-bind", f"/etc/{name}", f"/etc/{name}"]
    for name in _ETC_OWN:
        argv += ["--ro-bind", box.path(name), f"/etc/{name}"]
    argv += ["--proc", "/proc", "--dev", "/dev"]
    for place in ("/tmp", "/dev/shm"):
        argv += ["--size", str(SCRATCH_BYTES), "--perms", "1777", "--tmpfs", place]
    argv += ["--perms", "1777", "--dir", "/var/tmp", "--dir", "/run"]
    for place in _SOURCES:
        if any(_within(inside, place) for _, inside, _ in binds):
            argv += ["--size", str(SCRATCH_BYTES), "--perms", "0755", "--tmpfs", place]
    shown = [(path, path, False) for path in box.read_only if not _within(path, "/usr")]
    shown += [(box.forge, FORGE, False), *binds]
    made = {"/", "/tmp", "/var", "/run", "/etc"}
    for source, place, writable in shown:
        for parent in _parents(place):
            if parent not in made:
                made.add(parent)
                argv += ["--perms", "0755", "--dir", parent]
        argv += ["--bind" if writable else "--ro-bind", source, place]
    argv += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    argv += ["--hostname", "forge", "--die-with-parent", "--new-session", "--info-fd", str(info)]
    if box.own_user:  # root only to switch the user; bubblewrap sets no_new_privs
        argv += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        argv += ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    return [*argv, "--"]


def in_the_way(work: str, read_only: list[str]) -> str:
    """The read-only folder for whose sake bubblewrap cannot have the work folder at ``work``; empty: it can.

    Below such a folder no other can be made; above it, the work folder would hide it.
    """
    own = (f"/etc/{name}" for name in (*_ETC, *_ETC_OWN))
    source = next(
        (s for s in _SOURCES if _within(work, s) and os.path.isdir(s) and not os.path.islink(s)), ""
    )
    for place in (*read_only, FORGE, *own, *_SYSTEM, "/usr"):
        if _within(place, source) if source else _within(work, place) or _within(place, work):
            return place
    return ""


def _within(path: str, place: str) -> bool:
    return f"{path}/".startswith(f"{place}/")


def _parents(path: str) -> list[str]:
    """``/a/b`` of ``/a/b/c``, and ``/a``; outermost first."""
    parts = path.strip("/").split("/")
    return ["/" + "/".join(parts[:n]) for n in range(1, len(parts))]


def kill_user(uid: int) -> None:
    """SIGKILL every process of a user until there is none. Raises ChildFailed when some are left after 30 s.

    All at once and not one after the other: who forks faster than its processes can be listed would escape. The
    kernel lets nobody fork while it signals; the signaller is a process that may signal this user's and that this
    user may not.
    """
    give_up = time.monotonic() + 30
    while True:
        try:
            hunter = os.fork()
        except OSError:  # there is no process to be had: make room
            _kill_each(uid)
        else:
            if hunter == 0:
                try:
                    os.setresuid(_HUNTER, uid, -1)
                    os.kill(-1, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                except OSError:  # in a user namespace that has no such id
                    _kill_each(uid)
                finally:
                    os._exit(0)
            os.waitpid(hunter, 0)
        if not (left := processes_of(uid)):
            return
        if time.monotonic() > give_up:
            raise ChildFailed(f"{len(left)} processes of the agent do not die")
        time.sleep(0.01)


def _kill_each(uid: int) -> None:
    for pid in processes_of(uid):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def processes_of(uid: int) -> list[int]:
    """Processes of a user that are not yet zombies."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            if os.stat(f"/proc/{name}").st_uid != uid:
                continue
            with open(f"/proc/{name}/stat", "rb") as file:
                state = file.read().rpartition(b")")[2].split()[0]
        except OSError:
            continue
        if state not in (b"Z", b"X"):
            found.append(int(name))
    return found


def oom_kills(box: Box) -> bool:
    """Whether the kernel killed a process of the attempt for want of memory (within its own limit)."""
    for folder in box.cgroups or (_POD_CGROUPS if box.in_place else ()):
        for name in ("memory.oom_control", "memory.events"):  # cgroup v1, v2
            try:
                with open(os.path.join(folder, name)) as file:
                    counts = dict(line.split() for line in file)
            except OSError:
                continue
            if int(counts.get("oom_kill", 0)) > 0:
                return True
    return False


def drain(fd: int, limit: int) -> bytes:
    """What is left to read of a pipe, without waiting for more."""
    os.set_blocking(fd, False)
    try:
        return os.read(fd, limit)
    except BlockingIOError:
        return b""

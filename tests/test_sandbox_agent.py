"""What an agent may try against the runner, the verifier and the machine, in a real sandbox (I5, I10)."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest
from runner_support import FakePod, Lab, plan, say, task_file, tool, verifier_tar

from forge_server.runner.confine import processes_of

pytestmark = pytest.mark.sandbox

UID = 49001  # not one of those that a server takes
ONE = "echo 1 > /logs/verifier/reward.txt\n"
COMPARE = "cmp -s answer.txt /tests/expected && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n"


def wait_until(holds, within=120.0):
    give_up = time.monotonic() + within
    while not holds():
        assert time.monotonic() < give_up, "it does not come"
        time.sleep(0.02)


def wait_until_none(uid, within=120.0):
    """The kernel kills a pid namespace at once, but not before the parent's death is known."""
    give_up = time.monotonic() + within
    while processes_of(uid) and time.monotonic() < give_up:
        os.sched_yield()
    assert processes_of(uid) == [], "a process of the agent is left"


@pytest.fixture
def lab(tmp_path):
    lab = Lab(tmp_path)
    yield lab
    lab.close()
    wait_until_none(UID)


def attack(lab, script, *, verifier=ONE, files=None, python=False, **order):
    """Run ``script`` as the harness, to the end of the attempt; returns the pod that saw it."""
    argv = ["{python}", "-I", "-S", "-c", textwrap.dedent(script)] if python else ["bash", "-c", script]
    env = {"BASE": "{base_url}", "KEY": "{agent_key}", "PYTHON": "{python}"}
    given = plan(argv, env=env, task_files=[task_file("word.txt", "plum")])
    with FakePod(given, [say("hello")], verifier_tar(verifier, **(files or {}))) as pod:
        return lab.run(pod, **order)


GO_ON = {"action": "continue", "reason": "", "left_s": 60.0}


def stop(reason):
    return {"action": "stop", "reason": reason, "left_s": None}


def called(pod, phase):
    """Whether the harness is up: it has made its call."""
    return phase == "running" and pod.called.is_set()


def reward(pod):
    return [body["value"] for body in pod.of("reward")]


def test_the_runner_cannot_be_read(lab):
    """Neither its memory nor its environment is to be found; only the sandbox's own processes are."""
    pod = attack(
        lab,
        """
        import os, re
        pids = [p for p in os.listdir("/proc") if p.isdigit()]
        print("pids", len(pids))
        for pid in pids:
            for name in ("environ", "cmdline"):
                try:
                    data = open(f"/proc/{pid}/{name}", "rb").read()
                except OSError:
                    continue
                if b"runner-" + b"secret" in data or b"FORGE_RUNNER" + b"_OF" in data:
                    print("LEAK", pid, name)
            if pid == str(os.getpid()):
                continue
            try:
                with open(f"/proc/{pid}/mem", "rb") as memory, open(f"/proc/{pid}/maps") as maps:
                    for line in maps:
                        start, end = (int(x, 16) for x in line.split()[0].split("-"))
                        memory.seek(start)
                        if b"runner-" + b"secret" in memory.read(end - start):
                            print("LEAK", pid, "mem")
            except OSError as error:
                print("refused", pid, error.errno)
        print(sorted(os.listdir("/")), os.listdir("/root") if os.path.exists("/root") else "no root")
        """,
        python=True,
    )
    log = pod.log("harness")
    assert "LEAK" not in log
    assert "refused" in log  # the sandbox's first process, which belongs to root
    assert "pids 3" in log or "pids 2" in log, log


def test_the_agent_is_nobody(lab):
    pod = attack(lab, "grep -E '^(Uid|Gid|Groups|Cap|NoNewPrivs)' /proc/self/status; cat /proc/self/uid_map")
    lines = dict(line.split(":\t") for line in pod.log("harness").splitlines() if ":\t" in line)
    assert lines["Uid"].split() == [str(UID)] * 4
    assert lines["Groups"].strip() in ("", str(UID))
    assert {lines[k] for k in ("CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
    assert lines["NoNewPrivs"] == "1"


def test_the_system_is_read_only_and_the_rest_private(lab):
    script = f"""
    for place in /usr/x /etc/x /forge/x /x /proc/sys/kernel/hostname; do
        (echo 1 > $place) 2>/dev/null && echo "WROTE $place"
    done
    for place in /tests /logs /root/.ssh {lab.folder} /sys/fs/cgroup; do
        [ -e $place ] && echo "SEES $place"
    done
    touch /workspace/a $HOME/a /tmp/a /dev/shm/a /var/tmp/a && echo private places are writable
    mount -t tmpfs none /mnt 2>/dev/null && echo MOUNTED
    """
    log = attack(lab, script).log("harness")
    assert "private places are writable" in log
    assert "WROTE" not in log and "SEES" not in log and "MOUNTED" not in log, log


@pytest.mark.parametrize(
    "workdir",
    [
        "/home/agent",
        "/home/agent/app",
        "/home",
        "/usr/src/app",
        "/usr/src",
        "/usr/local/src/a",
        "/app",
        "/tmp",
    ],
)
def test_the_work_folder_is_where_the_task_wants_it(lab, workdir):
    """And is one for the agent and the verifier, beside the harness's own home."""
    script = "pwd; cat ~/own; ln -s word.txt link; cp word.txt answer.txt"
    given = plan(["bash", "-c", script], workdir=workdir, task_files=[task_file("word.txt", "plum")])
    given["files"] = [{"path": "own", "content": "{home} {workdir}", "mode": 0o644}]
    verifier = f"[ $PWD = {workdir} ] && [ -L link ] && [ ! -e ~/own ] && " + COMPARE
    with FakePod(given, [], verifier_tar(verifier, expected="plum")) as pod:
        lab.run(pod)
    assert reward(pod) == [1.0], pod.of("finish")
    assert pod.log("harness").split() == [workdir, "/forge-attempt/home", workdir]


def test_the_agent_can_read_the_system_files(lab):
    """Its own name, those of this machine and the settings of OpenSSL, without which Node does not start."""
    script = "id -un; getent hosts localhost; for f in /etc/ssl/*; do [ -f $f ] && cat $f >/dev/null; done; echo read"
    log = attack(lab, script).log("harness")
    assert log.splitlines()[0] == "agent" and "localhost forge" in log, log
    assert log.splitlines()[-1] == "read" and "denied" not in log, log


def test_the_relay_is_the_only_door(lab):
    """No address is reachable but the relay, and through it nothing but inference."""
    script = """
    import os, socket, urllib.request, urllib.error
    base, key = os.environ["BASE"], os.environ["KEY"]
    def post(path, url=base):
        request = urllib.request.Request(url + path, b"{}", {"Authorization": "Bearer " + key})
        try:
            return urllib.request.urlopen(request, timeout=100).status
        except urllib.error.HTTPError as error:
            return error.code
    print("model", post("/v1/chat/completions"))
    for route in ("finish", "reward", "seal", "v1/../finish", "heartbeat", "../../x"):
        print("route", route, post("/" + route))
    for address in (("127.0.0.1", %d), ("10.0.0.1", 80), ("1.1.1.1", 53), ("169.254.169.254", 80)):
        try:
            socket.create_connection(address, 3)
            print("REACHED", address)
        except OSError:
            pass
    try:
        socket.getaddrinfo("example.com", 80)
        print("RESOLVED")
    except OSError:
        pass
    """
    given = plan(
        ["{python}", "-I", "-S", "-c", "import os;exec(open('/workspace/x.py').read())"],
        env={"BASE": "{base_url}", "KEY": "{agent_key}"},
    )
    with FakePod(given, [say("hello")], verifier_tar(ONE)) as pod:
        given["task_files"] = [task_file("x.py", textwrap.dedent(script % pod.port))]
        lab.run(pod)
    log = pod.log("harness")
    assert "model 200" in log
    assert [line.split()[-1] for line in log.splitlines() if line.startswith("route")] == ["404"] * 6, log
    assert "REACHED" not in log and "RESOLVED" not in log
    assert [h["authorization"] for h in pod.headers] == ["Bearer agent-key"]
    assert len(pod.of("finish")) == 1 and pod.of("finish")[0]["runner_error"] == ""


def test_the_runner_cannot_be_killed(lab):
    pod = attack(lab, "kill -9 -1; kill -9 1; kill -9 $$")
    assert reward(pod) == [1.0]
    finish = pod.of("finish")[0]
    assert finish["exit_code"] == 137 and finish["signal"] == 9 and finish["runner_error"] == ""


def may_set_floors():
    """Whether this process has CAP_SYS_RESOURCE, which not every container gives to root."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return bool(int(status["CapEff"], 16) >> 24 & 1)


def test_the_agent_dies_first_when_memory_runs_out(lab):
    """The machine's, which the agent may use up through its runner as well. It cannot lower its own score, where
    the runner's right to set it was the server's."""
    script = """
    cat /proc/self/oom_score_adj
    for score in -1 0 999; do { echo $score > /proc/self/oom_score_adj; } 2>/dev/null; done
    cat /proc/self/oom_score_adj
    """
    first, last = attack(lab, script).log("harness").split()
    assert first == "1000"
    assert last == "1000" or not may_set_floors()


def test_daemons_are_dead_before_the_verifier_arrives(lab):
    """A daemon that waits for /tests and keeps the output open neither lives on nor delays the end."""
    daemon = (
        "setsid nohup bash -c 'while :; do echo 1 > /logs/verifier/reward.txt; "
        "cp /tests/expected answer.txt; touch alive; done' & disown; (sleep 1000 &) ; exit 0"
    )
    verifier = "rm -f alive; ls /proc | grep -c '^[0-9]' ; sleep 0.3; [ -e alive ] && r=1 || r=0\n"
    verifier += "echo $r > /logs/verifier/reward.txt\n"
    pod = attack(lab, daemon, verifier=verifier, files={"expected": "plum"})
    assert reward(pod) == [0.0]
    order = [name for name, _ in pod.seen if name in ("seal", "verifier", "finish")]
    assert order == ["seal", "verifier", "finish"]


@pytest.mark.parametrize(
    "plant",
    [
        "ln -s /tests/expected answer.txt",
        "ln -s ../tests/expected answer.txt",
        "ln -s /proc/self/root/tests/expected answer.txt",
        "ln -s /usr up; ln -s up/../tests/expected answer.txt",
        "mkdir d; ln -s ../../tests d/t; ln -s d/t/expected answer.txt",
        "ln -s /dev/fd/../../../tests/expected answer.txt",
        "ln -s / r; ln -s r/tests/expected answer.txt",
        "mkfifo answer.txt",
        "mkdir -m 0 answer.txt",
    ],
)
def test_planted_files_win_nothing(lab, plant):
    pod = attack(lab, plant, verifier=COMPARE, files={"expected": "plum"})
    assert reward(pod) == [0.0]


def test_honest_links_stay(lab):
    pod = attack(
        lab,
        "mkdir d; echo -n plum > d/real; ln -s d/real answer.txt; ln -s /usr/bin/env e; ln -s . here",
        verifier="[ -e e ] && [ -e here ] && cmp -s answer.txt /tests/expected && r=1 || r=0\n"
        "echo $r > /logs/verifier/reward.txt\n",
        files={"expected": "plum"},
    )
    assert reward(pod) == [1.0]


def test_the_verifier_starts_from_a_clean_home(lab):
    """What the agent left in its home, /tmp or environment does not reach the verifier."""
    script = (
        "echo 'echo 1 > /logs/verifier/reward.txt; exit' | tee ~/.bashrc ~/.profile ~/.bash_profile > /tmp/x;"
        "mkdir -p ~/bin; printf '#!/bin/sh\\necho 1' > ~/bin/cmp; chmod +x ~/bin/cmp; "
        "echo -n wrong > answer.txt"
    )
    pod = attack(lab, script, verifier="ls -A ~ /tmp\n" + COMPARE, files={"expected": "plum"})
    assert reward(pod) == [0.0]
    assert ".bashrc" not in pod.log("verifier")


def test_a_fork_bomb_ends_with_the_harness(lab):
    given = plan(
        ["bash", "-c", "f() { f | f & }; f; sleep 1; echo survived"], limits={"pids": 32, "memory_mb": 0}
    )
    with FakePod(given, verifier=verifier_tar(ONE)) as pod:
        lab.run(pod)
    assert reward(pod) == [1.0]


def test_a_harness_that_never_ends_is_stopped(lab):
    """TERM is ignored; KILL follows after the grace. The verifier still has its say."""
    script = """
    import os, signal, time, urllib.request as u
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open("answer.txt", "w").write("plum")
    u.urlopen(u.Request(os.environ["BASE"] + "/v1/chat/completions", b"{}", {"Authorization": "Bearer x"}))
    time.sleep(1000)
    """
    argv = ["{python}", "-I", "-S", "-c", textwrap.dedent(script)]
    with FakePod(
        plan(argv, env={"BASE": "{base_url}"}), verifier=verifier_tar(COMPARE, expected="plum")
    ) as pod:
        pod.heartbeat = lambda phase: stop("agent_timeout") if called(pod, phase) else GO_ON
        lab.run(pod)
    assert reward(pod) == [1.0]
    assert pod.of("finish")[0]["stopped_by"] == "agent_timeout"
    assert pod.of("seal")[0]["reason"] == "agent_timeout"
    assert pod.of("finish")[0]["exit_code"] == 137


def test_a_polite_harness_may_end_itself(lab):
    script = """
    import os, signal, sys, time, urllib.request as u
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("saved"))
    u.urlopen(u.Request(os.environ["BASE"] + "/v1/chat/completions", b"{}", {"Authorization": "Bearer x"}))
    time.sleep(1000)
    """
    argv = ["{python}", "-I", "-S", "-c", textwrap.dedent(script)]
    given = plan(argv, env={"BASE": "{base_url}"}, grace_s=30)
    with FakePod(given, verifier=verifier_tar(ONE)) as pod:
        pod.heartbeat = lambda phase: stop("budget_calls") if called(pod, phase) else GO_ON
        lab.run(pod)
    assert pod.of("finish")[0]["exit_code"] == 1
    assert pod.of("finish")[0]["stopped_by"] == "budget_calls"
    assert "saved" in pod.log("harness")


def test_a_harness_that_exits_at_once(lab):
    pod = attack(lab, "echo nothing to do >&2; exit 3")
    assert pod.of("finish")[0]["exit_code"] == 3
    assert pod.log("harness") == "nothing to do\n"
    assert pod.calls == []


def test_a_program_that_is_not_there(lab):
    with FakePod(plan(["no-such-program"]), verifier=verifier_tar(ONE)) as pod:
        lab.run(pod)
    assert pod.of("finish")[0]["exit_code"] == 127
    assert "cannot start 'no-such-program'" in pod.log("harness")


def test_a_flood_of_calls_and_output_is_borne(lab):
    script = """
    import os, threading, urllib.request
    def call():
        for _ in range(5):
            request = urllib.request.Request(os.environ["BASE"] + "/v1/chat/completions", b"{}")
            request.add_header("Authorization", "Bearer x")
            urllib.request.urlopen(request, timeout=300).read()
    threads = [threading.Thread(target=call) for _ in range(40)]
    [t.start() for t in threads]; [t.join() for t in threads]
    for _ in range(200): print("x" * 10000)
    print("the end")
    """
    pod = attack(lab, script, python=True)
    assert len(pod.calls) == 200
    assert reward(pod) == [1.0]
    log = pod.log("harness")
    assert len(log) <= 65536 and log.endswith("the end\n")


def test_the_react_harness(lab):
    argv = ["{python}", "-I", "-S", "{forge}/react.pyz", "{instruction}"]
    env = {"FORGE_BASE_URL": "{base_url}", "FORGE_KEY": "{agent_key}", "FORGE_MODEL": "{model}"}
    given = plan(argv, env=env, instruction="copy {agent_key}", task_files=[task_file("word.txt", "plum")])
    script = [tool("shell", command="cat word.txt; env"), tool("finish", answer="plum")]
    with FakePod(given, script, verifier_tar(COMPARE, expected="plum")) as pod:
        lab.run(pod)
    assert reward(pod) == [1.0]
    messages = pod.calls[-1]["messages"]
    assert messages[1]["content"] == "copy {agent_key}"  # an instruction is not filled in again
    assert "agent-key" not in messages[-1]["content"]  # the shell does not see the key


def test_the_attempt_dies_with_its_server(lab):
    with FakePod(plan(["bash", "-c", "echo up; sleep 1000"]), verifier=verifier_tar(ONE)) as pod:
        process = lab.begin(pod)
        assert pod.started.wait(120)
        process.stdin.close()  # what the death of the server looks like
        assert process.wait(120) == 3
        assert pod.of("finish") == []


def test_the_attempt_dies_with_its_runner(lab):
    with FakePod(
        plan(["bash", "-c", "(setsid sleep 1000 &); sleep 1000"]), verifier=verifier_tar(ONE)
    ) as pod:
        process = lab.begin(pod)
        assert pod.started.wait(120)
        process.kill()
        process.wait(120)
    wait_until_none(UID)


def test_a_stopped_runner_leaves_nothing_and_says_nothing(lab):
    with FakePod(plan(["bash", "-c", "trap '' TERM; sleep 1000"]), verifier=verifier_tar(ONE)) as pod:
        process = lab.begin(pod)
        assert pod.started.wait(120)
        process.terminate()
        assert process.wait(120) == 3
        assert pod.of("finish") == [] and pod.of("seal") == []


def test_a_runner_that_is_stopped_with_its_verifier_says_nothing(lab):
    """I5: who ends every process of a unit ends the verifier a moment before its runner."""
    with FakePod(plan(["true"]), verifier=verifier_tar("sleep 1000\n" + ONE)) as pod:
        verifying = threading.Event()
        pod.heartbeat = lambda phase: (phase == "verifying" and verifying.set()) or GO_ON
        process = lab.begin(pod)
        assert verifying.wait(120)
        wait_until(lambda: processes_of(UID))
        process.send_signal(signal.SIGSTOP)
        for pid in processes_of(UID):
            with contextlib.suppress(ProcessLookupError):  # with the first the others go
                os.kill(pid, signal.SIGTERM)
        wait_until(lambda: "Z" in states_of_children(process.pid))
        process.terminate()
        process.send_signal(signal.SIGCONT)
        assert process.wait(120) == 3
        assert pod.of("finish") == [] and pod.of("reward") == []


def states_of_children(pid):
    """As ``ps`` names them."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] for child in children]


def slow(lab, steps):
    """A bubblewrap that takes its time: it says that it began by the file ``began`` in ``steps``, and goes on once
    ``go`` is there. Its like are a work folder with many files, a disk under load."""
    steps.mkdir()
    program = lab.folder / "bwrap"
    wait = f"touch {steps}/began; n=0; while [ ! -e {steps}/go ] && [ $((n += 1)) -lt 2000 ]; do sleep 0.05; done"
    program.write_text(f'#!/bin/sh\n{wait}\nexec bwrap "$@"\n')
    program.chmod(0o755)
    return str(program)


def test_a_runner_that_makes_ready_says_that_it_lives(lab, tmp_path):
    """The folders and the sandbox may take longer than the silence that a runner is allowed."""
    steps, phases = tmp_path / "steps", []

    def heard(phase):
        phases.append(phase)
        (steps / "go").touch()
        return GO_ON

    with FakePod(plan(["true"]), verifier=verifier_tar(ONE)) as pod:
        pod.heartbeat = heard
        lab.run(pod, bwrap=slow(lab, steps))
        routes = [route for route, _ in pod.seen]
        assert phases[0] == "starting" and routes.index("heartbeat") < routes.index("events")
        assert reward(pod) == [1.0]


def test_a_runner_that_is_told_to_stop_while_it_makes_ready_stops(lab, tmp_path):
    steps = tmp_path / "steps"

    def told(phase):
        (steps / "go").touch()
        return stop("budget_calls")

    with FakePod(plan(["sleep", "1000"]), verifier=verifier_tar(ONE)) as pod:
        pod.heartbeat = told
        lab.run(pod, bwrap=slow(lab, steps))
        assert pod.of("seal") == [{"reason": "budget_calls"}]
        assert pod.of("finish")[0]["stopped_by"] == "budget_calls"


def test_a_runner_that_is_stopped_while_it_makes_ready_starts_nothing(lab, tmp_path):
    steps = tmp_path / "steps"
    with FakePod(plan(["true"]), verifier=verifier_tar(ONE)) as pod:
        process = lab.begin(pod, bwrap=slow(lab, steps))
        wait_until((steps / "began").exists)
        process.terminate()
        (steps / "go").touch()
        assert process.wait(120) == 3
        assert {route for route, _ in pod.seen} <= {"start", "heartbeat"}


def test_a_dismissed_runner_stops(lab):
    """409 at a heartbeat: the attempt has ended at the server."""
    with FakePod(plan(["bash", "-c", "sleep 1000"]), verifier=verifier_tar(ONE)) as pod:
        pod.refuse = {"heartbeat": 409}
        lab.run(pod, code=3)
        assert pod.of("finish") == []


def test_the_level_without_namespaces_still_hides_the_runner(tmp_path):
    """Level ``user``, as in pods: another user id, the same processes and network."""
    folder = tempfile.mkdtemp()  # pytest's own are closed to other users
    os.chmod(folder, 0o755)
    lab = Lab(Path(folder))
    script = (
        "cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | grep -a runner-secret && echo LEAK; "
        "kill -9 -1; (setsid sleep 1000 &); kill -9 $PPID && echo KILLED; exit 0"
    )
    given = plan(["bash", "-c", script], verify_argv=["sh", "/tests/test.sh"])
    verifier = verifier_tar("echo 1 > $FORGE_LOGS/reward.txt\n")
    try:
        with FakePod(given, verifier=verifier) as pod:
            lab.run(pod, level="user", python="/usr/bin/python3", read_only=[])
        assert reward(pod) == [1.0], pod.log("verifier")
        assert "LEAK" not in pod.log("harness") and "KILLED" not in pod.log("harness")
        assert processes_of(UID) == []
    finally:
        lab.close()
        shutil.rmtree(folder)


def test_who_forks_faster_than_it_can_be_listed_is_dead_too(tmp_path):
    """At the levels without a process namespace: twenty chains of processes, each of which lives for an instant."""
    folder = tempfile.mkdtemp()
    os.chmod(folder, 0o755)
    lab = Lab(Path(folder))
    script = """
    import os
    for _ in range(20):
        if os.fork() == 0:
            os.setsid()
            while True:
                if os.fork():
                    os._exit(0)
    """
    given = plan(
        ["/usr/bin/python3", "-I", "-S", "-c", textwrap.dedent(script)], verify_argv=["sh", "/tests/test.sh"]
    )
    try:
        with FakePod(given, verifier=verifier_tar("echo 1 > $FORGE_LOGS/reward.txt\n")) as pod:
            lab.run(pod, level="user", python="/usr/bin/python3", read_only=[])
        assert reward(pod) == [1.0], pod.of("finish")
        assert processes_of(UID) == []
    finally:
        lab.close()
        shutil.rmtree(folder)


def test_a_server_that_is_not_root_has_a_sandbox_too():
    """The harness keeps the server's user, in a user namespace; processes and network are as private."""
    folder = Path(tempfile.mkdtemp())
    os.chown(folder, 49002, 49002)
    lab = Lab(folder)
    for path in folder.rglob("*"):
        os.chown(path, 49002, 49002)
    script = """
    ls /proc | grep -c '^[0-9]'; grep ^CapEff /proc/self/status; id -u
    grep -rqs runner-secret /proc/[0-9]*/environ && echo LEAK
    echo -n plum > answer.txt; kill -9 -1
    """
    given = plan(["bash", "-c", script])
    try:
        with FakePod(given, verifier=verifier_tar(COMPARE, expected="plum")) as pod:
            lab.run(pod, uid=-1, python="/usr/bin/python3", read_only=[], runner_user=49002)
        assert reward(pod) == [1.0], pod.log("verifier")
        log = pod.log("harness")
        assert "LEAK" not in log and "CapEff:\t0000000000000000" in log and "\n1000\n" in log
    finally:
        lab.close()
        wait_until_none(49002)
        shutil.rmtree(folder)


def test_what_its_owner_may_not_write_to_is_removed_without_root():
    """Go makes its modules so; a link leads the removal nowhere."""
    folder = Path(tempfile.mkdtemp())
    os.chown(folder, 49002, 49002)
    lab = Lab(folder)
    for path in folder.rglob("*"):
        os.chown(path, 49002, 49002)
    aside = folder / "aside"
    aside.mkdir(mode=0o500)
    os.chown(aside, 49002, 49002)
    script = f"mkdir -p ~/go/shut; touch ~/go/a.go; ln -s {aside} ~/go/out; chmod 0 ~/go/shut; chmod 500 ~/go"
    removal = (
        f"import sys; sys.path[:0] = ['{lab.forge}/runner.pyz']; from forge_runner.place import remove_tree; "
    )
    removal += f"remove_tree('{folder}/attempt')"
    try:
        with FakePod(plan(["bash", "-c", script]), verifier=verifier_tar(ONE)) as pod:
            user = {"uid": -1, "python": "/usr/bin/python3", "read_only": [], "runner_user": 49002}
            lab.run(pod, code=1, tidy=True, **user)  # its own removal
        assert reward(pod) == [1.0] and (folder / "attempt").exists()
        subprocess.run(
            ["/usr/bin/python3", "-I", "-c", removal], user=49002, group=49002, extra_groups=[], check=True
        )
        assert not (folder / "attempt").exists()
        assert aside.stat().st_mode & 0o777 == 0o500
    finally:
        lab.close()
        wait_until_none(49002)
        shutil.rmtree(folder)


def test_the_lowest_level_runs_what_is_trusted(lab):
    given = plan(["bash", "-c", "echo -n plum > answer.txt; sleep 1000 &"])
    check = "cmp -s answer.txt $FORGE_TESTS/expected && echo 1 > $FORGE_LOGS/reward.txt"
    with FakePod(given, verifier=verifier_tar(check, expected="plum")) as pod:
        lab.run(pod, level="none", uid=-1)
    assert reward(pod) == [1.0]

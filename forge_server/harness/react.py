"""A small ReAct harness: chat completions, a ``shell`` tool and a ``finish`` tool. Standard library only.

Runs as a program in the sandbox (``main``) or inside another process (``react_loop``, for scripted
teachers). Prompt and tool schemas are short, because tiny models read them; messages are only ever
appended, and the model's own turns come back exactly as they were received, so that a conversation is one
sample.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time

TYPE_CHECKING = False  # without importing typing: every attempt would pay for it
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Message = dict[str, Any]

SYSTEM = "Use shell to look, then finish with the answer."
TOOLS: list[Message] = [
    {
        "type": "function",
        "function": {
            "name": "shell",
            "description": "Run a command.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "finish",
            "description": "Give the answer.",
            "parameters": {
                "type": "object",
                "properties": {"answer": {"type": "string"}},
                "required": ["answer"],
            },
        },
    },
]
ANSWER_FILE = "answer.txt"
RETRIES = 6  # of a request that met 429, 5xx or a broken connection


class Stopped(Exception):
    """The model server ended the attempt (a 4xx answer) or stayed away."""


def react_loop(
    base_url: str,
    key: str,
    model: str,
    instruction: str,
    workdir: str,
    *,
    max_turns: int = 30,
    output_limit: int = 2000,
    command_timeout_s: float = 30.0,
    shell: Callable[[str], str] | None = None,
) -> int:
    """Run one conversation; returns the number of model calls made.

    It ends with ``finish`` (the answer is written to ``answer.txt`` in ``workdir``), with a reply that
    calls no tool, or after ``max_turns`` calls. ``shell(command) -> text`` replaces the real shell. Raises
    ``Stopped``.
    """
    run = shell or (lambda command: run_shell(command, workdir, command_timeout_s))
    client = Client(base_url, key)
    messages: list[Message] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": instruction},
    ]
    try:
        for turn in range(1, max_turns + 1):
            reply = client.chat({"model": model, "messages": messages, "tools": TOOLS})
            messages.append(reply)
            calls = reply.get("tool_calls") or []
            if not calls:
                return turn
            for call in calls:
                text = _act(call, workdir, run)
                if text is None:
                    return turn
                text = clip(text, output_limit)
                messages.append({"role": "tool", "tool_call_id": call.get("id", ""), "content": text})
        return max_turns
    finally:
        client.close()


def _act(call: Message, workdir: str, shell: Callable[[str], str]) -> str | None:
    """Do what a tool call says; the text for the model, or None after ``finish``."""
    function = call.get("function") or {}
    name = function.get("name")
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except ValueError:
        return "error: the arguments are not JSON"
    if not isinstance(arguments, dict):
        return "error: the arguments are not an object"
    if name == "shell":
        command = arguments.get("command")
        return shell(command) if isinstance(command, str) else "error: shell needs a command"
    if name == "finish":
        answer = arguments.get("answer")
        if answer is None:
            return "error: finish needs an answer"
        with open(os.path.join(workdir, ANSWER_FILE), "w") as file:
            file.write(answer if isinstance(answer, str) else json.dumps(answer))
        return None
    return f"error: there is no tool {name}"


def clip(text: str, limit: int) -> str:
    """The text, its middle cut out when it is longer than ``limit`` characters."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters cut]\n{text[-half:]}"


def run_shell(command: str, workdir: str, timeout_s: float) -> str:
    """Run ``command`` by ``/bin/sh`` in ``workdir``; its output, then its status unless 0."""
    quoted = "'" + workdir.replace("'", "'\\''") + "'"
    read, write = os.pipe()
    null = os.open(os.devnull, os.O_RDONLY)
    dup = os.POSIX_SPAWN_DUP2
    actions = [(dup, null, 0), (dup, write, 1), (dup, write, 2)]
    try:
        argv = ["sh", "-c", f"cd {quoted} || exit\n{command}"]
        pid = os.posix_spawn("/bin/sh", argv, os.environ, file_actions=actions, setpgroup=0)
    except (OSError, ValueError) as error:  # no more processes, a NUL byte, too long
        os.close(read)
        return f"error: {error}"
    finally:
        os.close(write)
        os.close(null)
    output, late = _collect(read, pid, timeout_s)
    if late:
        os.killpg(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    text = output.decode("utf-8", "replace")
    if late:
        return f"{text}\n[stopped after {timeout_s:g} s]"
    return text if status == 0 else f"{text}\n[status {status}]"


def _collect(fd: int, pid: int, timeout_s: float) -> tuple[bytes, bool]:
    """Read a command's output until it is done (what it left running in the background may go on)."""
    output, end, done = bytearray(), time.monotonic() + timeout_s, os.pidfd_open(pid)
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.register(done, select.POLLIN)
    try:
        while True:
            ready = dict(poll.poll(max(0.0, (end - time.monotonic()) * 1000)))
            if fd in ready:
                data = os.read(fd, 65536)
                output += data
                if len(output) > 1 << 20:
                    del output[1 << 19 : -(1 << 19)]
                if not data:
                    poll.unregister(fd)
                elif time.monotonic() < end:
                    continue
            elif done in ready:
                return bytes(output), False
            if time.monotonic() >= end:
                return bytes(output), True
    finally:
        os.close(fd)
        os.close(done)


class Client:
    """Chat completions over one kept connection."""

    def __init__(self, base_url: str, key: str) -> None:
        self.host, _, path = base_url.removeprefix("http://").partition("/")
        self.path = f"/{path}".rstrip("/") + "/v1/chat/completions"
        self.key = key
        self.sock: socket.socket | None = None
        self.buffer = b""

    def chat(self, body: Message) -> Message:
        """The assistant's message. Waits out 429, 5xx and broken connections; raises ``Stopped`` on the
        rest.
        """
        data, fault = json.dumps(body).encode(), ""
        for trial in range(RETRIES + 1):
            wait = 0.2 * 2**trial
            try:
                status, headers, answer = self._post(data)
            except (OSError, ValueError, IndexError) as error:
                self.close()
                fault = repr(error)
            else:
                if status == 200:
                    message: Message = json.loads(answer)["choices"][0]["message"]
                    return message
                fault = f"HTTP {status}: {answer[:300].decode('utf-8', 'replace')}"
                if status < 500 and status != 429:
                    raise Stopped(fault)
                wait = float(headers.get("retry-after", wait))
            if trial < RETRIES:
                time.sleep(min(wait, 30.0))
        raise Stopped(fault)

    def close(self) -> None:
        if self.sock is not None:
            self.sock.close()
            self.sock = None
        self.buffer = b""

    def _post(self, data: bytes) -> tuple[int, dict[str, str], bytes]:
        if self.sock is None:
            host, _, port = self.host.partition(":")
            self.sock = socket.create_connection((host, int(port or 80)))
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: {self.host}\r\nAuthorization: Bearer {self.key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        self.sock.sendall(head.encode() + data)
        start, *lines = self._until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        pairs = [line.partition(":") for line in lines]
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        if "chunked" in headers.get("transfer-encoding", ""):
            answer = b""
            while size := int(self._until(b"\r\n"), 16):
                answer += self._exactly(size + 2)[:-2]
            self._until(b"\r\n")
        else:
            answer = self._exactly(int(headers.get("content-length", 0)))
        if headers.get("connection", "").lower() == "close":
            self.close()
        return int(start.split()[1]), headers, answer

    def _fill(self) -> None:
        assert self.sock is not None
        data = self.sock.recv(65536)
        if not data:
            raise ConnectionError("the connection was closed")
        self.buffer += data

    def _until(self, mark: bytes) -> bytes:
        """What comes before ``mark``, which is taken too."""
        while mark not in self.buffer:
            self._fill()
        taken, _, self.buffer = self.buffer.partition(mark)
        return taken

    def _exactly(self, count: int) -> bytes:
        while len(self.buffer) < count:
            self._fill()
        taken, self.buffer = self.buffer[:count], self.buffer[count:]
        return taken


def main() -> int:
    """``react.pyz INSTRUCTION``, with FORGE_BASE_URL, FORGE_KEY, FORGE_MODEL, REACT_* in the environment."""
    env = os.environ
    base_url, key, model = env["FORGE_BASE_URL"], env.pop("FORGE_KEY"), env["FORGE_MODEL"]
    try:
        calls = react_loop(
            base_url,
            key,
            model,
            sys.argv[1],
            os.getcwd(),
            max_turns=int(env.get("REACT_MAX_TURNS", 30)),
            output_limit=int(env.get("REACT_OUTPUT_LIMIT", 2000)),
            command_timeout_s=float(env.get("REACT_COMMAND_TIMEOUT_S", 30)),
        )
    except Stopped as error:
        print(f"react: stopped: {error}", file=sys.stderr)
        return 1
    print(f"react: {calls} calls")
    return 0


if __name__ == "__main__":
    sys.exit(main())

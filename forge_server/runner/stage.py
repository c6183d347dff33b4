"""The first program inside the sandbox: opens the relay's door, drops to the agent's user, becomes the
harness.

It runs before any line of the agent's, holds no secret, and gets argv and environment only over its socket,
so that keys are never on a command line that others can list. Invoked as ``python stage.py FD PORT``.
"""

import _socket
import marshal
import os
import sys


def enter(fd: int, port: int) -> None:
    """Listen on loopback ``port`` (-1: none) and hand the socket out through ``fd``; wait for the order;
    exec.

    The order is a marshalled ``(argv, env, cwd, uid, stdin)`` after its length; uid -1 keeps the user.
    """
    channel = _socket.socket(fileno=fd)
    rights = []
    if port >= 0:
        listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
        listener.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
        rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, listener.fileno().to_bytes(4, sys.byteorder))]
    channel.sendmsg([b"!"], rights)
    if port >= 0:
        listener.close()
    data = b""
    while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "big"):
        more = channel.recv(1 << 20)
        if not more:
            os._exit(125)  # the runner is gone
        data += more
    argv, env, cwd, uid, stdin = marshal.loads(data[4:])
    channel.close()
    try:
        if stdin is not None:
            file = os.memfd_create("stdin")
            os.write(file, stdin)
            os.lseek(file, 0, os.SEEK_SET)
            os.dup2(file, 0)
        # as the runner did, which may not have been allowed to; a kubelet may have given the runner 999 already
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")
        if uid >= 0:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        os.umask(0o022)
        os.chdir(cwd)
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        os.write(2, f"cannot start {argv[0]!r} in {cwd}: {error}\n".encode())
    os._exit(127)


if __name__ == "__main__":
    enter(int(sys.argv[1]), int(sys.argv[2]))

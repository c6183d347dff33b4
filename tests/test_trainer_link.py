"""The trainer's side of the link: what it repeats, and what ends it."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from forge_server.trainer.errors import BatchInvalid, Fenced, LinkFailed, RunEnded
from forge_server.trainer.link import Link

Answer = tuple[int, dict[str, str], bytes]


class Scripted:
    """Gives the answers it was told to, one per call, and remembers the calls."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.calls: list[tuple[str, str, Any]] = []
        script = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_POST(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size)) if size else None
                script.calls.append((self.command, self.path, body))
                status, headers, answer = script.answers.pop(0)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                if status != 204:
                    self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_POST

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def server() -> Iterator[Scripted]:
    scripted = Scripted()
    yield scripted
    scripted.http.shutdown()
    scripted.http.server_close()


@pytest.fixture
def link(server: Scripted) -> Link:
    made = Link(f"http://127.0.0.1:{server.http.server_port}/trainer", "fk-trainer-x")
    made.session = "token"
    return made


def test_a_server_that_is_away_is_asked_again(server: Scripted, link: Link) -> None:
    server.answers = [(503, {}, b""), (502, {}, b""), (200, {}, b'{"version": 7}')]
    assert link.report_checkpoint(3, "/checkpoints/step_00003", "ab") == 7
    sent = {"session": "token", "k": 3, "path": "/checkpoints/step_00003", "manifest_sha256": "ab"}
    assert server.calls == [("POST", "/trainer/checkpoints", sent)] * 3


def test_patience_ends(server: Scripted, link: Link) -> None:
    server.answers = [(503, {}, b"starting")]
    with pytest.raises(LinkFailed, match="503: starting"):
        link.beat()  # a heartbeat has no patience: the next one comes anyway
    assert len(server.calls) == 1


def test_an_error_that_stays_is_not_repeated(server: Scripted, link: Link) -> None:
    server.answers = [(401, {}, b"unknown key")]
    with pytest.raises(LinkFailed, match="HTTP 401: unknown key"):
        link.report_metrics(1, {"loss": 0.5})
    assert len(server.calls) == 1


def test_409_is_the_fence_and_410_the_end(server: Scripted, link: Link) -> None:
    server.answers = [(409, {}, b"newer session"), (410, {}, b"done")]
    with pytest.raises(Fenced, match="newer session"):
        link.poll_batch(1)
    with pytest.raises(RunEnded, match="done"):
        link.poll_batch(1)


def test_a_batch_is_waited_for_and_its_digest_checked(server: Scripted, link: Link) -> None:
    body = b"batch"
    right = {"X-Batch-Sha256": hashlib.sha256(body).hexdigest()}
    server.answers = [(204, {}, b""), (200, right, body), (200, {"X-Batch-Sha256": "00"}, body)]
    assert link.poll_batch(4) is None
    assert link.poll_batch(4) == body
    with pytest.raises(BatchInvalid, match="digest"):
        link.poll_batch(4)
    assert server.calls[0][:2] == ("GET", "/trainer/batches/4?session=token")


def test_a_heartbeat_tells_what_may_be_pruned_what_to_save_and_when_to_stop(
    server: Scripted, link: Link
) -> None:
    server.answers = [
        (200, {}, b'{"action": "continue", "acked_step": 2, "save": "w"}'),
        (200, {}, b'{"action": "stop", "acked_step": 3, "save": ""}'),
    ]
    link.enter("training", 3)
    assert (link.acked_step, link.save, link.stop.is_set()) == (2, "w", False)
    link.beat()
    assert (link.acked_step, link.save, link.stop.is_set()) == (3, "", True)
    assert server.calls[1][2] == {"session": "token", "phase": "training", "step": 3}

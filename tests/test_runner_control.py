"""The runner's side of the protocol: repeated until it is heard, given up when it is not."""

import pytest
from runner_support import FakePod, plan

from forge_server.runner import control
from forge_server.runner.control import Control, Refused, Unreachable


@pytest.fixture
def pod():
    with FakePod(plan(["true"]), verifier=b"tar") as pod:
        yield pod


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(control.time, "sleep", lambda seconds: None)


def test_requests_are_answered(pod):
    it = Control(pod.url, "at-1")
    it.key = it.post("start", {"token": "t", "nonce": "n"})["runner_key"]
    assert it.post("seal", {"reason": ""}) == {}
    assert it.get("verifier") == b"tar"
    pod.verifier = None
    assert it.get("verifier") is None
    it.close()


def test_a_refusal_is_final(pod):
    it = Control(pod.url, "at-1", "wrong key")
    with pytest.raises(Refused) as refused:
        it.post("seal", {"reason": ""})
    assert refused.value.status == 401
    it.close()


def test_trouble_of_the_server_is_waited_out(pod):
    answers = iter([500, 503, 429])
    it = Control(pod.url, "at-1", "runner-secret")

    def trouble(status):
        pod.refuse = {"seal": status} if status else {}

    real, trouble_now = it._once, list(answers)

    def once(*arguments):
        trouble(trouble_now.pop(0) if trouble_now else 0)
        return real(*arguments)

    it._once = once
    assert it.post("seal", {"reason": "x"}) == {}
    assert pod.of("seal") == [{"reason": "x"}] * 4
    it.close()


def test_a_server_that_restarted_is_found_again(pod):
    it = Control(pod.url, "at-1", "runner-secret")
    it.post("seal", {})
    pod.close()
    pod.reopen()
    assert it.post("seal", {}) == {}
    it.close()


def test_a_server_that_stays_away_is_given_up():
    with FakePod(plan(["true"])) as pod:
        url = pod.url
    with pytest.raises(Unreachable, match="POST seal"):
        Control(url, "at-1").post("seal", {}, patience=0.0)

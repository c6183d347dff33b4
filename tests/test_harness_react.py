"""The ReAct harness against a scripted model, in this process."""

import json

import pytest
from runner_support import FakePod, plan, say, tool

from forge_server.harness import react
from forge_server.harness.react import SYSTEM, TOOLS, Stopped, clip, react_loop, run_shell


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(react.time, "sleep", lambda seconds: None)

    def run(*script, trouble=(), **options):
        with FakePod(plan([]), list(script)) as pod:
            pod.trouble = list(trouble)
            run.pod = pod
            base = f"{pod.url}/a/at-1"
            return react_loop(base, "key", "m", "do it", str(tmp_path), **options)

    return run


def raw(name, arguments):
    call = {"id": "c9", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "hm", "tool_calls": [call]}


def test_it_looks_and_answers(run, tmp_path):
    (tmp_path / "word.txt").write_text("plum")
    assert run(tool("shell", command="cat word.txt"), tool("finish", answer="plum")) == 2
    assert (tmp_path / "answer.txt").read_text() == "plum"
    first, second = run.pod.calls
    assert first["messages"] == [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "do it"}]
    assert first["tools"] == TOOLS and first["model"] == "m"
    assert second["messages"][:3] == [*first["messages"], tool("shell", command="cat word.txt")]
    assert second["messages"][3] == {"role": "tool", "tool_call_id": "c1", "content": "plum"}
    assert run.pod.headers[0]["authorization"] == "Bearer key"


def test_a_reply_without_a_tool_ends_it(run, tmp_path):
    assert run(say("plum")) == 1
    assert not (tmp_path / "answer.txt").exists()


def test_turns_are_bounded(run):
    assert run(tool("shell", command="true"), max_turns=4) == 4
    assert len(run.pod.calls) == 4


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (raw("shell", "{"), "not JSON"),
        (raw("shell", "[1]"), "not an object"),
        (raw("shell", "{}"), "shell needs a command"),
        (raw("shell", '{"command": 1}'), "shell needs a command"),
        (raw("finish", "{}"), "finish needs an answer"),
        (raw("browse", "{}"), "there is no tool browse"),
        (raw("shell", '{"command": "a\\u0000b"}'), "error"),
    ],
)
def test_a_bad_tool_call_is_told(run, reply, error):
    run(reply, say("sorry"))
    told = run.pod.calls[1]["messages"][-1]
    assert told["tool_call_id"] == "c9" and error in told["content"]


def test_several_calls_in_one_reply(run, tmp_path):
    both = tool("shell", command="echo one")
    both["tool_calls"] += raw("shell", json.dumps({"command": "echo two"}))["tool_calls"]
    both["tool_calls"] += tool("finish", answer=7)["tool_calls"]
    assert run(both) == 1
    assert (tmp_path / "answer.txt").read_text() == "7"


def test_a_shell_of_ones_own(run):
    run(tool("shell", command="x"), say("done"), shell=lambda command: f"<{command}>")
    assert run.pod.calls[1]["messages"][-1]["content"] == "<x>"


def test_trouble_is_waited_out(run):
    assert run(say("done"), trouble=[503, 429, 500]) == 1


def test_the_end_of_the_attempt_is_obeyed(run):
    with pytest.raises(Stopped, match="400"):
        run(say("done"), trouble=[400])


def test_a_server_that_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(react.time, "sleep", lambda seconds: None)
    with FakePod(plan([])) as pod:
        url = pod.url
    with pytest.raises(Stopped, match="refused"):
        react_loop(url, "k", "m", "i", str(tmp_path))


def test_the_shell(tmp_path):
    folder = tmp_path / "a 'quoted' folder"
    folder.mkdir()
    assert run_shell("pwd; cat", str(folder), 10) == f"{folder}\n"
    assert run_shell("echo out; echo err >&2; exit 3", str(folder), 10) == "out\nerr\n\n[status 3]"
    assert run_shell("echo early; sleep 100", str(folder), 0.3) == "early\n\n[stopped after 0.3 s]"
    assert run_shell("sleep 100 & echo back", str(folder), 10) == "back\n"


def test_long_output_is_clipped():
    text = clip("a" * 50 + "b" * 100 + "c" * 50, 100)
    assert text == "a" * 50 + "\n[100 characters cut]\n" + "c" * 50
    assert clip("short", 100) == "short"

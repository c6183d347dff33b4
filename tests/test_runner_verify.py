"""The verifier's word is taken only when it is one; the work folder is made safe before it is read."""

import io
import json
import os
import tarfile

import pytest
from runner_support import verifier_tar

from forge_server.runner.place import fill, put
from forge_server.runner.scrub import scrub
from forge_server.runner.verify import unpack, verdict


def say(folder, **files):
    for name, content in files.items():
        path = folder / name.replace("_", ".")
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return verdict(str(folder), 0, [])


@pytest.mark.parametrize(
    ("text", "value"), [("1", 1.0), ("0.25\n", 0.25), (" -1 ", -1.0), ("1e-3", 0.001), ("999", 999.0)]
)
def test_a_number_is_a_reward(tmp_path, text, value):
    said = say(tmp_path, reward_txt=text)
    assert (said.status, said.value) == ("ok", value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "banana",
        "nan",
        "NaN",
        "inf",
        "-inf",
        "1e9",
        "-1e9",
        "1 2",
        "0x1",
        b"\xff\xfe",
        "1" * 5000,
        "True",
        "١e99",
    ],
)
def test_nonsense_is_invalid(tmp_path, text):
    said = say(tmp_path, reward_txt=text)
    assert said.status == "invalid" and said.value is None and "reward.txt" in said.error


def test_json(tmp_path):
    said = say(tmp_path, reward_json='{"reward": 0.5, "passed": 3}')
    assert (said.status, said.value, said.detail) == ("ok", 0.5, {"reward": 0.5, "passed": 3})


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        "1",
        '{"reward": null}',
        '{"reward": "1"}',
        '{"reward": true}',
        '{"reward": NaN}',
        '{"reward": Infinity}',
        '{"reward": 1e9}',
        '{"reward": 1e999}',
        "{" * 3000,
        "[" * 4000,
        '{"reward": 1, "x": '
        + "[" * 900
        + "]" * 900
        + "}",  # some more can be parsed here, but not by the server
    ],
)
def test_nonsense_in_json_is_invalid(tmp_path, text):
    assert say(tmp_path, reward_json=text).status == "invalid"


def test_silence(tmp_path):
    """No reward: of a verifier that ended well it is invalid, of one that did not a crash."""
    assert verdict(str(tmp_path), 0, []).status == "invalid"
    said = verdict(str(tmp_path), 139, [])
    assert (said.status, said.exit_code) == ("crash", 139)


def test_a_failing_test_runner_with_a_reward_is_believed(tmp_path):
    (tmp_path / "reward.txt").write_text("0")
    assert verdict(str(tmp_path), 1, []).status == "ok"


@pytest.mark.parametrize("make", ["link", "fifo", "folder"])
def test_only_a_plain_file_is_read(tmp_path, make):
    secret = tmp_path / "secret"
    secret.write_text("1")
    logs = tmp_path / "logs"
    logs.mkdir()
    if make == "link":
        (logs / "reward.txt").symlink_to(secret)
    elif make == "fifo":
        os.mkfifo(logs / "reward.txt")
    else:
        (logs / "reward.txt").mkdir()
    assert verdict(str(logs), 0, []).status == "invalid"


def test_the_archive_is_unpacked_plainly(tmp_path):
    unpack(verifier_tar("exit 0", **{"data/a.txt": "a"}), str(tmp_path))
    assert (tmp_path / "data" / "a.txt").read_text() == "a"
    assert (tmp_path / "test.sh").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x"])
def test_an_archive_that_leads_outside_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="outside"):
        unpack(verifier_tar("exit 0", **{name: "x"}), str(tmp_path))


def test_an_archive_with_a_link_is_refused(tmp_path):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        info = tarfile.TarInfo("l")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(info)
    with pytest.raises(ValueError, match="special"):
        unpack(out.getvalue(), str(tmp_path))


def test_scrub_keeps_what_stays_inside(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_text("x")
    kept = {"a": "d/f", "b": "/workspace/d", "c": "/usr/bin/env", "e": "."}
    gone = {
        "f": "/tests/x",
        "g": "../tests",
        "h": "d/../../tests",
        "i": "/",
        "j": "/proc/self/root",
        "k": "/workspacex",
    }
    for name, target in {**kept, **gone}.items():
        (tmp_path / name).symlink_to(target)
    (tmp_path / "d" / "up").symlink_to("../d/f")
    (tmp_path / "d" / "out").symlink_to("../../logs")
    os.mkfifo(tmp_path / "d" / "fifo")
    removed = scrub(str(tmp_path), "/workspace")
    assert set(removed) == {*gone, "d/out", "d/fifo"}
    assert {p.name for p in tmp_path.iterdir()} == {*kept, "d"}


def test_a_value_is_not_filled_in_again():
    values = {"instruction": "say {agent_key} {x}", "agent_key": "secret"}
    assert fill("{instruction}|{agent_key}|{unknown}", values) == "say {agent_key} {x}|secret|{unknown}"


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "", "."])
def test_files_stay_in_their_folder(tmp_path, path):
    class Box:
        def path(self, name):
            return str(tmp_path / name)

        def give(self, path):
            pass

    (tmp_path / "home").mkdir()
    with pytest.raises(ValueError, match="leads out"):
        put(Box(), "home", path, b"", 0o644)


def test_names_that_are_no_text_can_be_told(tmp_path):
    """The runner's report is JSON in UTF-8: what an agent calls its files must not spoil it."""
    work, logs = tmp_path / "work", tmp_path / "logs"
    work.mkdir()
    logs.mkdir()
    os.symlink("/root", os.path.join(os.fsencode(work), b"\xff\xfe"))
    (logs / "reward.txt").write_text("1")
    said = verdict(str(logs), 0, scrub(str(work), "/workspace"))
    assert said.detail["removed_before_verifying"] == ["\\udcff\\udcfe"]
    json.dumps(said.detail, ensure_ascii=False).encode()

"""Settings: an empty file is valid; every mistake is one sentence that names what, where and the mend."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_server.commands.setup import TEMPLATE
from forge_server.domain.errors import ConfigError
from forge_server.domain.run import RunSettings, first_change
from forge_server.settings import Settings, find_file, load, run_tables

RUN = '[[run]]\nname = "a"\ntaskset = "t"\nharness = "react"\n'
PODS = '[scheduler]\nbackend = "kubernetes"\n'
JOBS = '[trainer]\nlauncher = "kubernetes"\n'
TRAINER = '[kubernetes]\ntrainer_image = "t"\n'


def write(folder: Path, text: str) -> Path:
    file = folder / "forge.toml"
    file.write_text(text)
    return file


def mistake(folder: Path, text: str, environ: dict[str, str] | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        load(write(folder, text), environ or {})
    found = error.value
    assert found.what and found.where and found.mend and found.exit_code == 2
    assert "\n" not in str(found)
    assert "`object`" not in str(found) and "$" not in str(found)  # words of TOML, not of a library
    return found


def test_an_empty_file_is_valid_and_says_what_no_file_says(tmp_path: Path) -> None:
    settings = load(write(tmp_path, ""), {})
    assert settings == Settings(folder=str(tmp_path))
    assert settings.data_dir == tmp_path / "forge-data"
    assert settings.store_url == f"sqlite:///{tmp_path}/forge-data/forge.db"
    assert load(None, {}).server == settings.server


def test_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    settings = load(write(tmp_path, '[server]\ndata_dir = "d"\n[engine]\nmodel = "../m"\n'), {})
    assert settings.data_dir == tmp_path / "d"
    assert settings.path(settings.engine.model) == tmp_path.parent / "m"
    assert settings.path("/abs") == Path("/abs")


def test_the_template_sets_nothing_and_holds_when_uncommented(tmp_path: Path) -> None:
    assert load(write(tmp_path, TEMPLATE), {}) == Settings(folder=str(tmp_path))
    lines = []
    for line in TEMPLATE.splitlines():
        bare = line.removeprefix("# ")
        is_setting = bare != line and ("=" in bare or bare.startswith("["))
        lines.append(bare if is_setting and not bare.startswith("FORGE") else line)
    settings = load(write(tmp_path, "\n".join(lines)), {})
    assert settings.run[0].name == "first" and settings.run[0].eval is not None
    assert settings.engine.kind == "managed"


@pytest.mark.parametrize(
    ("text", "what", "mend"),
    [
        ("[servr]\nport = 1", "unknown key 'servr'", "did you mean 'server'?"),
        ("[server]\nprot = 1", "unknown key 'prot' in [server]", "did you mean 'port'?"),
        ("[server]\nqqqq = 1", "unknown key 'qqqq' in [server]", "known keys: host, port"),
        ("zzzz = 1", "unknown key 'zzzz'", "known keys: server, store"),
        ('folder = "x"', "unknown key 'folder'", ""),
        ("server = 3", "server: expected `table`, got `int`", ""),
        ("[[server]]\nport = 1", "server: expected `table`, got `list`", ""),
        ('[server]\nport = "8400"', "server.port: expected `int`, got `text`", ""),
        ("[server]\nport = 70000", "server.port: expected `int` <= 65535", ""),
        ("[server]\nport = -1", "server.port: expected `int` >= 0", ""),
        ("[server]\nport = 1.5", "server.port: expected `int`, got `float`", ""),
        ('[server]\nlog_level = "loud"', "log_level: invalid enum", "one of: debug, info, warning, error"),
        ('[engine]\nkind = "mannaged"', "engine.kind: invalid enum", "none, attach, managed"),
        ('[engine]\nkind = "managed"', "model is empty", 'model = "FOLDER"'),
        ('[engine]\nkind = "attach"', "url is empty", "url = "),
        ('[engine]\nkind = "attach"\nurl = "host:8000"', "url is host:8000", "http://"),
        ('[engine]\nkind = "attach"\nurl = "http://h:8000/v1/"', "url is http://h:8000/v1/", "without /v1"),
        ('[engine]\nflags = "--x"', "engine.flags: expected `list`, got `text`", ""),
        ("[engine]\nflags = [1]", "engine.flags[0]: expected `text`, got `int`", ""),
        ("[engine.env]\nA = 1", "engine.env[...]: expected `text`", ""),
        ('[engine]\npolicy = ""', "engine.policy", ""),
        ("[scheduler]\nin_flight = 0", "scheduler.in_flight: expected `int` >= 1", ""),
        ("[scheduler]\nstartup_s = nan", "scheduler.startup_s", ""),
        ("[scheduler]\nstartup_s = inf", "scheduler.startup_s", ""),
        ("[scheduler]\nheartbeat_s = 0", "scheduler.heartbeat_s", ""),
        ('[scheduler]\nbackend = "docker"', "scheduler.backend", "local, kubernetes"),
        (PODS, "needs [kubernetes] runner_image", 'runner_image = "IMAGE"'),
        (PODS + '[kubernetes]\nrunner_image = "r"', "nothing tells how pods reach this server", "pod_url = "),
        ('[kubernetes]\npod_url = "https://h:1/x"', "kubernetes.pod_url", "http://HOST:PORT"),
        ("[kubernetes]\ncreate_per_s = 0", "kubernetes.create_per_s", ""),
        (JOBS, "needs [kubernetes] trainer_image", "trainer_image"),
        (JOBS + TRAINER, "nothing tells how pods reach this server", "control_url = "),
        (
            JOBS + TRAINER + 'control_url = "http://h:1"',
            "not in [kubernetes] volume_path /var/lib/forge",
            "data_dir there",
        ),
        ('[local]\nmin_sandbox = "all"', "local.min_sandbox", "none, user, namespaces"),
        ("run = 3", "run: expected `list`, got `int`", "[[run]]"),
        ('[run]\nname = "a"', "run: expected `list`, got `table`", "[[run]]"),
        ("[[run]]\n", "run[0]: table missing required field `name`", ""),
        (RUN + "nn = 4", "unknown key 'nn' in [run]", "did you mean 'n'?"),
        (RUN + "[run.eval]\nevry = 1", "unknown key 'evry' in [run.eval]", "did you mean 'every'?"),
        (RUN + "n = 1", "run[0]: n must be at least 2", ""),
        (RUN + "n = 1000000000000", "run[0]: groups * (n + oversample) must be at most 1,000,000, not 8", ""),
        (RUN + "groups = 125001", "groups * (n + oversample)", "mend the value"),
        (RUN + "oversample = 125000", "groups * (n + oversample)", ""),
        (RUN + 'kind = "eval"\nn = 1000001', "run[0]: n must be at most 1,000,000, not 1,000,001", ""),
        (RUN + 'mode = "async"\nsteps = 20000\nmax_staleness = 20000', "(max_staleness + 1) * groups", ""),
        (RUN + "steps = 2147483648", "run[0]: steps must be at most 2,147,483,647", ""),
        (RUN + "max_attempts = 2147483648", "run[0]: max_attempts must be at most", ""),
        (RUN + "[run.eval]\nk = 1000001", "run[0]: eval.k must be at most 1,000,000", ""),
        (RUN + 'kind = "test"', "run[0].kind: invalid enum", "train, eval, record"),
        (RUN + RUN, "two [[run]] tables are named 'a'", "rename"),
        (RUN.replace('"a"', '"a/b"'), "name 'a/b'", ""),
        (RUN.replace('"a"', '""'), "name ''", ""),
        (RUN.replace('"a"', f'"{"a" * 129}"'), "128", ""),
        (RUN.replace('"react"', f'"{"r" * 65}"'), "harness is longer than 64", ""),
        (RUN + "harnesses = {react = 1.0}", "exactly one of harness and harnesses", ""),
        ("[server", "not valid TOML", "mend that line"),
        ("[server]\nport = 1\nport = 2", "not valid TOML", ""),
    ],
)
def test_a_mistake_in_the_file(tmp_path: Path, text: str, what: str, mend: str) -> None:
    found = mistake(tmp_path, text)
    assert what in found.what and mend in found.mend and found.where.endswith("forge.toml")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file.*forge-server init"):
        load(tmp_path / "none.toml", {})
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path, {})
    (tmp_path / "latin.toml").write_bytes(b'[server]\nhost = "\xe9"\n')
    with pytest.raises(ConfigError, match="UTF-8"):
        load(tmp_path / "latin.toml", {})


def test_pods_are_told_an_address_that_is_not_this_machines_own(tmp_path: Path) -> None:
    runner = '[kubernetes]\nrunner_image = "r"\n'
    assert load(write(tmp_path, PODS + runner + '[server]\nhost = "10.1.2.3"'), {}).kubernetes.pod_url == ""
    assert load(write(tmp_path, PODS + runner + 'pod_url = "http://forge:8400"'), {}).scheduler.backend


# --- environment


def test_the_environment_lies_over_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, '[server]\nport = 1\nhost = "::1"\n')
    settings = load(
        file,
        {
            "FORGE_SERVER__PORT": "9000",
            "FORGE_SERVER__DATA_DIR": "12",  # text stays text
            "FORGE_ENGINE__FLAGS": '["--a", "b"]',
            "FORGE_ENGINE__ENV": '{A = "1"}',
            "FORGE_SCHEDULER__STARTUP_S": "7",
            "FORGE_SERVER__LOG_LEVEL": "debug",
            "FORGE_URL": "http://elsewhere",  # of the client
            "FORGE_CACHE": "x",
            "OTHER__KEY": "1",
        },
    )
    assert (settings.server.port, settings.server.host) == (9000, "::1")
    assert settings.server.data_dir == "12" and settings.server.log_level == "debug"
    assert settings.engine.flags == ("--a", "b") and settings.engine.env == {"A": "1"}
    assert settings.scheduler.startup_s == 7.0


@pytest.mark.parametrize(
    ("name", "value", "what", "mend"),
    [
        ("FORGE_SERVR__PORT", "1", "unknown key 'servr'", "did you mean 'server'?"),
        ("FORGE_SERVER__PROT", "1", "unknown key 'prot' in [server]", "did you mean 'port'?"),
        ("FORGE_SERVER__PORT", "many", "server.port: expected `int`", ""),
        ("FORGE_SERVER__PORT", "", "server.port: expected `int`", ""),
        ("FORGE_ENGINE__KIND", "own", "engine.kind: invalid enum", "none, attach, managed"),
        ("FORGE_RUN__NAME", "x", "runs are not set", "[[run]]"),
        ("FORGE_FOLDER__X", "x", "unknown key 'folder'", ""),
        ("FORGE___", "x", "unknown key", ""),
    ],
)
def test_a_mistake_in_the_environment_names_the_variable(
    tmp_path: Path, name: str, value: str, what: str, mend: str
) -> None:
    found = mistake(tmp_path, "[store]\n", {name: value})
    assert what in found.what and mend in found.mend and name in found.where


def test_the_environment_over_a_section_that_is_none(tmp_path: Path) -> None:
    assert "a table is expected" in mistake(tmp_path, "server = 3", {"FORGE_SERVER__PORT": "1"}).what


@given(st.text(max_size=40))
def test_any_text_in_a_variable_is_a_value_or_a_mistake(text: str) -> None:
    try:
        settings = load(None, {"FORGE_SERVER__PORT": text})
    except ConfigError as error:
        assert "FORGE_SERVER__PORT" in str(error)
    else:
        assert 0 <= settings.server.port <= 65535


@given(st.binary(max_size=60))
def test_any_bytes_are_settings_or_a_mistake(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "any.toml"
    file.write_bytes(data)
    try:
        load(file, {})
    except ConfigError as error:
        assert error.mend


# --- finding it, and files of runs


def test_the_largest_run_is_a_run_and_one_stored_before_there_was_a_limit_is_read(tmp_path: Path) -> None:
    largest = "groups = 1000\nn = 990\noversample = 10\nsteps = 2147483647\n[run.eval]\nk = 1000000\n"
    (run,) = load(write(tmp_path, RUN + largest), {}).run
    assert run.steps == 2**31 - 1
    (run,) = load(write(tmp_path, RUN + 'mode = "async"\nmax_staleness = 1000000000000\n'), {}).run
    stored = msgspec.to_builtins(run) | {"n": 10**12, "steps": 10**12}
    assert msgspec.convert(stored, RunSettings, strict=False).n == 10**12
    assert first_change(stored, run) == "n"


def test_which_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FORGE_CONFIG", raising=False)
    assert find_file(None) is None
    write(tmp_path, "")
    assert find_file(None) == Path("forge.toml")
    monkeypatch.setenv("FORGE_CONFIG", "other.toml")
    assert find_file(None) == Path("other.toml")
    assert find_file("given.toml") == Path("given.toml")


def test_tables_of_runs(tmp_path: Path) -> None:
    assert run_tables(write(tmp_path, RUN)) == [{"name": "a", "taskset": "t", "harness": "react"}]
    for text, told in (
        ("", "no [[run]] table"),
        ("[[runs]]\n", "no [[run]] table"),
        ("run = 3", "expected `list`"),
        (RUN + "nn = 1", "did you mean 'n'?"),
        (RUN + RUN, "two [[run]] tables"),
    ):
        with pytest.raises(ConfigError) as error:
            run_tables(write(tmp_path, text))
        assert told in str(error.value)

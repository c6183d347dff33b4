"""Rows of other trainers: each gives the samples back whole, keeps its target's rules, and is left out with a
reason where our own trainer would leave it out.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import sqlalchemy as sa
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_export import WINDOW, broken, record, straight
from test_trajectory_codec import rows_of
from test_trajectory_samples import SYSTEM, attempts, call

from forge_server.cli import cli
from forge_server.commands import data as command
from forge_server.domain.batches import advantages
from forge_server.domain.call import Call, VersionSpan
from forge_server.domain.sample import Sample
from forge_server.domain.states import Delivery
from forge_server.export.mappings import MAPPINGS
from forge_server.export.mappings.source import TrainedRollout
from forge_server.export.mappings.verl import padded
from forge_server.export.peers import export_peer
from forge_server.export.records import find_run
from forge_server.export.whole import ExportError
from forge_server.export.write import Format, export_run
from forge_server.store import tables as t
from forge_server.store.database import Store
from forge_server.trajectory.attempt import cut
from forge_server.trajectory.samples import cover

Row = dict[str, Any]
Canonical = tuple[list[int], list[int], list[float]]
"""Tokens, mask, logprobs of a sample."""


@st.composite
def rollouts(draw: st.DrawFn) -> TrainedRollout:
    samples = cover(draw(attempts()), draw(st.sampled_from([7, 1 << 30]))).samples
    assume(samples)
    return TrainedRollout(
        id="ro-1",
        group_id="gr-1",
        task_id="ta-1",
        harness="react",
        slot=draw(st.integers(0, 7)),
        number=draw(st.integers(0, 100)),
        group_number=draw(st.integers(0, 100)),
        reward=draw(st.floats(-2, 2)),
        advantage=draw(st.floats(-2, 2)),
        samples=samples,
    )


def whole(sample: Sample) -> Canonical:
    return sample.tokens.tolist(), sample.loss_mask.tolist(), sample.logprobs.tolist()


def split(row: Row, prompt: str, response: str, mask: str, logprobs: str) -> Canonical:
    """What is split at the first trained token; the prompt has neither mask nor logprobs."""
    none = [0] * len(row[prompt])
    assert row[mask][0] == 1
    return row[prompt] + row[response], none + row[mask], [0.0] * len(none) + row[logprobs]


def of_slime(row: Row) -> Canonical:
    at = len(row["tokens"]) - row["response_length"]
    return row["tokens"], [0] * at + row["loss_mask"], [0.0] * at + row["rollout_log_probs"]


def of_tinker(row: Row) -> Canonical:
    (chunk,) = row["model_input"]["chunks"]
    inputs = row["loss_fn_inputs"]
    assert all(tensor["shape"] == [len(tensor["data"])] for tensor in inputs.values())
    assert inputs["target_tokens"]["data"][:-1] == chunk["tokens"][1:]
    shifted = (chunk["tokens"][:1] + inputs["target_tokens"]["data"], inputs["mask"]["data"])
    return shifted[0], [0, *(int(m) for m in shifted[1])], [0.0, *inputs["logprobs"]["data"]]


BACK: dict[str, Callable[[Row], Canonical]] = {
    "verl": lambda r: split(r, "prompts", "responses", "response_mask", "rollout_log_probs"),
    "verl-v1": lambda r: split(
        r["output"], "prompt_ids", "response_ids", "response_mask", "response_logprobs"
    ),
    "prime-rl": lambda r: (r["token_ids"], [int(m) for m in r["mask"]], r["logprobs"]),
    "skyrl": lambda r: split(r, "prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs"),
    "slime": of_slime,
    "trl": lambda r: (r["input_ids"], r["completion_mask"], r["old_log_probs"]),
    "tinker": of_tinker,
    "areal": lambda r: (r["input_ids"][0], r["loss_mask"][0], r["logprobs"][0]),
}


def read(target: str, rollout: TrainedRollout) -> list[Row]:
    """The rows as a reader of the file gets them."""
    return [msgspec.json.decode(msgspec.json.encode(row)) for row in MAPPINGS[target](rollout)]


@pytest.mark.parametrize("target", MAPPINGS)
@settings(max_examples=30)
@given(rollout=rollouts())
def test_every_mapping_gives_the_samples_back(target: str, rollout: TrainedRollout) -> None:
    assert [BACK[target](row) for row in read(target, rollout)] == [whole(s) for s in rollout.samples]


@settings(max_examples=40)
@given(rollout=rollouts())
def test_advantages_per_token_are_the_rollouts_on_what_is_trained(rollout: TrainedRollout) -> None:
    for row, sample in zip(read("prime-rl", rollout), rollout.samples, strict=True):
        assert row["advantages"] == [rollout.advantage * int(m) for m in sample.loss_mask]
        assert len(row["temperatures"]) == sample.tokens.size
        assert set(row["temperatures"]) == {s.temperature for s in sample.spans if s.owned}
    for row, sample in zip(read("tinker", rollout), rollout.samples, strict=True):
        shifted = [rollout.advantage * int(m) for m in sample.loss_mask[1:]]
        assert row["loss_fn_inputs"]["advantages"]["data"] == shifted
    assert {row["advantage"] for row in read("trl", rollout)} == {rollout.advantage}


@settings(max_examples=40)
@given(rollout=rollouts())
def test_the_rows_of_a_rollout_are_known_as_one(rollout: TrainedRollout) -> None:
    last = len(rollout.samples) - 1
    skyrl = read("skyrl", rollout)
    assert [row["is_last_step"] for row in skyrl] == [i == last for i in range(last + 1)]
    assert [row["rewards"] for row in skyrl] == [0.0] * last + [rollout.reward]
    assert all(
        row["trajectory_ids"] == {"instance_id": "gr-1", "repetition_id": rollout.slot} for row in skyrl
    )
    slime = read("slime", rollout)
    assert {row["rollout_id"] for row in slime} == {rollout.number}
    assert {row["reward"] for row in slime} == {rollout.reward}
    v1 = read("verl-v1", rollout)
    assert [row["key"].rsplit("_", 2) for row in v1] == [
        ["gr-1", str(rollout.slot), str(i)] for i in range(last + 1)
    ]
    assert sum(v1[-1]["output"]["response_mask"]) > 0  # veRL reads the rollout's advantage there


@settings(max_examples=40)
@given(rollout=rollouts())
def test_versions_are_told_where_the_target_has_a_place_for_them(rollout: TrainedRollout) -> None:
    for name, sample in enumerate(rollout.samples):
        span = [sample.min_version, sample.max_version]
        row = read("verl", rollout)[name]
        assert [row["min_global_steps"], row["max_global_steps"]] == span
        assert read("trl", rollout)[name]["model_version"] == span[0]
        assert read("areal", rollout)[name]["versions"] == [sample.versions.tolist()]
        found = [int(version) for version in read("slime", rollout)[name]["weight_versions"]]
        assert [found[0], found[-1]] == span


@settings(max_examples=40)
@given(rollout=rollouts())
def test_a_padded_batch_of_verl_holds_every_row_at_its_place(rollout: TrainedRollout) -> None:
    rows = read("verl", rollout)
    tensors, others = padded(rows, pad_token_id=99)
    left = tensors["prompts"].shape[1]
    for i, row in enumerate(rows):
        begin, length = left - len(row["prompts"]), len(row["responses"])
        real = slice(begin, left + length)
        assert tensors["input_ids"][i, real].tolist() == row["prompts"] + row["responses"]
        assert tensors["attention_mask"][i].nonzero()[0].tolist() == list(range(begin, left + length))
        assert tensors["position_ids"][i, real].tolist() == list(range(left + length - begin))
        assert set(np.delete(tensors["input_ids"][i], np.r_[real])) <= {99}
        assert tensors["response_mask"][i, :length].tolist() == row["response_mask"]
        assert tensors["response_mask"][i].sum() == sum(row["response_mask"])
        scores = tensors["rm_scores"][i]
        assert scores[length - 1] == np.float32(row["reward"]) == scores.sum()
        assert tensors["advantages"][i].sum() == pytest.approx(row["advantage"] * sum(row["response_mask"]))
    assert others["uid"].tolist() == ["gr-1"] * len(rows)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_advantages_are_around_the_mean(rewards: list[float]) -> None:
    found = advantages(rewards)
    assert sum(found) == pytest.approx(0.0, abs=1e-6 * len(rewards))
    assert [b - a for a, b in pairwise(found)] == pytest.approx(
        [b - a for a, b in pairwise(rewards)], abs=1e-6
    )


# --- a run ---------------------------------------------------------------------------------------------------


def swapped() -> list[Call]:
    """A weight update to version 4 within the last answer."""
    *before, last = straight()
    spans = (VersionSpan(2, 0, 5), VersionSpan(4, 5, last.completion.size))
    return [*before, msgspec.structs.replace(last, versions=spans)]


NOT_DELIVERED = [call(0, [1], [2], delivered=Delivery.NO)]
Spec = tuple[str, float | None, list[Call]]  # outcome, reward, calls
GROUPS: dict[str, list[Spec]] = {
    "gr-1": [
        ("completed", 1.0, straight()),
        ("infra_failure", None, straight()),
        ("policy_failure", 0.25, broken()),
    ],
    "gr-2": [("completed", 1.0, straight()), ("completed", 1.0, straight())],
    "gr-3": [("completed", 1.0, straight()), ("completed", 0.0, NOT_DELIVERED)],
    "gr-4": [("completed", 1.0, straight()), ("", None, [])],
    "gr-5": [("completed", 1.0, straight()), ("completed", 0.0, swapped()), ("completed", None, straight())],
}
LEFT_OUT = Counter(
    infra_failure=1,
    equal_rewards=2,
    too_few_valid=1,
    nothing_trainable=1,
    group_incomplete=2,
    no_reward=1,
    no_group=1,
)
TRAINED = [("gr-1", 0, 0.375), ("gr-1", 2, -0.375), ("gr-5", 0, 0.5), ("gr-5", 1, -0.5)]


def fill(connection: sa.Connection) -> None:
    def put(table: sa.Table, **row: Any) -> None:
        connection.execute(sa.insert(table).values(created_at=1.0, **row))

    def rollout(id: str, group: str | None, slot: int, spec: Spec, mode: str = "train") -> None:
        outcome, reward, calls = spec
        attempt = id.replace("ro", "at")
        ended = bool(outcome)
        put(
            t.rollouts,
            id=id,
            run_id="ru-1",
            group_id=group,
            slot=slot,
            harness="react",
            mode=mode,
            state="ended" if ended else "active",
            outcome=outcome or None,
            reward=reward,
            final_attempt_id=attempt if ended else None,
        )
        state = "ended" if ended else "running"
        put(t.attempts, id=attempt, rollout_id=id, number=1, state=state, backend="local")
        record(connection, attempt, calls, int(id[3:]) * 100_000, spoil=False)

    run = {"state": "paused", "settings": {"policy": "p"}, "base_version": 0}
    put(t.runs, id="ru-1", name="first", kind="train", **run)
    put(t.runs, id="ru-2", name="second", kind="train", **run)
    put(t.policies, name="p", version=0, state="retired", path="/0")
    for step in (1, 2, 3, 4):
        put(t.policies, name="p", version=step, run_id="ru-1", step=step, state="retired", path=f"/{step}")
    put(t.tasks, id="ta-1", taskset="set", name="one", instruction="x", definition={}, digest="d")
    number = 0
    for group, members in GROUPS.items():
        put(t.groups, id=group, run_id="ru-1", task_id="ta-1", step=1, mode="train", size=len(members))
        for slot, spec in enumerate(members):
            rollout(f"ro-{number}", group, slot, spec)
            number += 1
    rollout(f"ro-{number}", None, 0, ("completed", 1.0, straight()), "record")


@pytest.fixture
async def store(tmp_path: Path) -> Any:
    opened = Store.open(f"sqlite:///{tmp_path / 'forge.db'}", create=True)
    await opened.write(fill)
    yield opened
    opened.close()


def export(store: Store, target: str, path: Path) -> list[Row]:
    run = find_run(store, "first", WINDOW)
    report = export_peer(store, run, target, path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert report.left_out == LEFT_OUT
    assert (report.rows, report.rollouts) == (len(rows), len(TRAINED))
    assert report.untrained == Counter(constrained=1, delivery_unknown=1)
    return rows


@pytest.mark.parametrize("target", MAPPINGS)
def test_a_run_gives_what_our_trainer_would_be_given(target: str, store: Store, tmp_path: Path) -> None:
    rows = export(store, target, tmp_path / "out.jsonl")
    wanted = [
        whole(sample)
        for group, slot, _ in TRAINED
        for sample in cut(rows_of(GROUPS[group][slot][2]), WINDOW).samples
    ]
    assert [BACK[target](row) for row in rows] == wanted


def test_the_baseline_is_that_of_the_trainable_rollouts(store: Store, tmp_path: Path) -> None:
    rows = export(store, "verl", tmp_path / "out.jsonl")
    found = dict.fromkeys((row["uid"], row["rollout_id"], row["advantage"]) for row in rows)
    assert [(uid, advantage) for uid, _, advantage in found] == [(g, a) for g, _, a in TRAINED]
    slime = export(store, "slime", tmp_path / "out.jsonl")
    assert [(row["group_index"], row["rollout_id"]) for row in slime] == [
        (0, 0),
        (0, 1),
        (0, 1),
        (1, 2),
        (1, 3),
    ]
    skyrl = export(store, "skyrl", tmp_path / "out.jsonl")
    assert [row["is_last_step"] for row in skyrl] == [True, False, True, True, True]


async def test_what_other_weights_sampled_in_part_is_left_out(store: Store, tmp_path: Path) -> None:
    dropped = sa.update(t.groups).where(t.groups.c.id == "gr-1").values(dropped="stale")
    await store.write(lambda connection: connection.execute(dropped) and None)
    report = export_peer(store, find_run(store, "first", WINDOW), "verl", tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {row["uid"] for row in rows} == {"gr-5"}
    assert report.left_out == LEFT_OUT - Counter(infra_failure=1) + Counter(stale=3)


OTHERS = {"run_id": "ru-2"}


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        pytest.param([(t.policies, 4, OTHERS)], {"gr-1"}, id="another run's within an answer"),
        pytest.param([(t.policies, 3, OTHERS)], {"gr-5"}, id="another run's in a call that is not trained"),
        pytest.param([(t.policies, 1, OTHERS)], set(), id="another run's in every group"),
        pytest.param([(t.runs, "ru-1", {"base_version": 1})], set(), id="older than where it started"),
        pytest.param(
            [(t.policies, 0, OTHERS | {"step": 7})], {"gr-1", "gr-5"}, id="started from another run's"
        ),
        pytest.param([(t.policies, 1, {"state": "rejected"})], {"gr-1", "gr-5"}, id="rejected later"),
        pytest.param([(t.groups, "gr-5", {"step": 2})], {"gr-1"}, id="too old"),
        pytest.param(
            [
                (t.groups, "gr-5", {"step": 4}),
                (t.runs, "ru-1", {"settings": {"policy": "p", "mode": "async", "max_staleness": 3}}),
            ],
            {"gr-1", "gr-5"},
            id="as old as async takes it",
        ),
        pytest.param(
            [(t.policies, 4, OTHERS), (t.groups, "gr-5", {"batch_k": 1})], {"gr-1", "gr-5"}, id="trained"
        ),
        pytest.param(
            [(t.policies, 4, OTHERS), (t.runs, "ru-1", {"kind": "record", "base_version": None})],
            {"gr-1", "gr-5"},
            id="recorded, whoever sampled it",
        ),
    ],
)
@pytest.mark.parametrize("state", ["paused", "cancelled"])
async def test_what_nobody_has_judged_is_judged_by_the_weights_that_sampled_it(
    store: Store, tmp_path: Path, state: str, changes: list[tuple[sa.Table, Any, Row]], left: set[str]
) -> None:
    def change(connection: sa.Connection) -> None:
        for table, key, values in [(t.runs, "ru-1", {"state": state}), *changes]:
            column = table.c.version if table is t.policies else table.c.id
            assert connection.execute(sa.update(table).where(column == key).values(values)).rowcount == 1

    await store.write(change)
    report = export_peer(store, find_run(store, "first", WINDOW), "verl", tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {row["uid"] for row in rows} == left
    assert report.left_out == LEFT_OUT + Counter(stale=2 * len({"gr-1", "gr-5"} - left))


def test_a_reward_limit_would_move_a_baseline_and_is_refused(tmp_path: Path) -> None:
    for target in MAPPINGS:
        with pytest.raises(ExportError, match="baseline"):
            command.export("first", target, str(tmp_path / "out"), 0.5, None)


def test_the_command_names_the_file_by_run_and_format(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("forge.toml").write_text(f'[store]\nurl = "sqlite:///{tmp_path / "forge.db"}"\n')
    cli.main(["export", "first", "--format", "slime"], standalone_mode=False)
    assert len(Path("first.slime.jsonl").read_text().splitlines()) == 5
    told = " ".join(capsys.readouterr().out.split())
    assert "first.slime.jsonl: 5 samples of 4 rollouts" in told and "equal_rewards=2" in told


# --- the documentation ---------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[1] / "docs" / "export.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
STAND_INS = {
    "prime_rl.transport.types": (
        "TrainingSample",
        "token_ids mask logprobs temperatures env_name advantages",
    ),
    "skyrl.train.generators.base": ("TrajectoryID", "instance_id repetition_id"),
    "trl.experimental.async_grpo.async_rollout_worker": (
        "RolloutSample",
        "prompt completion input_ids completion_mask old_log_probs advantage model_version group_id metrics",
    ),
}


def test_every_format_is_offered_and_told() -> None:
    formats = [*get_args(Format), *MAPPINGS, "tensorboard", "wandb"]
    (offered,) = [p.type for p in cli.commands["export"].params if p.name == "kind"]
    assert list(offered.choices) == formats
    assert re.findall(r"^\| `([\w-]+)` \| `RUN", PAGE, re.MULTILINE) == formats
    assert len(EXAMPLES) == 3 + len(MAPPINGS)


def example(name: str) -> str:
    (found,) = [text for text in EXAMPLES if f'"{name}"' in text]
    return str(found)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules with the peers' classes by the fields that their source has; the real ones are heavy."""
    slime = ModuleType("slime.utils.types")
    fields = "group_index index rollout_id tokens response_length loss_mask rollout_log_probs reward"
    sample = msgspec.defstruct("Sample", [*fields.split(), "weight_versions", "status", "metadata"])
    slime.Sample = type("Sample", (), {"from_dict": staticmethod(lambda d: sample(**d))})  # type: ignore[attr-defined]
    modules = {"slime.utils.types": slime}
    for name, (kind, fields) in STAND_INS.items():
        modules[name] = ModuleType(name)
        setattr(modules[name], kind, msgspec.defstruct(kind, fields.split()))
    tinker = modules["tinker"] = ModuleType("tinker")
    for kind, fields in (
        ("Datum", "model_input loss_fn_inputs"),
        ("ModelInput", "chunks"),
        ("TensorData", "data dtype shape"),
    ):
        setattr(tinker, kind, msgspec.defstruct(kind, fields.split()))
    for name, module in modules.items():
        parts = name.split(".")
        for depth in range(1, len(parts)):
            parent = ".".join(parts[:depth])
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        monkeypatch.setitem(sys.modules, name, module)
    yield


def test_the_examples_of_the_page_read_what_is_written(
    store: Store, tmp_path: Path, stand_ins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = find_run(store, "first", WINDOW)
    for form in ("parquet", "arrow", "jsonl"):
        report = export_run(store, run, form, Path(f"first.{form}"))
        names: dict[str, Any] = {}
        exec(example(f"first.{form}"), names)
        rows = names["rows"] if form == "jsonl" else names["table"].to_pylist()
        assert len(rows) == report.rows == 11
        assert rows[0]["tokens"] == straight()[-1].prompt.tolist() + straight()[-1].completion.tolist()
    for target, name in (
        ("prime-rl", "samples"),
        ("slime", "samples"),
        ("trl", "samples"),
        ("tinker", "data"),
        ("skyrl", "output"),
    ):
        rows = export(store, target, Path(f"first.{target}.jsonl"))
        names = {}
        exec(example(f"first.{target}.jsonl"), names)
        made = names[name]
        if target == "skyrl":
            assert made["response_ids"] == [row["response_ids"] for row in rows]
            assert made["trajectory_ids"][0].instance_id == "gr-1"
        else:
            assert len(made) == len(rows) == 5
        if target == "tinker":
            assert "mask" not in made[0].loss_fn_inputs
            assert made[0].model_input.chunks[0]["tokens"][: len(SYSTEM)] == SYSTEM

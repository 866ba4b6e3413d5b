"""Which stages have to run."""

import json
import os
import shutil
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from typing import ClassVar

import pytest

from instruments.errors import ConfigError, DataError
from instruments.files import hash_code
from models.source import EMBEDDED
from pipeline.artifacts import FileHashes, open_staging, publish
from pipeline.check import validate
from pipeline.help import REPOSITORY
from pipeline.plan import (
    STALE,
    check_sources,
    describe_change,
    make_plan,
    plain_settings,
    published_recipe,
    select_stages,
)
from pipeline.run import SOURCE_PACKAGES, agree_on_plan, require_parents, run_pipeline
from pipeline.settings import CHAIN, STAGES, asked_stages, compose, with_ancestors
from stages.artifacts.job import Table, Workers
from stages.text.config import list_sources

ON_REQUEST = {"train", "layers", "dump", "diagnose"}
ALL = set(STAGES) - ON_REQUEST


@cache
def composed(*words):
    return compose([*words, "output_dir=outputs"])[0]


@pytest.fixture
def steps(tmp_path):
    """Function that plans a command line; returns the steps by stage."""

    def plan(*words):
        settings = replace(deepcopy(composed(*words)), output_dir=str(tmp_path))
        return {step.stage.name: step for step in make_plan(validate(settings))}

    return plan


def pretend_published(step, tensors="x"):
    with open_staging(step.folder, fresh=True) as staging:
        (staging.out / "result.safetensors").write_text(tensors)
        (staging.out / "picture").write_text("y")
        publish(staging, fingerprint=step.fingerprint, recipe=published_recipe(step), table=Table("", (), ()))


def reasons(steps):
    return {name: step.reason for name, step in steps.items()}


def due(steps):
    return {name for name, step in steps.items() if step.due}


@pytest.mark.parametrize(
    ("asked", "complete", "used", "due"),
    [
        (ALL, set(), ALL, ALL),
        (ALL, ALL, ALL, set()),
        (ALL, ALL - {"score"}, ALL, {"score"}),
        ({"extract"}, set(), {"scan", "score", "cluster", "extract"}, {"scan", "score", "cluster", "extract"}),
        ({"extract"}, {"scan", "score"}, {"scan", "score", "cluster", "extract"}, {"cluster", "extract"}),
        ({"extract"}, {"score", "cluster"}, {"cluster", "extract"}, {"extract"}),
        ({"extract"}, {"extract"}, {"extract"}, set()),
    ],
)
def test_due_are_asked_stages_and_what_those_lack(asked, complete, used, due):
    assert select_stages(asked, complete) == (used, due)


def test_a_stage_is_planned_with_its_ancestors():
    assert [stage.name for stage in with_ancestors("extract")] == ["scan", "score", "cluster", "extract"]
    assert asked_stages("all") == tuple(stage for stage in CHAIN if stage.name not in ON_REQUEST)


def test_a_device_that_is_not_here_is_refused_before_anything_starts(steps, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ConfigError) as caught:
        steps("stage=scan", "model.device=cuda:7")
    assert "cuda:7" in caught.value.what
    assert caught.value.where == "model.device"
    pretend_published(steps("stage=scan", "model.device=cuda:1")["scan"])
    assert not due(steps("stage=scan", "model.device=cuda:1"))


def test_the_number_format_is_in_the_fingerprint_and_the_number_of_the_gpu_is_not(steps, monkeypatch):
    def planned(*words):
        return addresses(steps, "evaluate.checkpoint=train", *words)

    own = "bfloat16"  # of the embedded model
    host = planned()
    assert host == planned("model.device=cpu") == planned("model.dtype=float32") != planned("model.dtype=bfloat16")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    gpu = planned()
    assert not set(host.values()) & set(gpu.values())
    assert gpu == planned("model.device=cuda") == planned("model.device=cuda:1") == planned(f"model.dtype={own}")
    assert planned("model.device=cpu") == host
    stage = steps("stage=scan", "model.device=cuda:1")["scan"]
    assert stage.recipe["settings"]["model"] | {"device": "cuda", "dtype": own} == stage.recipe["settings"]["model"]
    assert (stage.inputs["model"].device, stage.inputs["model"].dtype) == ("cuda:1", "auto")


def test_rounded_products_are_in_the_fingerprint_where_the_cpu_has_them(steps, monkeypatch):
    def planned(*words):
        return steps("stage=scan", "model.device=cpu", *words)["scan"].fingerprint

    exact = planned()
    assert exact == planned("model.rounded_products=false")
    monkeypatch.setattr("pipeline.plan.has_amx", lambda: True)
    assert planned() != exact == planned("model.rounded_products=false")


def test_files_are_known_by_their_content_wherever_they_are(steps, tmp_path, monkeypatch):
    (tmp_path / "text").mkdir()
    for name in ("text/a.txt", "b.txt"):
        (tmp_path / name).write_text(f"one {name}\n")
    shutil.copytree(tmp_path / "text", tmp_path / "copy")
    shutil.copytree(EMBEDDED, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    models = [str(EMBEDDED), f"{EMBEDDED}/", os.path.relpath(EMBEDDED), str(tmp_path / "model")]
    spelled = [f"{tmp_path}/text", "text", "text/../text/", "'~/text'", "copy"]
    words = "data=text", "data.heldout_path=b.txt"
    prints = {steps(*words, f"data.path={path}")["score"].fingerprint for path in spelled}
    words = "model=local", "model.label=own", "data=python_stdlib"
    prints_of_model = {steps(*words, f"model.path={path}")["score"].fingerprint for path in models}
    assert (len(prints), len(prints_of_model)) == (1, 1)


def test_training_is_planned_where_it_is_asked_for_or_evaluated(steps):
    assert list(steps("stage=train")) == ["scan", "score", "cluster", "extract", "assemble", "project", "train"]
    assert "train" not in steps() | steps("stage=evaluate")
    whole = steps("evaluate.checkpoint=train")
    assert whole.keys() == set(STAGES) - {"layers", "dump", "diagnose"}
    assert tuple(whole["evaluate"].parents) == ("scan", "cluster", "assemble", "project", "train")
    assert steps("stage=evaluate", "evaluate.checkpoint=train").keys() == whole.keys()


def test_several_processes_do_not_measure_layers(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.run.find_workers", lambda: Workers(1, 3))
    settings = replace(deepcopy(composed("dense_layers=auto")), output_dir=str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        run_pipeline(settings, tmp_path / "run", ["dense_layers=auto"])
    assert caught.value.where == "setting dense_layers=auto"
    assert caught.value.do.endswith("python -m pipeline dense_layers=auto stage=layers")


def test_another_shape_keeps_scan_and_score(steps):
    assert reasons(steps("stage=cluster")) == dict.fromkeys(("scan", "score", "cluster"), "no result yet")
    for step in steps("stage=cluster").values():
        pretend_published(step)
    other = steps("experts=8", "n=32")
    assert due(other) == ALL - {"scan", "score"}
    kept = {"scan": "", "score": "", "cluster": "changed always_on, experts, n"}
    assert reasons(other) == dict.fromkeys(ALL, "no result yet") | kept


def test_what_changed_is_named(steps, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("one\n\ntwo")
    words = "stage=score", "data=text", f"data.path={text}"
    for step in steps(*words).values():
        pretend_published(step)
    after = "another result of a stage before it"
    assert reasons(steps(*words, "data.max_length=99")) == {"scan": "changed data.max_length", "score": after}
    text.write_text("one\n\nthree")
    assert reasons(steps(*words, "seed=1"))["scan"] == "changed the text, seed"
    other = replace(steps(*words)["scan"], recipe=steps(*words)["scan"].recipe | {"version": 99})
    assert describe_change(other) == "changed the text, the program"
    pretend_published(replace(other, folder=other.folder.with_name("other")))
    assert describe_change(replace(other, recipe=other.recipe | {"version": 98})) == "changed the program"
    for manifest in tmp_path.glob("artifacts/*/scan/*/manifest.json"):
        manifest.write_text("[]")
    assert describe_change(other) == "changed its results, which cannot be read"


def test_what_was_computed_from_other_tensors_is_computed_again(steps):
    for step in steps().values():
        pretend_published(step)
    pretend_published(steps()["score"])
    assert due(steps()) == set()  # the same tensors
    pretend_published(steps()["score"], "those of another device")
    again = steps()
    assert due(again) == ALL - {"scan", "score"}
    assert not any(step.fresh for step in again.values())  # a killed run of these goes on
    assert reasons(again) == {"scan": "", "score": ""} | dict.fromkeys(due(again), STALE)
    assert due(steps("stage=score")) == set()


def test_fresh_means_the_asked_stage(steps):
    for step in steps().values():
        pretend_published(step)
    assert due(steps()) == set()
    assert due(steps("fresh=true")) == ALL
    assert set(reasons(steps("fresh=true")).values()) == {"fresh=true"}
    again = steps("stage=cluster", "fresh=true")
    assert again.keys() == {"scan", "score", "cluster"}
    assert {name for name, step in again.items() if step.fresh} == due(again) == {"cluster"}


@pytest.mark.parametrize(
    "word",
    [
        *("store.checkpoint_every=1", "model.label=other", "model.experts=8", "output_dir=elsewhere", "top_k=4"),
        *("data.path=elsewhere", "data.temperature=1", "scan.block_width=32"),
    ],
)
def test_what_changes_no_result_changes_no_fingerprint(steps, word):
    words = [word, "experts=16"]
    assert {step.fingerprint for step in steps("experts=16").values()} == {
        step.fingerprint for step in steps(*words).values()
    }


@pytest.mark.parametrize(
    ("word", "unchanged"),
    [
        ("seed=1", set()),
        ("data.tokens=1000", set()),
        ("data.tokens=70000", {"scan", "score", "cluster", "extract", "assemble"}),  # these read the first tokens only
        ("data.sample_tokens=1000", set()),
        ("score=taylor", {"scan"}),
        ("cluster=rank", {"scan", "score"}),
        ("assemble=random", {"scan", "score", "cluster", "extract"}),
        ("project=none", {"scan", "score", "cluster", "extract", "assemble"}),
        ("evaluate.speed_tokens=0", ALL - {"evaluate"}),
        ("data.heldout_tokens=1000", ALL - {"evaluate"}),
        ("data.heldout_share=0.2", set()),
    ],
)
def test_a_setting_reaches_its_stage_and_all_below(steps, word, unchanged):
    before, after = addresses(steps), addresses(steps, word)
    assert {name for name in ALL if before[name] == after.get(name)} == unchanged


def test_other_heldout_text_carves_again_only_if_it_excludes_documents(steps, tmp_path):
    def addressed(*heldout):
        (tmp_path / "heldout.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in heldout))
        words = ("stage=evaluate", "evaluate.checkpoint=train", "data=text", f"data.path={tmp_path / 'text.jsonl'}")
        return addresses(steps, *words, f"data.heldout_path={tmp_path / 'heldout.jsonl'}")

    texts = ["one", "two", "three", *map(str, range(20))]  # some are held out
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    before, after, excluding = addressed("four"), addressed("five", "six"), addressed("two", "six")
    words = ("stage=evaluate", "evaluate.checkpoint=train", "data=text", f"data.path={tmp_path / 'text.jsonl'}")
    own = addresses(steps, *words, "data.heldout_share=0.1")
    assert {name for name in before if before[name] != own[name]} == {"evaluate"}
    more = addresses(steps, *words, "data.heldout_tokens=1000")
    assert {name for name, address in addresses(steps, *words).items() if more[name] != address} == {"evaluate"}
    assert {name for name in before if before[name] != after[name]} == {"evaluate"}
    assert {name for name in before if before[name] == excluding[name]} == set()


def test_text_to_train_on_changes_the_training_alone(steps, tmp_path):
    def planned(*words):
        return addresses(steps, "stage=evaluate", "evaluate.checkpoint=train", *words)

    own = f"train.sources=[{{path:{tmp_path / 'own.jsonl'},share:0.5}},{{python_stdlib:true,share:0.5}}]"
    found = [planned()]
    for text in ("one", "two"):
        (tmp_path / "own.jsonl").write_text(json.dumps({"text": f"{text} of many"}) + "\n")
        found += [planned(own), planned(own.replace("true,", "true,packing:single,"))]
    for name in found[0]:
        prints = {plan[name] for plan in found}
        assert len(prints) == (5 if name in {"train", "evaluate"} else 1), name
    given = steps("stage=train", own)["train"]
    (tmp_path / "own.jsonl").write_text(json.dumps({"text": "three of many"}) + "\n")
    with pytest.raises(DataError, match="changed during this run"):
        check_sources(given, FileHashes(tmp_path), done=False)


def addresses(steps, *words):
    return {name: step.fingerprint for name, step in steps(*words).items()}


S_P_SETTINGS = ("score.activation_weight=3", "score.gradient_weight=5", "score.frequency_weight=2")


@pytest.mark.parametrize(
    ("given", "unread"),
    [
        (["score=contribution"], S_P_SETTINGS),
        (["assemble=random"], ["assemble.router_steps=9", "assemble.balance=1", "assemble.ridge_penalty=9"]),
        (["project.gradient_projection=false"], ["project.alpha=9", "project.beta=9"]),
        (["project.rounds=0"], ["project.router_steps=9", "project.refit_tokens=9"]),
    ],
)
def test_what_a_method_does_not_read_recomputes_nothing(steps, given, unread):
    before = addresses(steps, *given)
    for word in unread:
        after = addresses(steps, *given, word)
        assert {name: after[name] for name in before if name != "score"} == {
            name: before[name] for name in before if name != "score"
        }, word


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ([], ["score=random", "score.gradient_weight=5", "score.activation_weight=5"]),
        (["always_on=0", "experts=15", "n=64"], ["score=random"]),
        (["always_on=0", "experts=16", "n=64", "cluster=rank"], ["score=random"]),
        (["topology=global_pool", "always_on=8"], ["score=random"]),
    ],
)
def test_what_a_method_reads_makes_another_partition(steps, given, read):
    before = addresses(steps, *given)["cluster"]
    found = [addresses(steps, *given, word)["cluster"] for word in read]
    assert before not in found
    assert len({*found}) == len(found)


def test_a_hub_that_does_not_answer_stops_a_run_only_where_text_is_still_to_be_read(steps, monkeypatch):
    words = ("stage=scan", "data=wikitext2")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    pretend_published(steps(*words)["scan"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert due(steps(*words)) == set()
    with pytest.raises(DataError) as caught:
        steps(*words, "fresh=true")
    assert "http://127.0.0.1:9" in caught.value.what
    assert caught.value.where.startswith("data.name=Salesforce/wikitext")


def test_every_stage_of_a_run_reads_the_commit_that_was_planned(steps, tmp_path, monkeypatch):
    """A branch of the hub may move during the run."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for name, commit in (("models--o--n", "a" * 40), ("datasets--o--t", "c" * 40)):
        folder = tmp_path / "hub" / name
        shutil.copytree(EMBEDDED, folder / "snapshots" / commit)
        (folder / "refs").mkdir()
        (folder / "refs/main").write_text(commit)
    words = "model=hub", "model.name=o/n", "model.label=n"
    (template := tmp_path / "template.jinja").write_text("{{ messages }}")
    texts = {
        "data.kind=hub": ["data.name=o/t"],
        "data=hub": ["data.name=o/t", f"data.chat_template={template}"],
        "data.kind=mixture": ["data.sources=[{name:o/t,share:0.5},{python_stdlib:true,share:0.5}]"],
    }
    for kind, more in texts.items():
        planned = steps(*words, kind, *more)
        assert {step.inputs["model"].revision for step in planned.values() if "model" in step.inputs} == {"a" * 40}
        for data in (step.inputs["data"] for step in planned.values() if "data" in step.inputs):
            assert list_sources(data, "calibration")[0].revision == "c" * 40
        assert planned["scan"].recipe["settings"]["model"]["revision"] is None
    own = steps(*words, "stage=train", "train.sources=[{name:o/t}]")["train"]
    assert own.inputs["train"].sources[0].revision == "c" * 40


class Pair(Workers):
    """Two workers; the other one planned `theirs` and runs `code`."""

    theirs: ClassVar[list] = []
    code: ClassVar[str | None] = None  # None: the same code as here

    def gather(self, value):
        return [value, (self.code or value[0], self.theirs)]


def test_workers_that_were_started_with_other_settings_are_refused(steps, monkeypatch):
    ours, theirs = list(steps().values()), list(steps("cluster.sample_tokens=99").values())
    pair = Pair(0, 2, 0)
    monkeypatch.setattr(Pair, "theirs", [(step.stage.name, step.fingerprint, False) for step in ours])
    assert agree_on_plan(ours, pair) == ours  # the leading worker's `due` counts
    monkeypatch.setattr(Pair, "theirs", [(step.stage.name, step.fingerprint, True) for step in theirs])
    with pytest.raises(ConfigError) as caught:
        agree_on_plan(ours, pair)
    assert caught.value.where == "stages cluster, extract, assemble, project, evaluate"


def test_workers_of_another_commit_are_refused(steps, monkeypatch, tmp_path):
    ours = list(steps().values())
    monkeypatch.setattr(Pair, "theirs", [(step.stage.name, step.fingerprint, step.due) for step in ours])
    for name in SOURCE_PACKAGES:
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    same = hash_code(tmp_path, SOURCE_PACKAGES)
    assert same == hash_code(REPOSITORY, SOURCE_PACKAGES)
    (tmp_path / "pipeline" / "run.py").write_text("# another run\n")
    other = hash_code(tmp_path, SOURCE_PACKAGES)
    monkeypatch.setattr(Pair, "code", other)
    with pytest.raises(ConfigError, match="workers 0 and 1 run different code"):
        agree_on_plan(ours, Pair(0, 2, 0))


def test_a_worker_that_does_not_see_the_published_results_says_so(steps):
    project = steps("stage=project")["project"]
    with pytest.raises(ConfigError) as caught:
        require_parents(project, Workers(1, 2, 1))
    assert all(str(folder) in caught.value.where for folder in project.parents.values())
    for name in project.parents:
        pretend_published(steps("stage=project")[name])
    require_parents(project, Workers(1, 2, 1))


@dataclass
class Inner:
    batch: int = 2


@dataclass
class Outer:
    tokens: int = 3
    label: str = field(default="here", metadata={"fingerprint": False})
    inner: Inner = field(default_factory=Inner)


@dataclass
class Optional:
    tokens: int = 3
    kept: int = field(default=1, metadata={"needs": {"tokens": True}})


def test_settings_without_effect_stay_out():
    assert plain_settings(Outer(tokens=0, inner=Inner(5))) == {"tokens": 0, "inner": {"batch": 5}}
    assert "kept" not in plain_settings(Optional(tokens=0))
    assert plain_settings(Optional(tokens=3)) == {"tokens": 3, "kept": 1}

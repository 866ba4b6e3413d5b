"""Which stages have to run."""

import pytest

from models.errors import DataError
from pipeline.composition import compose
from pipeline.plan import make_plan, select_stages
from pipeline.publish import open_workshop, publish
from pipeline.schema import register_schema
from pipeline.stages_table import CHAIN, STAGES, asked_stages, with_ancestors
from pipeline.validation import validate
from stages.contracts.job import Table

ON_REQUEST = {"train", "dump", "diagnose"}
ALL = set(STAGES) - ON_REQUEST


@pytest.fixture
def steps(tmp_path):
    """Plan a command line; gives the steps by stage."""
    register_schema()

    def plan(*words):
        settings, _folder = compose([*words, f"output_dir={tmp_path}"])
        return {step.stage.name: step for step in make_plan(validate(settings))}

    return plan


def pretend_published(step):
    with open_workshop(step.folder, fresh=False) as workshop:
        (workshop.out / "result").write_text("x")
        publish(workshop, fingerprint=step.fingerprint, recipe=step.recipe, table=Table("", (), ()))


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
        ({"extract"}, {"score", "cluster"}, {"score", "cluster", "extract"}, {"extract"}),
        ({"extract"}, {"extract"}, {"extract"}, set()),
    ],
)
def test_due_are_asked_stages_and_what_those_lack(asked, complete, used, due):
    assert select_stages(asked, complete) == (used, due)


def test_parents_come_before_their_children():
    seen = set()
    for stage in CHAIN:
        assert set(stage.parents) <= seen
        seen.add(stage.name)


def test_a_stage_is_planned_with_its_ancestors():
    assert [stage.name for stage in with_ancestors(asked_stages("extract"))] == ["scan", "score", "cluster", "extract"]
    assert asked_stages("all") == tuple(stage for stage in CHAIN if stage.name not in ON_REQUEST)


def test_training_is_planned_where_it_is_asked_for_or_evaluated(steps):
    assert list(steps("stage=train")) == ["scan", "score", "cluster", "extract", "assemble", "project", "train"]
    assert "train" not in steps() | steps("stage=evaluate")
    whole = steps("evaluate.checkpoint=train")
    assert whole.keys() == set(STAGES) - {"dump", "diagnose"}
    assert tuple(whole["evaluate"].parents) == ("scan", "cluster", "assemble", "project", "train")
    assert steps("stage=evaluate", "evaluate.checkpoint=train").keys() == whole.keys()


def test_every_node_of_a_stage_is_handed_to_it(steps):
    for name, step in steps().items():
        assert tuple(step.inputs) == STAGES[name].nodes
        assert tuple(step.parents) == STAGES[name].parents
        assert step.folder.name == step.fingerprint[:16]


def test_another_shape_keeps_scan_and_score(steps):
    for step in steps("stage=score").values():
        pretend_published(step)
    assert due(steps("experts=8", "n=32")) == ALL - {"scan", "score"}


def test_fresh_means_the_asked_stage(steps):
    for step in steps().values():
        pretend_published(step)
    assert due(steps()) == set()
    assert due(steps("fresh=true")) == ALL
    again = steps("stage=cluster", "fresh=true")
    assert again.keys() == {"scan", "score", "cluster"}
    assert {name for name, step in again.items() if step.fresh} == due(again) == {"cluster"}


@pytest.mark.parametrize(
    "word", ["store.checkpoint_every=1", "model.label=other", "model.experts=8", "output_dir=elsewhere", "top_k=4"]
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
        ("score=taylor", {"scan"}),
        ("cluster=rank", {"scan", "score"}),
        ("assemble=centroid", {"scan", "score", "cluster", "extract"}),
        ("project=none", {"scan", "score", "cluster", "extract", "assemble"}),
        ("evaluate.speed_tokens=0", ALL - {"evaluate"}),
        ("data.heldout_tokens=1000", ALL - {"evaluate"}),
        ("data.heldout_share=0.2", set()),
    ],
)
def test_a_setting_reaches_its_stage_and_all_below(steps, word, unchanged):
    before, after = steps(), steps(word)
    assert {name for name in ALL if before[name].fingerprint == after[name].fingerprint} == unchanged


def test_random_tokens_decide_a_carve_and_no_pool(steps):
    def addresses(*words):
        return {name: step.fingerprint for name, step in steps(*words).items()}

    carve, without = addresses(), addresses("vocabulary=none")
    assert {name for name in carve if carve[name] != without[name]} == ALL - {"scan", "score"}
    pool = "topology=global_pool"
    assert addresses(pool) == addresses(pool, "vocabulary=none") == addresses(pool, "vocabulary.layers=2")
    assert steps(pool)["cluster"].inputs["vocabulary"].tokens == 0


def test_a_hub_that_does_not_answer_stops_a_run_only_where_text_is_still_to_be_read(steps, monkeypatch):
    words = ("stage=scan", "data=wikitext2")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    pretend_published(steps(*words)["scan"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert due(steps(*words)) == set()
    with pytest.raises(DataError) as caught:
        steps(*words, "fresh=true")
    assert str(caught.value) == (
        "the hub cannot be reached at http://127.0.0.1:9, and the dataset is streamed from it\n"
        "  where: data.name=Salesforce/wikitext, data.subset=wikitext-2-raw-v1, data.revision=None\n"
        "  do:    connect once, or HF_ENDPOINT=https://<mirror> before the command, "
        "or data=python_stdlib, or data=text data.path=<your files>"
    )

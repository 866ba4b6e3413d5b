"""Settings that contradict each other, the source model or the way the command was started."""

from dataclasses import fields

import pytest

from models.config import MoEShape
from pipeline.consistency import find_unread, warn_of_other_stages
from pipeline.settings import Settings, compose, register_schema
from pipeline.validate import find_errors
from stages.calibration.config import ROUTERS


@pytest.fixture
def texts(tmp_path):
    """Function that returns the errors of a command line; the embedded model has 4 layers."""
    register_schema()

    def find(*words, **more):
        settings, _folder = compose([*words, f"output_dir={tmp_path}"])
        return [str(error) for error in find_errors(settings, **more)]

    return find


@pytest.fixture
def torchrun(monkeypatch):
    """The environment of the second of three workers under torchrun."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)


TAYLOR = (
    "score.method=taylor needs gradients, and scan.gradients=false computes none\n"
    "  where: settings score.method and scan.gradients\n"
    "  do:    scan.gradients=true, or score.method=contribution"
)
NO_LAYER = "no layer 4, -5: the model has 4\n  where: setting cluster.map_layers\n  do:    cluster.map_layers=[]"
TOO_LONG = (
    "data.max_length=1025 is longer than the model's longest sequence, 1024 tokens\n"
    "  where: setting data.max_length; max_position_embeddings of the model's config.json\n"
    "  do:    data.max_length=1024"
)


@pytest.mark.parametrize("stage", ["score", "assemble", "all"])
def test_taylor_scores_need_a_scan_with_gradients(texts, stage):
    assert texts(f"stage={stage}", "score=taylor", "scan=forward_only") == [TAYLOR]
    assert texts(f"stage={stage}", "score=taylor") == []
    assert texts(f"stage={stage}", "scan=forward_only") == []


@pytest.mark.parametrize("form", ["weighted", "product", "inverse_gradient"])
def test_a_score_of_nothing_is_refused(texts, form):
    nothing = [f"score.{term}_weight=0" for term in ("activation", "frequency", "gradient")]
    assert texts(*nothing, f"score.form={form}") == [
        "score.method=s_p ranks by nothing: the weights of all three terms are 0\n"
        "  where: settings score.activation_weight, score.gradient_weight and score.frequency_weight\n"
        "  do:    score.activation_weight=1"
    ]
    assert texts(*nothing, "score=wanda") == texts(*nothing, "stage=scan") == []
    assert texts(*nothing[:2], "score.gradient_weight=1") == []
    assert texts(*nothing[:2], "score.gradient_weight=1", "scan=forward_only") == [
        "score.gradient_weight alone needs gradients, and scan.gradients=false computes none\n"
        "  where: settings score.method and scan.gradients\n"
        "  do:    scan.gradients=true, or score.method=contribution"
    ]


def test_an_inverse_gradient_of_nothing_is_refused(texts):
    """Its numerator holds activation and frequency only: all neurons would have the score 0."""
    form = ["score.form=inverse_gradient", "score.activation_weight=0"]
    assert texts(*form, "score.frequency_weight=0") == [
        "score.form=inverse_gradient ranks by nothing: it divides activation and frequency, whose weights are 0\n"
        "  where: settings score.form, score.activation_weight and score.frequency_weight\n"
        "  do:    score.form=weighted, or score.activation_weight=1"
    ]
    assert texts(*form) == []


ALIGNED = "cluster.always_on_by=alignment"


def test_a_score_that_decides_nothing_is_said(texts, caplog):
    assert texts(ALIGNED, "score=random") == texts("always_on=0", "n=64", "score=taylor") == []
    assert texts("score=random", "score.gradient_weight=5") == []
    assert caplog.messages == [
        "score.method=random is ignored: cluster.always_on_by=alignment",
        "score.method=taylor is ignored: no neuron is always on or dropped",
        "score.gradient_weight=5.0 is ignored: score.method=random",
    ]
    caplog.clear()
    assert texts(ALIGNED, "score=random", "stage=score") == texts(ALIGNED) == texts("score=random") == []
    assert texts(POOL, "always_on=8", ALIGNED, "score=random") == []
    assert caplog.messages == []


def test_settings_of_text_that_is_not_read_so(texts, caplog):
    assert texts("data.path=my_texts", "data.max_new_tokens=9") == []
    assert caplog.messages == [
        "data.path=my_texts is ignored: data.kind=python_stdlib",
        "data.max_new_tokens=9 is ignored: data.labels=full_sequence",
    ]


@pytest.mark.parametrize(
    ("words", "kind", "names"),
    [
        ([], "python_stdlib", ("split", "text_column", "messages_column", "sources")),
        (["data=text", "data.path=x.txt"], "text", ("split", "sources")),
        (["data=hub", "data.name=a/b"], "hub", ("sources",)),
    ],
)
def test_columns_and_parts_of_another_kind_of_text_are_ignored(words, kind, names, texts, caplog):
    values = {name: "x" for name in names} | {"sources": "[{path:x}]"}
    texts(*words, *(f"data.{name}={values[name]}" for name in names))
    said = {message.partition("=")[0] for message in caplog.messages if message.endswith(f": data.kind={kind}")}
    assert said == {f"data.{name}" for name in names}


def test_a_held_out_share_beside_held_out_text_is_said(texts, caplog, tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"text {name}")
    words = ["data=text", f"data.path={tmp_path}/a.txt", f"data.heldout_path={tmp_path}/b.txt"]
    assert texts(*words, "data.heldout_share=0.3", "stage=scan") == texts(*words, "stage=scan") == []
    assert caplog.messages == [f"data.heldout_share=0.3 is ignored: data.heldout_path={tmp_path}/b.txt"]


def test_settings_of_a_source_that_are_not_read(texts, caplog, tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(f"text {name}")
    first = f"{{path:{tmp_path}/a.txt,share:0.4,split:books,heldout_split:x,heldout_share:0.3}}"
    words = ["data=mixture", f"data.sources=[{first},{{path:{tmp_path}/b.txt,share:0.6}}]", "stage=scan"]
    ignored = [f"data.sources.0.{name} is ignored: the source is a path" for name in ("split=books", "heldout_split=x")]
    texts(*words)
    assert caplog.messages == ignored
    caplog.clear()
    named = f"data.heldout_path={tmp_path}/c.txt"
    texts(*words, named)
    assert caplog.messages == [*ignored, f"data.sources.0.heldout_share=0.3 is ignored: {named}"]


def test_baselines_that_a_pool_lacks(texts, caplog):
    pool = ["topology=global_pool", "evaluate.baselines=[oracle_aligned,unaligned,static_mask]"]
    assert texts(*pool) == []
    assert caplog.messages == ["evaluate.baselines=[oracle_aligned,static_mask] is ignored: topology=global_pool"]
    caplog.clear()
    assert texts(pool[0]) == texts(pool[1]) == texts(*pool, "stage=project") == []
    assert caplog.messages == []


def test_a_check_chooses_its_own_number_formats(texts, caplog):
    assert texts("stage=diagnose", "model.dtype=float16") == []
    assert caplog.messages == ["model.dtype=float16 is ignored: each check chooses the number formats"]


@pytest.mark.parametrize(
    ("stage", "words", "said"),
    [
        ("all", "train=distil train.tokens=9", "train=distil train.tokens=9 is ignored: stage=all does not run train"),
        ("all", "check=watch experts=4", "check=watch is ignored: stage=all does not run diagnose"),
        ("scan", "dump.steps=2", "dump.steps=2 is ignored: stage=scan does not run dump"),
        ("all", "train=distil evaluate.checkpoint=train", None),
        ("diagnose", "check=watch diagnose.tokens=9 diagnose.watch.steps=3", None),
        ("diagnose", "diagnose.watch.steps=3", "diagnose.watch.steps=3 is ignored: check=auto_diff"),
        ("diagnose", "check=static_check diagnose.tokens=9", "diagnose.tokens=9 is ignored: check=static_check"),
        (
            "diagnose",
            "check=analyze_tensor diagnose.analyze_tensor.file=x.pt diagnose.checkpoint=y",
            "diagnose.checkpoint=y is ignored: diagnose.analyze_tensor.file=x.pt",
        ),
        (
            "diagnose",
            "check=analyze_tensor diagnose.analyze_tensor.tensors=[x]",
            "diagnose.analyze_tensor.tensors=[x] is ignored: diagnose.analyze_tensor.file=null",
        ),
        ("diagnose", "check=analyze_tensor diagnose.analyze_tensor.modules=[x] diagnose.tokens=9", None),
        ("scan", "project.alpha=0.5", None),
    ],
)
def test_settings_of_a_stage_that_the_run_does_without(stage, words, said, caplog):
    register_schema()
    words = [f"stage={stage}", *words.split()]
    warn_of_other_stages(compose(words)[0], words)
    assert caplog.messages == ([said] if said else [])


GROUPS = ("scan", "data", "store", "score", "train", "dump", "vocabulary", "cluster", "assemble", "project")


@pytest.mark.parametrize("topology", ["per_layer", "global_pool"])
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("method", ["router_aware", "rank"])
@pytest.mark.parametrize("off", [True, False])
def test_only_what_there_is_can_be_unread(topology, router, method, off):
    settings = Settings(experts=4, n=8, topology=topology, output_dir="")
    settings.assemble.router, settings.cluster.method = router, method
    settings.score.method, settings.project.alignment = ("taylor", "none") if off else ("s_p", "ridge")
    found = find_unread(settings, MoEShape(4, 8, 2, 0, topology), 32)
    assert tuple(found) == GROUPS
    for group, reasons in found.items():
        assert reasons.keys() <= {spec.name for spec in fields(getattr(settings, group))}, group


def test_a_scan_alone_is_never_scored(texts):
    assert texts("stage=scan", "score=taylor", "scan=forward_only") == []


def test_settings_without_effect_are_said(texts, caplog):
    words = ["scan.per_token=true", "scan.block_width=32", "store.url=redis://host"]
    assert texts(*words) == []
    assert caplog.messages == [
        "scan.block_width=32 is ignored: scan.parameters=false",
        "scan.per_token=True is ignored: scan.parameters=false",
        "store.url=redis://host is ignored: store.kind=local",
    ]
    caplog.clear()
    assert texts(*words[:2], "scan.parameters=true") == []
    assert caplog.messages == []
    forward = ["scan.gradients=false", "scan.parameters=true", "scan.norm_product=gram"]
    assert texts(*forward) == []
    assert caplog.messages == ["scan.norm_product=gram is ignored: scan.gradients=false"]


def test_settings_of_a_dump_without_effect_are_said(texts, caplog):
    words = ["stage=dump", "dump.recomputed=true", "dump.gradient_checkpointing=true"]
    assert texts(*words) == texts(*words[:2], "model.device_map=auto") == texts(*words[1:]) == []
    assert caplog.messages == []
    assert texts(*words[:2]) == texts(*words, "dump.gradients=false") == []
    assert caplog.messages == [
        "dump.recomputed=True is ignored: dump.gradient_checkpointing=false",
        "dump.recomputed=True is ignored: dump.gradients=false",
        "dump.gradient_checkpointing=True is ignored: dump.gradients=false",
    ]


POOL = "topology=global_pool"


def test_all_that_is_wrong_with_a_pool_is_said_at_once(texts):
    words = ["top_k=17", "n=1025", "assemble.router=residual_ridge", "assemble.target=glm4_moe"]
    better = "experts=32 n=64 top_k=8 always_on=0 assemble.target=auto"
    assert texts(POOL, *words) == [
        "assemble.router=residual_ridge does not support a pool of experts\n"
        "  where: settings assemble.router and topology=global_pool\n"
        "  do:    assemble.router=error, or random",
        "top_k=17 is more than experts=16\n"
        "  where: shape, model=embedded with F=1024 neurons a layer\n"
        f"  do:    {better}",
        "n=1025 needs at least 1025 neurons a layer that are not always on; there are 1024\n"
        "  where: shape, model=embedded with F=1024 neurons a layer, 0 of them always on\n"
        f"  do:    {better}",
        "glm4_moe has experts of every layer's own, no pool that all layers share\n"
        "  where: topology=global_pool\n"
        "  do:    assemble.target=tiny_onn",
    ]


def test_a_pool_is_carved_by_the_settings_of_any_carve(texts, caplog):
    for words in ([], ["assemble.target=tiny_onn", "experts=3"], ["experts=100", "n=256"], ["always_on=64"]):
        assert texts(POOL, *words) == []
    assert texts(POOL, "stage=extract", "assemble.router=residual_ridge") == []
    assert caplog.messages == []


def test_settings_of_the_other_topology_are_ignored_with_a_word(texts, caplog):
    assert texts("project.pool_sweeps=3") == []
    assert caplog.messages == [
        "project.pool_sweeps=3 is ignored: topology=per_layer",
    ]
    caplog.clear()
    assert texts(POOL, "assemble.balance=0.1", "project.descent_steps=5", "project.refit_tokens=9") == []
    assert caplog.messages == [
        "assemble.balance=0.1 is ignored: topology=global_pool",
        "project.refit_tokens=9 is ignored: topology=global_pool",
        "project.descent_steps=5 is ignored: topology=global_pool",
    ]


@pytest.mark.parametrize(
    ("words", "ignored"),
    [
        (
            ["project.rounds=0"],
            ["balance=0.1 is ignored: assemble.router_steps=0, and stage=project fits no router again"],
        ),
        (["project=none"], ["balance=0.1 is ignored: assemble.router_steps=0, and stage=project fits no router again"]),
        (["project.rounds=0", "assemble.router_steps=9"], []),
        ([], []),
        (
            ["experts=4", "n=64", "top_k=4", "assemble.router_steps=9"],
            [
                "router_steps=9 is ignored: a token is sent to all experts",
                "balance=0.1 is ignored: a token is sent to all experts",
            ],
        ),
    ],
)
def test_a_load_that_no_router_is_trained_on_is_said(texts, caplog, words, ignored):
    assert texts("assemble.balance=0.1", *words) == []
    assert caplog.messages == [f"assemble.{message}" for message in ignored]


def test_an_active_share_that_fills_no_dial_is_said(texts, caplog):
    every = ["experts=16", "n=48", "top_k=3", "always_on=256"]
    assert texts("active=0.4", *every) == texts("active=0.4", POOL, every[2]) == []
    assert caplog.messages == [
        "active=0.4 is ignored: it fills what is null of experts, n, top_k, always_on",
        "active=0.4 is ignored: it fills what is null of top_k",
    ]
    caplog.clear()
    assert texts("active=0.4", *every[:3]) == texts("active=0.4", *every, "stage=scan") == texts(*every) == []
    assert texts("active=0.4", POOL, "always_on=9") == []
    assert caplog.messages == []


def test_random_tokens_that_nobody_sees_are_said(texts, caplog):
    assert texts(POOL, "vocabulary.tokens=99") == texts("vocabulary=none", "vocabulary.layers=2") == []
    assert caplog.messages == [
        "vocabulary.tokens=99 is ignored: topology=global_pool",
        "vocabulary.layers=2 is ignored: vocabulary.tokens=0",
    ]
    caplog.clear()
    assert texts(POOL, "vocabulary=none") == texts("vocabulary=none") == []
    assert caplog.messages == []


def test_an_unknown_topology(texts):
    (error,) = texts("topology=pool")
    assert error == (
        "topology=pool is none of per_layer, global_pool\n  where: setting topology\n  do:    topology=global_pool"
    )


def test_maps_are_drawn_of_layers_that_there_are(texts):
    assert texts("cluster.map_layers=[4,3,-4,-5]") == [NO_LAYER]
    assert texts("cluster.map_layers=[3,-4]") == []
    assert texts("cluster.map_layers=[4]", "cluster.map=none") == []
    assert texts("cluster.map_layers=[4]", "stage=score") == []


ONN = "assemble.target=tiny_onn"  # supports any dense layer


def test_maps_of_layers_that_stay_dense_are_not_drawn(texts, caplog):
    assert texts("cluster.map_layers=[0,2,-1]", "dense_layers=[0,3]", "active=0.75", ONN) == []
    assert caplog.messages == ["cluster.map_layers=[0, 2, -1]: no map of layer 0, -1, which stays dense"]
    caplog.clear()
    assert texts("cluster.map_layers=[1]", "dense_layers=[0]", ONN) == []
    assert texts("cluster.map_layers=[0]", "dense_layers=[0]", "cluster.map=none", ONN) == []
    assert [message for message in caplog.messages if "stays dense" in message] == []


def test_sequences_fit_into_the_model(texts):
    assert texts("data.max_length=1025") == [TOO_LONG]
    assert texts("data.max_length=1024") == []


def test_what_stands_at_its_default_for_a_slip_is_not_held_against_the_model(texts):
    words = ["data.max_length=1025", "cluster.map_layers=[4,-5]"]
    assert texts(*words, unreadable_groups={"data"}) == [NO_LAYER]
    assert texts(*words, unreadable_groups={"model"}) == []


def test_all_of_it_is_told_at_once_with_a_shape_that_does_not_fit(texts):
    words = ["score=taylor", "scan=forward_only", "cluster.map_layers=[4,-5]", "data.max_length=1025", "top_k=17"]
    taylor, long, layers, shape = texts(*words)
    assert (taylor, long, layers) == (TAYLOR, TOO_LONG, NO_LAYER)
    assert shape.startswith("top_k=17 is more than experts=16")


def test_of_an_unknown_stage_nothing_more_is_known(texts):
    (error,) = texts("stage=scam", "score=taylor", "scan=forward_only", "cluster.map_layers=[4]")
    assert error.startswith("stage=scam is none of all, scan")


@pytest.mark.parametrize("kind", ["auto", "balanced", "sequential"])
def test_several_workers_do_not_share_one_model(texts, torchrun, kind):
    assert texts(f"model.device_map={kind}") == [
        f"model.device_map={kind} spreads one model over all devices; torchrun started 3 workers, and each loads its "
        "own\n"
        "  where: setting model.device_map\n"
        "  do:    model.device_map=none, or python -m pipeline without torchrun"
    ]
    assert texts() == []


@pytest.mark.parametrize("environment", [{}, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}])
def test_one_worker_has_all_devices(texts, monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert texts("model.device_map=auto") == []


def test_variables_of_the_dump(texts, monkeypatch):
    for value in ("", " "):
        for name in ("TENSOR_SAVE_ENABLED", "CUSTOM_QUANT_TYPE", "TENSOR_SAVE_DIR"):
            monkeypatch.setenv(name, value)
        assert texts() == texts("stage=dump") == []
    monkeypatch.setenv("TENSOR_SAVE_ENABLED", "OFF")
    assert texts() == []
    assert texts("stage=dump")[0].startswith("the dump is switched off")
    monkeypatch.setenv("TENSOR_SAVE_ENABLED", "maybe")
    assert texts() == []
    assert texts("stage=dump") == [
        "TENSOR_SAVE_ENABLED=maybe is neither yes nor no\n"
        "  where: environment variable TENSOR_SAVE_ENABLED\n  do:    TENSOR_SAVE_ENABLED=1, or 0"
    ]
    monkeypatch.setenv("TENSOR_SAVE_ENABLED", "1")
    monkeypatch.setenv("CUSTOM_QUANT_TYPE", "fp3")
    assert texts() == texts("stage=dump", "dump.quant_type=mxfp8") == []
    (error,) = texts("stage=dump")
    assert "where: environment variable CUSTOM_QUANT_TYPE\n" in error


def test_a_training_must_add_up(texts):
    words = ("train.router_share=0.5", "train.language_model=0", "train.batch=9", "train.micro_batch=4")
    assert texts("stage=train", *words) == [
        "the phases' shares add up to 1.4, not 1\n"
        "  where: settings train.router_share, train.experts_share and train.all_share\n"
        "  do:    train.experts_share=0.5",
        "nothing is minimised: the weights of both losses are 0\n"
        "  where: settings train.language_model and train.logits\n"
        "  do:    train.language_model=1",
        "train.batch=9 is no multiple of train.micro_batch=4\n"
        "  where: settings train.batch and train.micro_batch\n"
        "  do:    train.batch=8",
    ]
    assert texts("stage=project", *words) == []
    assert len(texts("stage=evaluate", "evaluate.checkpoint=train", *words)) == 3


def test_routers_that_the_training_loss_does_not_reach_are_said(texts, caplog):
    """Qwen3Moe renormalises the gate of a single expert to 1; Glm4Moe, which has always-on neurons, does not."""
    words = ["stage=train", "experts=5", "n=320", "always_on=0", "top_k=1"]
    assert texts(*words) == []
    (said,) = (message for message in caplog.messages if message.startswith("top_k=1: "))
    assert said.startswith("top_k=1: qwen3_moe gives the chosen expert a gate of 1, ")
    caplog.clear()
    for others in (["stage=project"], ["top_k=2"], ["always_on=64"], ["train.straight_through=true"]):
        assert texts(*words, *others) == []
    assert not any(message.startswith("top_k=1: ") for message in caplog.messages)


def test_a_selection_bias_is_moved_only_where_there_is_one(texts):
    words = ["train.balance=selection_bias"]
    assert texts("stage=train", "assemble.target=qwen3_moe", "always_on=0", *words) == [
        "train.balance=selection_bias moves a bias of the router, and qwen3_moe has none\n"
        "  where: setting train.balance\n"
        "  do:    train.balance=auto"
    ]
    assert texts("stage=train", "assemble.target=tiny_onn", *words) == []
    assert texts("stage=project", "assemble.target=qwen3_moe", "always_on=0", *words) == []


BIASED = ["stage=train", "assemble.target=tiny_onn"]
AUTO = "train.balance=auto selects {} for this architecture"


@pytest.mark.parametrize(
    ("words", "ignored"),
    [
        (["train.rest_rate=1", *BIASED], {"rest_rate=1.0": "train.all_share=0"}),
        (
            ["train=router_only", "train.expert_rate=1", *BIASED],
            {"expert_rate=1.0": "train.experts_share=0 and train.all_share=0"},
        ),
        (["train=full", "train.expert_rate=1", "train.rest_rate=1", *BIASED], {}),
        (
            ["train.logit_std=0", "train.logit_std_share=0.2", *BIASED],
            {"logit_std_share=0.2": "train.logit_std=0"},
        ),
        (["train.logit_std_share=0.2", *BIASED], {}),
        (["train.balance_weight=1", *BIASED], {"balance_weight=1.0": AUTO.format("selection_bias")}),
        (["train.balance_weight=1", "train.balance=loss", *BIASED], {}),
        (["train.bias_rate=1", *BIASED], {}),
        (
            ["train.bias_rate=1", "stage=train", "assemble.target=qwen3_moe", "always_on=0"],
            {"bias_rate=1.0": AUTO.format("loss")},
        ),
        (
            ["train.bias_rate=1", "train.balance_weight=1", "train.balance=none", *BIASED],
            {"balance_weight=1.0": "train.balance=none", "bias_rate=1.0": "train.balance=none"},
        ),
    ],
)
def test_settings_of_a_training_that_no_phase_reads_are_said(texts, caplog, words, ignored):
    assert texts(*words) == []
    found = dict(message.removeprefix("train.").split(" is ignored: ") for message in caplog.messages)
    assert found == ignored


@pytest.mark.usefixtures("torchrun")
def test_processes_share_a_batch(texts):
    assert texts("stage=train", "train.batch=16", "train.micro_batch=2") == [
        "train.batch=16 is no multiple of train.micro_batch=2 x 3 processes\n"
        "  where: settings train.batch and train.micro_batch\n"
        "  do:    train.batch=18"
    ]


ALONE = (
    "train.fsdp=true shards the model over processes, but there is only one\n"
    "  where: setting train.fsdp\n"
    "  do:    train.fsdp=false, or torchrun --nproc-per-node=2 -m pipeline"
)


def test_routers_of_zeros_are_not_trained(texts):
    words = "assemble.mode=parity", "assemble.parity_logit_std=0"
    assert texts(*words, "stage=train") == [
        "assemble.parity_logit_std=0 makes all routers 0, and training could not scale their logits up\n"
        "  where: settings assemble.mode and assemble.parity_logit_std\n"
        "  do:    assemble.parity_logit_std=0.001, or assemble.mode=train"
    ]
    assert texts(*words, "stage=evaluate") == []
    assert texts("assemble.mode=train", "assemble.parity_logit_std=0", "stage=train") == []


def test_shards_need_several_processes(texts):
    assert texts("stage=train", "train.fsdp=true", "model.device=cuda") == [ALONE]


def test_text_that_a_stage_alone_does_not_read_is_said(texts, caplog):
    assert texts("stage=scan", "data.tokens=70000") == []
    assert caplog.messages == [
        "stage=scan reads the first data.sample_tokens=16384 of data.tokens=70000; data.sample_tokens=null reads all"
    ]
    caplog.clear()
    for words in (["stage=project", "data.tokens=70000"], ["stage=scan"], ["stage=scan", "data.tokens=9000"]):
        assert texts(*words) == []
    assert texts("stage=scan", "data.tokens=70000", "data.sample_tokens=null") == []
    assert caplog.messages == []

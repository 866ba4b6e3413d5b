"""Settings that contradict each other, the source model or the way the command was started; settings without effect."""

import re
import shutil
from dataclasses import dataclass, field

import pytest
from pico import write_pico

from instruments import cpu
from models.config import ModelConfig
from models.source import EMBEDDED
from pipeline.check import field_errors, find_errors, validate
from pipeline.settings import compose

POOL, ONN = "topology=global_pool", "assemble.target=tiny_onn"


@pytest.fixture
def errors(tmp_path):
    """Function that returns the errors of a command line; the embedded model has 4 layers of 1024 neurons."""

    def find(words, **more):
        return find_errors(compose([*words.split(), f"output_dir={tmp_path}"])[0], words.split(), **more)

    return find


@pytest.fixture
def warnings(tmp_path, caplog):
    """Function that returns the warnings of a command line without errors."""

    def find(words):
        caplog.clear()
        validate(compose([*words.split(), f"output_dir={tmp_path}"])[0], words.split())
        return caplog.messages

    return find


NOTHING = "score.activation_weight=0 score.frequency_weight=0 score.gradient_weight=0"
# Words → the settings that each of their errors names, in order.
CONTRADICTIONS = {
    "stage=score score=taylor scan=forward_only": ["score.method scan.gradients"],
    f"{NOTHING} score.gradient_weight=1 scan=forward_only": ["score.method scan.gradients"],
    NOTHING: ["score.activation_weight"],
    f"{POOL} {ONN} experts=3": [],
    "topology=pool": ["topology"],
    "stage=scam score=taylor scan=forward_only": ["stage"],
    "cluster.map_layers=[4,3,-4,-5]": ["cluster.map_layers"],
    "cluster.map_layers=[4] stage=score": [],
    "data.max_length=1025": ["data.max_length"],
    "stage=train train.router_share=0.5 train.all_share=0.6 train.language_model=0 train.batch=9 train.micro_batch=4": [
        "train.router_share", "train.language_model", "train.batch"
    ],
    "stage=evaluate evaluate.checkpoint=train train.language_model=0": ["train.language_model"],
}  # fmt: skip


@pytest.mark.parametrize("words", CONTRADICTIONS)
def test_contradictions_are_refused_by_their_settings(errors, words):
    found = [{*re.findall(r"[\w.]+", error.where)} for error in errors(words)]
    assert len(found) == len(CONTRADICTIONS[words])
    assert all({*names.split()} <= named for names, named in zip(CONTRADICTIONS[words], found, strict=True)), found


def test_auto_needs_a_target_that_can_keep_layers_dense(errors, tmp_path):
    source = write_pico(tmp_path / "olmo", "olmo2", intermediate=64)
    words = f"model=local model.path={source} data=python_stdlib always_on=0 n=8 dense_layers"
    (error,) = errors(f"{words}=auto")
    assert (error.where, error.do) == ("setting dense_layers=auto", ONN)
    assert errors(f"{words}=auto {ONN}") == errors(f"{words}=[]") == []


def test_an_error_names_value_place_and_remedy(errors):
    (error,) = errors("score=taylor scan=forward_only")
    assert str(error) == (
        "score.method=taylor needs gradients, and scan.gradients=false computes none\n"
        "  where: settings score.method and scan.gradients\n"
        "  do:    scan.gradients=true, or score.method=contribution"
    )


def test_all_errors_are_reported_at_once(errors):
    found = errors(f"{POOL} top_k=17 n=1025 assemble.target=glm4_moe data.max_length=1025")
    assert [error.what.partition(" ")[0] for error in found] == [
        "data.max_length=1025",
        "top_k=17",
        "n=1025",
        "glm4_moe",
    ]


def test_groups_that_could_not_be_read_are_not_checked(errors):
    words = "data.max_length=1025 cluster.map_layers=[4,-5]"
    assert [error.where for error in errors(words, unreadable_groups={"data"})] == ["setting cluster.map_layers"]
    assert errors(words, unreadable_groups={"model"}) == []


def test_several_workers_need_a_model_each_and_share_a_batch(errors, monkeypatch):
    """As the second of three workers under torchrun."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    assert [error.do for error in errors("model.device_map=auto")] == [
        "model.device_map=none, or python -m pipeline without torchrun"
    ]
    assert [error.do for error in errors("stage=train train.batch=16 train.micro_batch=2")] == ["train.batch=18"]
    assert errors("stage=train train.fsdp=true train.batch=24") == errors("") == []


def test_variables_of_the_dump(errors, monkeypatch):
    for name in ("TENSOR_SAVE_ENABLED", "CUSTOM_QUANT_TYPE", "TENSOR_SAVE_DIR"):
        monkeypatch.setenv(name, " ")
    assert errors("stage=dump") == []
    for name, value in (("TENSOR_SAVE_ENABLED", "OFF"), ("TENSOR_SAVE_ENABLED", "maybe"), ("CUSTOM_QUANT_TYPE", "fp3")):
        monkeypatch.setenv(name, value)
        (error,) = errors("stage=dump")
        assert f"environment variable {name}" in error.where
        assert errors("") == []
        monkeypatch.setenv(name, "")


# Words → the typed settings without effect, each with the setting that disables it.
IGNORED = {
    "data.path=my_texts data.max_new_tokens=9": {
        "data.path": "data.kind=python_stdlib", "data.max_new_tokens": "data.labels=full_sequence"
    },
    "scan.block_width=32 store.url=redis://host": {
        "scan.block_width": "scan.parameters=false",
        "store.url": "store.kind=local",
    },
    "scan.gradients=false scan.gradient_checkpointing=true": {"scan.gradient_checkpointing": "scan.gradients=false"},
    "score=random score.gradient_weight=5": {"score.gradient_weight": "score.method=random"},
    "project=align project.alpha=0.8": {"project.alpha": "project.gradient_projection=false"},  # also of the default
    "project.alignment=none project.refit_tokens=9": {"project.refit_tokens": "project.alignment=none"},
    f"stage=train train.rest_rate=1 {ONN}": {"train.rest_rate": "train.all_share=0.0"},
    f"stage=train train=full train.rest_rate=1 {ONN}": {},
    "data.sources=[{python_stdlib:true,share:1}]": {"data.sources": "data.kind=python_stdlib"},
    "stage=train train.sources=[{python_stdlib:true,share:1,split:a}]": {
        "train.sources.0.split": "train.sources.0.name=null"
    },
    "data=mixture data.sources=[{python_stdlib:true,share:1,split:a}]": {
        "data.sources.0.split": "data.sources.0.name=null"
    },
}  # fmt: skip


@pytest.mark.parametrize("words", IGNORED)
def test_typed_settings_without_effect_are_errors(errors, words):
    found = {error.where.removeprefix("setting "): error.what.partition(": ")[2] for error in errors(words)}
    assert {name: reason for name, reason in found.items() if name in words or "sources" in name} == IGNORED[words]


def test_held_out_chats_are_read_with_settings_that_the_text_of_the_carve_has_not(errors, tmp_path):
    (chats := tmp_path / "chats.jsonl").write_text('{"said": [{"role": "user", "content": "a"}]}')
    words = f"data.heldout_path={chats} data.messages_column=said"
    assert errors(words) == []
    shutil.copytree(EMBEDDED, tmp_path / "base", ignore=shutil.ignore_patterns("chat_template*"))
    base = f"{words} model=local model.path={tmp_path / 'base'} model.label=base"
    (error,) = errors(base)
    assert "no chat template" in error.what
    assert errors(f"{base} data.chat_template=plain") == []


@pytest.mark.parametrize(
    ("words", "do"),
    [
        ("project=align project.alpha=0.5", "project.gradient_projection=true"),
        ("score=random score.gradient_weight=5", "score.method=s_p"),
        ("project.descent_steps=0 project.descent_tokens=64", "project.descent_steps=400"),
    ],
)
def test_the_error_of_a_setting_without_effect_names_what_switches_it_on(errors, words, do):
    (error,) = errors(words)
    assert error.do.partition(", or the command without ")[0] == do
    kept = [word for word in words.split() if word.partition("=")[0] != do.partition("=")[0]]
    assert errors(" ".join([*kept, do])) == []
    assert errors(" ".join(words.split()[:-1])) == []


def test_what_a_file_says_without_effect_is_a_warning(warnings):
    """train=heal sets the rate of all other parameters."""
    words = "stage=train train=heal train.all_share=0"
    assert warnings(words) == ["train.rest_rate=7.5e-06 is ignored: train.all_share=0.0"]


def test_a_setting_without_effect_is_reported_with_all_other_errors(errors):
    found = errors("project=align project.alpha=0.5 topology=global_pool top_k=17")
    assert {error.where.partition(",")[0] for error in found} == {"setting project.alpha", "shape"}
    assert errors("score.gradient_weight=5", unreadable_groups={"score"}) == []


# Words → the start of the only warning, or None.
WARNINGS = {
    f"{POOL} evaluate.baselines=[oracle_aligned,unaligned,static_mask]": "evaluate.baselines=[oracle_aligned,static",
    f"{POOL} project.descent_steps=9 project.pool_tokens=99": "project.descent_steps=9 is ignored: topology=",
    "project.pool_tokens=99": "project.pool_tokens=99 is ignored: topology=per_layer",
    "active=0.4 experts=16 n=48 top_k=3 always_on=256": "active=0.4 is ignored",
    f"active=0.4 {POOL} top_k=3": "active=0.4 is ignored",
    "stage=scan data.tokens=70000": "stage=scan reads the first data.sample_tokens=16384",
    "stage=scan data.tokens=70000 data.sample_tokens=null": None,
    "stage=train experts=5 n=320 always_on=0 top_k=1": "top_k=1: qwen3_moe gives the chosen expert a gate of 1",
    "stage=train experts=5 n=320 always_on=64 top_k=1": None,
    "stage=train train.balance_weight=0.1": "train.balance_weight=0.1 is ignored: train.balance=auto",
    "stage=train train.balance=loss train.balance_weight=0.1": None,
    "stage=train experts=5 n=320 always_on=0 top_k=2 train.bias_rate=0.1": "train.bias_rate=0.1 is ignored",
    "stage=train experts=5 n=320 always_on=0 top_k=1 train.straight_through=true": None,
}


@pytest.mark.parametrize("words", WARNINGS)
def test_surprises_cause_a_warning(warnings, words):
    if WARNINGS[words] is None:
        assert warnings(words) == []
    else:
        (message,) = warnings(words)
        assert message.startswith(WARNINGS[words])


@pytest.mark.parametrize(
    ("flags", "warned"),
    [
        ("avx avx2 fma", True),
        ("avx2 avx512bw avx512_bf16", False),
        ("avx2 avx_ne_convert", False),
        ("asimd bf16", False),
    ],
)
def test_a_cpu_without_bfloat16_causes_a_warning(flags, warned, warnings, tmp_path, monkeypatch):
    monkeypatch.setattr(cpu, "FACTS", tmp_path / "cpuinfo")
    cpu.FACTS.write_text(f"flags : fpu {flags} rdpid\n")
    for setting in ("train.precision", "model.dtype"):
        words = f"stage=train {setting}=bfloat16 model.device=cpu"
        assert [message.partition(":")[0] for message in warnings(words)] == warned * [f"{setting}=bfloat16"]
    assert warnings("stage=train") == warnings("train.precision=float32 stage=train model.dtype=float16") == []


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("stage=all train=distil train.tokens=9", "stage=all does not run train"),
        ("stage=all check=analyze_tensor experts=4", "stage=all does not run diagnose"),
        ("stage=all train=distil evaluate.checkpoint=train", None),
        ("stage=diagnose check=analyze_tensor diagnose.tokens=9 diagnose.analyze_tensor.scale=amax", None),
        ("stage=diagnose diagnose.analyze_tensor.scale=amax", "check=auto_diff"),
    ],
)
def test_settings_of_a_stage_that_the_run_does_without(words, reason, warnings):
    assert [message.partition(" is ignored: ")[2] for message in warnings(words)] == ([reason] if reason else [])


@dataclass
class Node:
    method: str = field(default="rank", metadata={"choices": ("rank", "random")})
    share: float = field(default=0.25, metadata={"above": 0, "maximum": 1})
    layers: list[int] = field(default_factory=list, metadata={"minimum": 0})
    free: int = -1


@dataclass
class Root:
    seed: int | None = field(default=None, metadata={"minimum": 0})
    node: Node = field(default_factory=Node)


def test_every_broken_rule_is_reported():
    assert list(field_errors(Root())) == []
    errors = list(field_errors(Root(seed=-1, node=Node("randon", 0.0, [3, -4]))))
    assert [(error.what, error.do) for error in errors] == [
        ("seed=-1 must be at least 0", "seed=null"),
        ("node.method=randon is none of rank, random", "node.method=random"),
        ("node.share=0.0 must be above 0", "node.share=0.25"),
        ("node.layers=-4 must be at least 0", "node.layers=[]"),
    ]
    assert [error.do for error in field_errors(Node(share=1.5))] == ["share=0.25"]
    for amount, fits in {"20GiB": True, "512 MB": True, "1.5gb": True, "20": False, "much": False, "": False}.items():
        assert [*field_errors(ModelConfig(hidden_memory=amount))] == [] or not fits
    wrong = {error.where for error in field_errors(ModelConfig(label="a/b", device="cuda:x", cpu_memory="half"))}
    assert wrong == {"setting label", "setting device", "setting cpu_memory"}

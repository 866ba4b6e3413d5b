"""Words for paths and names, typing errors on the command line, and commands that can be pasted."""

import pytest

from instruments.errors import ConfigError
from models.source import EMBEDDED
from pipeline.overrides import command_line, expand_words, flag_errors, override_errors


def texts(*words, sweep=False):
    return [str(error) for errors in override_errors(words, sweep=sweep).values() for error in errors]


def test_good_words_pass():
    words = [
        "stage=scan",
        "experts=3",
        "top_k=null",
        "active=1",
        "score=taylor",
        "project=none",
        "project.penalties=[0.1,1]",
    ]
    words += ["model.path='/my path/qwen'", "hydra.run.dir=/somewhere"]
    assert texts(*words, "experiment=[small,closed_form]") == []


@pytest.mark.parametrize(
    ("word", "what", "do"),
    [
        ("expert=3", "there is no setting expert", "experts=3"),
        ("scan.gradient=true", "there is no setting scan.gradient", "scan.gradients=true"),
        ("zzz=3", "there is no setting zzz", "python -m pipeline --cfg job lists the settings"),
        ("score=tailor", "is none of contribution, frequency, random, s_p, taylor, wanda", "score=taylor"),
        ("store={kind: x}", "store={'kind': 'x'} is none of local, redis", "store=local"),
        ("experts=many", "experts=many: Value 'many'", "experts=null"),
        ("fresh=maybe", "fresh=maybe: Value 'maybe' is not a valid bool", "fresh=false"),
        ("experts", "experts is no setting", "stage=scan, or another key=value"),
        ("x" * 300, "is no setting", "stage=scan, or another key=value"),  # too long for the name of a file
        ("score=glob(*)", "is a sweep over values", "python -m pipeline -m 'score=glob(*)'"),
        ("debug=null", "debug=None is none of tiny", "debug=tiny"),  # Hydra cannot take an overlay away
    ],
)  # fmt: skip
def test_a_slip_is_named_with_its_remedy(word, what, do):
    (text,) = texts(word)
    assert what in text.splitlines()[0]
    assert text.endswith(f"\n  do:    {do}")


def test_a_slip_in_a_source_names_the_keys_of_sources():
    (text,) = texts("train.sources=[{path:a.jsonl,sahre:1}]")
    assert "'train.sources=[{path:FILE_OR_FOLDER,share:1}]'; an item may have share, path, name," in text


def test_every_value_of_a_sweep_is_checked():
    assert texts("experts=8,16", "score=s_p,wanda", "store=glob([l*,r*],exclude=redis)", sweep=True) == []
    many, few = texts("experts=8,many,few", "seed=range(0,3)", sweep=True)
    assert many.startswith("experts=many: ")
    assert few.startswith("experts=few: ")


@pytest.mark.parametrize("word", ["score=glob(x*)", "seed=range(3,1)"])
def test_a_sweep_over_nothing_is_refused(word):
    (error,) = texts(word, sweep=True)
    assert error.startswith(f"{word} is a sweep over no value\n  where: command line")


def test_changed_settings_replace_typed_ones():
    typed = ["stage=all", "data.path=/my texts", "experts=3"]
    assert command_line(typed, stage="scan", fresh="true") == (
        "python -m pipeline 'data.path=/my texts' experts=3 stage=scan fresh=true"
    )


@pytest.mark.parametrize(
    "word",
    [
        *("model.trust_remote_code='7'", "model.trust_remote_code=7", "fresh='5'", "fresh='1'", "fresh=2"),
        *("data.sources=[{python_stdlib:'7',share:1}]", "data.sources.0.python_stdlib=7"),
    ],
)
def test_a_number_turns_nothing_on(word):
    assert "neither true nor false" in texts(word)[0]


@pytest.mark.parametrize(
    ("word", "fault"),
    [
        ("dense_layers=[[0]]", "dense_layers.0=[0] is no integer"),
        ("project.penalties=[{a:1}]", "project.penalties.0={'a': 1} is no number"),
        ("diagnose.auto_diff.modules=[{}]", "diagnose.auto_diff.modules.0={} is no text"),
        ("dump.modules='???'", "dump.modules=??? is no value"),
        ("fresh='???'", "fresh=??? is no value"),
        ("data.sources.0.path='???'", "data.sources.0.path=??? is no value"),
    ],
)
def test_what_omegaconf_takes_and_no_code_can_use_is_refused(word, fault):
    (text,) = texts(word)
    assert text.partition("\n")[0].endswith(fault)


@pytest.mark.parametrize("value", ["", "/proc/x", "~/x", "x" * 300])
@pytest.mark.parametrize("key", ["hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir"])
def test_a_folder_of_a_run_can_be_written_to(key, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (error,) = override_errors([f"{key}={value}"], sweep=True).popitem()[1]
    assert isinstance(error, ConfigError)
    assert f"{key}=" in error.do or error.do == f"the command without {key}"
    assert texts(f"{key}=runs/${{now:%Y}}", sweep=True) == []


@pytest.mark.parametrize("word", ["hydra.sweeper.params=3", "+hydra.sweeper.params.seed=1"])
def test_a_sweep_is_written_in_words(word):
    (text,) = texts(word, sweep=True)
    assert text.endswith("do:    python -m pipeline -m seed=0,1")


@pytest.mark.parametrize("word", ["fresh=true", "fresh=True", "fresh='false'", "fresh=no", "plan=${fresh}"])
def test_words_are_booleans(word):
    assert texts(word) == []


@pytest.mark.parametrize(
    ("word", "expanded"),
    [
        ("model=/a b/My Qwen(1)", ["model=local", "model.path='/a b/My Qwen(1)'", "model.label=My_Qwen_1_"]),
        ("'model=/a'", ["'model=/a'"]),
        ("model='/a/b'", ["model=local", "model.path=/a/b", "model.label=b"]),
        ("model=Qwen/Qwen2.5-7B", ["model=hub", "model.name=Qwen/Qwen2.5-7B", "model.label=Qwen2.5-7B"]),
        ("data=allenai/c4", ["data=hub", "data.name=allenai/c4"]),
        ("data=", ["data="]),  # of a variable of the shell that is not set
        ("data=/a/wiki.txt", ["data=text", "data.path=/a/wiki.txt"]),
        ("data=wiki.jsonl", ["data=text", "data.path=wiki.jsonl"]),
        ("data=text/mistyped.jsonl", ["data=text", "data.path=text/mistyped.jsonl"]),
        *((word, [word]) for word in ("model=qwen3_1_7b", "model=qwen3.5", "model=a/b,c/d", "data=genral", "n=/a")),
    ],
)  # fmt: skip
def test_a_path_and_a_name_choose_their_option(word, expanded):
    assert expand_words([word]) == expanded


def test_only_whole_flags_of_hydra_that_show_settings_or_sweep_are_taken():
    assert flag_errors(["--cfg", "job", "-m", "--resolve", "--info", "seed=-1"]) == []
    refused = ["--experimental-rerun", "--exp", "--config-dir", "-cn", "--shell-completion", "-sc", "--mult", "--x=1"]
    assert len(flag_errors(refused)) == len(refused)


def test_a_folder_that_exists_is_no_name_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("models/mine", "texts"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "te,xt").mkdir()
    assert expand_words(["data=te,xt"]) == ["data=text", "data.path='te,xt'"]
    assert expand_words(["model=.."])[2] == f"model.label={tmp_path.parent.name}"
    assert expand_words(["model=models/mine"])[:2] == ["model=local", "model.path=models/mine"]
    assert expand_words(["data=texts"]) == ["data=text", "data.path=texts"]


def test_a_setting_that_is_typed_stays():
    typed = [f"model={EMBEDDED}", "model.label=mine"]
    assert expand_words(typed) == ["model=local", f"model.path={EMBEDDED}", "model.label=mine"]

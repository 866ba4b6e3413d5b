"""Reports and warnings about a shape before anything starts; each advice has the promised effect."""

import re
from dataclasses import replace

import pytest
from pico import decoder_of, write_pico

from models.config import MoEShape
from models.finding import find_decoder
from models.source import EMBEDDED
from models.targets.config import MOE_TARGETS
from pipeline.check import InvalidSettingsError, square_errors, validate, width_errors
from pipeline.settings import compose
from pipeline.shape import ShapeRequest, describe_shape, find_remedy, shape_text, shape_warnings, weakness_text
from stages.assemble.config import AssembleConfig

POOL = "topology=global_pool"
DO = re.compile(r"^  do:    (.+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model of one layer, with the FFN width of Qwen2.5-0.5B."""
    return write_pico(tmp_path_factory.mktemp("wide"), "qwen2", layers=1, intermediate=4864)


@pytest.fixture
def said(tmp_path, wide):
    """Function that returns the lines that a command line logs before it starts, and its warning or None."""

    def say(*words):
        models = {"wide": ["model=local", f"model.path={wide}", "data=python_stdlib"], "embedded": ["model=embedded"]}
        model, *rest = words
        settings, _folder = compose([*models[model], *rest, "data.max_length=256", f"output_dir={tmp_path}"])
        checked = validate(settings)
        carve = checked.request, checked.shape
        weak = weakness_text(*carve)
        return f"{shape_text(*carve, settings.model.label)}\n", f"{weak}\n" if weak else None

    return say


def test_what_the_default_comes_to(said):
    lines, warning = said("embedded")
    assert warning is None
    assert lines == (
        "embedded: 4 layers of 1024 neurons -> 16 experts of 64, 4 per token, and 256 always on\n"
        "  neurons     512 of 1,024 serve a token (50% active), 256 of them chosen for it (50% routed)\n"
        "  parameters  5.79 M (1.16 x the dense model's 4.98 M), 3.43 M active per token (0.69 x)\n"
        "  checkpoint  about 11.0 MiB on disk\n"
        "  serving     Glm4MoeForCausalLM: transformers, llama.cpp; vLLM, SGLang with assemble.tied_embeddings=false\n"
    )
    lines, _warning = said("embedded", "assemble.tied_embeddings=false")
    assert lines.splitlines()[2:] == [
        "  parameters  6.83 M (1.37 x the dense model's 4.98 M), 3.43 M active per token (0.69 x)",
        "              1.05 M of these are the output embedding, in the dense model the input's",
        "  checkpoint  about 13.0 MiB on disk",
        "  serving     Glm4MoeForCausalLM: transformers, vLLM, SGLang, llama.cpp",
    ]


@pytest.mark.parametrize(
    ("words", "shape"),
    [
        ([], "58 experts of 64, 20 per token, and 1152 always on"),
        (["active=0.05"], "150 experts of 32, 5 per token, and 64 always on"),
        (["experts=16"], "16 experts of 232, 5 per token, and 1152 always on"),
        ([POOL, "experts=8"], "8 experts of 256 in all, shared by every layer, 8 per token, and 0 always on"),
    ],
)
def test_shapes_of_a_wide_model(said, words, shape):
    lines, warning = said("wide", *words)
    assert f"local: 1 layers of 4864 neurons -> {shape}\n" in lines
    assert (warning is None) == (POOL not in words)


def test_experts_that_are_typed_stay_as_typed(said):
    lines, warning = said("wide", "experts=100", "n=256")
    assert "100 experts of 256, 1 per token, and 2176 always on" in lines
    assert "little routing: 256 of 2,432 active neurons are chosen for a token (11%)" in warning
    assert "larger: 2.01 M parameters, 5.7 x the dense model's 0.35 M" in warning


WARNED = [
    ("embedded", ["top_k=16", "always_on=0"], {"no saving", "no routing"}),
    ("embedded", ["experts=1", "assemble.target=tiny_onn"], {"no routing", "dropped"}),
    ("embedded", ["n=8"], {"little routing", "dropped"}),
    ("embedded", ["experts=100", "n=256", "always_on=0", "assemble.target=qwen3_moe"], {"larger"}),
    ("embedded", ["assemble.pad_to=128"], {"larger"}),
    ("embedded", [POOL, "experts=100", "n=256"], {"no smaller", "larger"}),
    ("embedded", [POOL, "top_k=1", "always_on=960"], {"no saving", "little routing", "no smaller"}),
    ("wide", ["experts=2", "active=0.05"], {"dropped"}),
]


def without_active(words):
    """With all numbers of the shape given, `active` has no effect, and a warning says so."""
    return [word for word in words if not word.startswith("active=")]


@pytest.mark.parametrize(("model", "words", "kinds"), WARNED)
def test_a_warning_is_gone_with_the_settings_it_names(said, model, words, kinds):
    _lines, warning = said(model, *words)
    found = {line.partition(":")[0] for line in warning.rstrip().splitlines()}
    assert found == kinds | {"  do"}
    (do,) = DO.findall(warning)
    lines, left = said(model, *without_active(words), *do.split())
    assert left is None
    assert "always on" in lines


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("embedded", ["n=1025", "always_on=1000", "top_k=17"]),
        ("embedded", ["top_k=17", "assemble.target=qwen3_moe", "always_on=0"]),
        ("embedded", ["experts=3", "top_k=4"]),
        ("embedded", [POOL, "top_k=17"]),
    ],
)
def test_an_error_is_gone_with_the_settings_it_names(said, model, words):
    with pytest.raises(InvalidSettingsError) as caught:
        said(model, *words)
    (do,) = set(DO.findall(str(caught.value)))
    _lines, left = said(model, *without_active(words), *do.split())
    assert left is None


def test_a_model_too_narrow_for_any_good_shape_is_given_no_advice():
    source = decoder_of("llama", hidden_size=8, intermediate_size=8, vocab_size=5)
    request = ShapeRequest(None, None, None, None, 0.5, assemble=AssembleConfig(pad_to=256), source=source)
    assert any(shape_warnings(request, MoEShape(2, 1, 1, 0)))
    assert find_remedy(request) is None


@pytest.mark.parametrize(
    ("target", "dense", "said"),
    [
        ("auto", (0,), "Glm4MoeForCausalLM: transformers, llama.cpp; vLLM, SGLang with assemble.tied_embeddings=false"),
        (
            "qwen3_moe",
            (0,),
            "Qwen3MoeForCausalLM: transformers, vLLM; SGLang with assemble.tied_embeddings=false; not llama.cpp",
        ),
        ("tiny_onn", (), "TinyONNForCausalLM: transformers, vLLM; not SGLang, llama.cpp"),
    ],
)
def test_runtimes_that_a_carve_gives_up_are_named(target, dense, said):
    source = find_decoder(EMBEDDED)
    request = ShapeRequest(16, 64, None, None, 0.5, assemble=AssembleConfig(target=target), source=source)
    shape = MoEShape(16, 64, 4, 0 if target == "qwen3_moe" else 256, dense_layers=dense)
    assert describe_shape(request, shape)[-1] == f"serving     {said}"


def test_runtimes_that_always_on_neurons_give_up_are_named():
    request = ShapeRequest(None, None, None, None, 0.5, source=decoder_of("mistral"))
    with_them, without = (describe_shape(request, shape)[-1] for shape in (MoEShape(3, 8, 1, 8), MoEShape(4, 8, 2, 0)))
    assert with_them.endswith("TinyONNForCausalLM: transformers, vLLM; SGLang, llama.cpp with always_on=0")
    assert without.endswith("MixtralForCausalLM: transformers, vLLM, SGLang, llama.cpp")


def test_experts_that_grouped_mm_cannot_run_are_refused():
    """transformers would write and load such a checkpoint, and stop in its first pass."""
    shape = MoEShape(experts=4, n=12, top_k=2, always_on=64)
    (error,) = width_errors(shape, 1)
    assert str(error).startswith(
        "experts of 12 neurons on disk: grouped_mm, by which transformers runs them, needs a multiple of 8"
    )
    for n, pad_to in ((12, 8), (12, None), (64, 1)):
        assert [*width_errors(replace(shape, n=n), pad_to)] == []


@pytest.mark.parametrize(
    ("n", "pad_to", "target", "refused"),
    [
        *((32, None, "qwen3_vl_moe_text", True), (64, None, "qwen3_vl_moe_text", True)),
        *((24, 32, "qwen3_vl_moe_text", True), (24, 8, "qwen3_vl_moe_text", False)),
        *((40, None, "qwen3_vl_moe_text", False), (32, None, "qwen2_moe", False)),
    ],
)
def test_transposed_experts_whose_matrices_are_square_are_refused(n, pad_to, target, refused):
    """transformers and llama.cpp transpose by shape: a square matrix loads without an error, and wrongly."""
    source = decoder_of("llama", hidden_size=64)
    request = ShapeRequest(4, n, None, None, 0.5, assemble=AssembleConfig(pad_to=pad_to), source=source)
    errors = [*square_errors(request, MoEShape(4, n, 2, 0), MOE_TARGETS[target])]
    assert [error.where for error in errors] == [f"n={n}"] * refused

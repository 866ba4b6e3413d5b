"""A pico checkpoint of every family, its logits, and the MoE emitted for a target that can express it."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pico import write_pico
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from zoo.checkpoints import IMAGE, write_checkpoint
from zoo.images import image_inputs

from models.checkpoint.shards import DenseReader
from models.config import MoEShape
from models.emit import emit_checkpoint
from models.experts import slice_experts
from models.finding import find_decoder
from models.targets.config import MOE_TARGETS, check_target

TOLERANCE = 1e-5
LAYERS, HIDDEN = 2, 24
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 2e4, "factor": 4.0, "original_max_position_embeddings": 128}
MINISTRAL_ROPE = YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
ALPHA_ROPE = {"rope_type": "dynamic", "rope_theta": 2e4, "alpha": 50.0, "factor": 1.0}  # Hunyuan's
# No architecture has this base as its default, so code that does not read it fails.
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 3e3}
LONG = [1.0, 1.5, 2.5]
LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 3e3, "short_factor": LONG, "long_factor": [2 * f for f in LONG],
    },
    "original_max_position_embeddings": 8,  # fewer than the test's tokens
}  # fmt: skip
PARTIAL_ROPE = PLAIN_ROPE | {"partial_rotary_factor": 0.67}
PHI4_MINI = LONGROPE | {
    "rope_parameters": LONGROPE["rope_parameters"]
    | {"short_factor": LONG[:2], "long_factor": LONG[1:], "partial_rotary_factor": 0.67}
}
QUARTER_ROPE = PLAIN_ROPE | {"partial_rotary_factor": 0.25}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 0.5,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.3,
}
# A window shorter than the test's text, in one of two layers.
WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
COHERE2 = WINDOWS | {"logit_scale": 0.7, "layer_norm_eps": 1e-4, "head_dim": 6}
GRANITE_SWA = MULTIPLIERS | WINDOWS | {"layer_rope_theta": [0, 50.0]}
GRANITE_HYBRID = MULTIPLIERS | {
    "layer_types": ["mamba", "attention"],
    "shared_intermediate_size": 40,  # F
    "head_dim": 6,  # transformers 4 has no other
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "mamba_n_heads": 4,
    "mamba_d_state": 8,
}
GEMMA = WINDOWS | {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 5}
GEMMA3 = GEMMA | {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 3e3},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    }
}
GEMMA4 = WINDOWS | {
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 3e3},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
    "final_logit_softcapping": 2.0,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
}
GEMMA4_SMALL = GEMMA4 | {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 61}
GEMMA4_NO_VALUES = GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
LFM2 = {"full_attn_idxs": [1], "conv_bias": True, "block_auto_adjust_ff_dim": False}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": PLAIN_ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]},
}
NO_ROTATION = {"no_rope_layers": [1, 0]}


@dataclass(frozen=True)
class Case:
    """A carve; a source of the zoo, which ends in _image, is a wrapper that is compared on a text with an image."""

    source: str
    target: str
    always_on: int = 0
    experts: int = 5
    n: int = 7
    dtype: torch.dtype = torch.float32
    pad_to: int = 8
    dense_layers: tuple[int, ...] = ()
    warned: int = 0  # warnings of transformers 5, which the dense checkpoint also causes
    text_only: bool = False  # of a wrapper, without its images
    tied_embeddings: bool = True
    tolerance: float = TOLERANCE  # more for models whose own noise is larger
    pico: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> MoEShape:
        return MoEShape(self.experts, self.n, self.experts, self.always_on, dense_layers=self.dense_layers)

    @property
    def width(self) -> int:
        """F."""
        return self.experts * self.n + self.always_on

    @property
    def architecture(self) -> str:
        """The class that the carve loads as."""
        target, wrapper = MOE_TARGETS[self.target], self.source.removesuffix(IMAGE)
        alone = self.text_only or wrapper == self.source
        return target.architecture if alone else target.wrappers[wrapper][0]


CASES = {
    "qwen3": Case("qwen3", "qwen3_moe", pico={"tie": True}),
    "qwen3-untied": Case("qwen3", "qwen3_moe", tied_embeddings=False, pico={"tie": True}),
    "qwen3-biased": Case("qwen3", "qwen3_moe", pico={"attention_bias": True}),
    "qwen2": Case("qwen2", "qwen2_moe"),
    "qwen2-always-on": Case("qwen2", "qwen2_moe", always_on=5),
    "qwen2-yarn": Case("qwen2", "qwen2_moe", always_on=5, pico={"rope_parameters": YARN_ROPE}),
    "llama": Case("llama", "mixtral"),
    "llama-llama3-rope": Case("llama", "mixtral", pico={"rope_parameters": LLAMA3_ROPE}),
    "llama-qwen2_moe": Case("llama", "qwen2_moe", always_on=5, pico={"head_dim": 6}),
    "mistral": Case("mistral", "mixtral", pico={"sliding_window": 4, "tie": True}),
    "qwen3-glm4": Case("qwen3", "glm4_moe", always_on=5),
    "qwen2-glm4": Case("qwen2", "glm4_moe", always_on=11),
    "llama-glm4-llama3-rope": Case("llama", "glm4_moe", always_on=5, pico={"rope_parameters": LLAMA3_ROPE}),
    "seed_oss": Case("seed_oss", "glm4_moe", always_on=5, pico={"tie": True}),
    "seed_oss-dense-first": Case("seed_oss", "glm4_moe", dense_layers=(0,), pico={"attention_bias": False}),
    "glm": Case("glm", "glm4_moe", always_on=5, pico={"tie": True}),
    "glm-dense-first": Case(
        "glm", "glm4_moe", dense_layers=(0,), pico={"rope_parameters": QUARTER_ROPE, "attention_bias": False}
    ),
    "glm-bfloat16": Case("glm", "glm4_moe", always_on=5, experts=4, n=8, dtype=torch.bfloat16),
    "phi3-glm4-partial": Case("phi3", "glm4_moe", always_on=5, pico={"rope_parameters": PARTIAL_ROPE}),
    "phi3-glm4-longrope-partial": Case("phi3", "glm4_moe", always_on=5, pico=PHI4_MINI),
    "ernie4_5": Case("ernie4_5", "ernie4_5_moe", always_on=5, pico={"tie": True}),
    "ernie4_5-dense-first": Case("ernie4_5", "ernie4_5_moe", always_on=11, dense_layers=(0,)),
    "ernie4_5-dense-last": Case("ernie4_5", "ernie4_5_moe", dense_layers=(1,)),
    "helium": Case("helium", "ernie4_5_moe", always_on=5, pico={"head_dim": 6}),
    "hunyuan": Case("hunyuan_v1_dense", "hunyuan_v1_moe", always_on=5, pico={"tie": True}),
    "hunyuan-alpha": Case(
        "hunyuan_v1_dense", "hunyuan_v1_moe", warned=3, pico={"rope_parameters": ALPHA_ROPE, "attention_bias": True}
    ),
    "cohere2": Case("cohere2", "cohere2_moe", always_on=5, pico=COHERE2 | {"tie": True}),
    "cohere2-dense-last": Case("cohere2", "cohere2_moe", dense_layers=(1,), pico=COHERE2 | {"attention_bias": True}),
    "qwen3-bfloat16": Case("qwen3", "qwen3_moe", experts=4, n=8, dtype=torch.bfloat16),
    "qwen2-bfloat16": Case("qwen2", "qwen2_moe", always_on=5, experts=4, n=8, dtype=torch.bfloat16),
    "phi3": Case("phi3", "mixtral", pico={"sliding_window": 4}),
    "phi3-longrope": Case("phi3", "mixtral", pico=LONGROPE),
    "olmo2": Case("olmo2", "flex_olmo", pico={"tie": True}),
    "olmo2-biased": Case("olmo2", "flex_olmo", experts=4, pico={"attention_bias": True}),
    "granite": Case("granite", "granitemoe", pico=MULTIPLIERS | {"tie": True}),
    "granite-shared": Case("granite", "granitemoeshared", always_on=5, pico=MULTIPLIERS),
    "granite-shared-biased": Case("granite", "granitemoeshared", pico={"attention_bias": True}),
    "granite-bfloat16": Case("granite", "granitemoe", experts=4, n=8, dtype=torch.bfloat16),
    "granite_swa": Case("granite_swa", "granitemoe_swa", always_on=5, pico=GRANITE_SWA | {"tie": True}),
    "granite_swa-none-always-on": Case("granite_swa", "granitemoe_swa", pico=GRANITE_SWA | {"attention_bias": True}),
    "smollm3-granite": Case("smollm3", "granitemoe_swa", always_on=5, pico=NO_ROTATION | {"tie": True}),
    "smollm3-granite-windows": Case(
        "smollm3", "granitemoe_swa", pico=NO_ROTATION | WINDOWS | {"use_sliding_window": True, "attention_bias": True}
    ),
    "granite-hybrid": Case("granitemoehybrid", "granitemoehybrid", always_on=5, pico=GRANITE_HYBRID | {"tie": True}),
    "granite-hybrid-none-always-on": Case(
        "granitemoehybrid", "granitemoehybrid", n=8, pico=GRANITE_HYBRID | {"attention_bias": True}
    ),
    "granite-hybrid-rotated": Case(
        "granitemoehybrid", "granitemoehybrid", always_on=5, pico=GRANITE_HYBRID | {"position_embedding_type": "rope"}
    ),
    "cwm": Case("cwm", "granitemoe_swa", always_on=5, pico=WINDOWS | {"rope_parameters": LLAMA3_ROPE}),
    "ministral": Case("ministral", "granitemoe_swa", always_on=5, pico=WINDOWS),
    "gemma2": Case("gemma2", "tiny_onn", always_on=5, pico=GEMMA | {"tie": True}),
    "gemma3_text": Case("gemma3_text", "tiny_onn", always_on=5, pico=GEMMA3 | {"tie": True}),
    "gemma4": Case("gemma4_text", "gemma4_text", always_on=5, pico=GEMMA4 | {"tie": True}),
    "gemma4-none-always-on": Case("gemma4_text", "gemma4_text", pico=GEMMA4_NO_VALUES),
    "gemma4-layer-inputs": Case("gemma4_text", "gemma4_text", always_on=5, pico=GEMMA4_SMALL),
    "gemma4-bfloat16": Case("gemma4_text", "gemma4_text", always_on=5, dtype=torch.bfloat16, pico=GEMMA4),
    "lfm2": Case("lfm2", "lfm2_moe", pico=LFM2 | {"tie": True}),
    "lfm2-dense-first": Case("lfm2", "lfm2_moe", dense_layers=(0,), pico=LFM2),
    "lfm2-bfloat16": Case("lfm2", "lfm2_moe", experts=4, n=8, dtype=torch.bfloat16, pico=LFM2),
    "nemotron": Case("nemotron", "tiny_onn", always_on=5),
    "nemotron-dense-last": Case("nemotron", "tiny_onn", dense_layers=(1,)),
    "apertus-dense-last": Case("apertus", "tiny_onn", 5, dense_layers=(1,), warned=1),  # each activation learns
    "smollm3": Case("smollm3", "tiny_onn", always_on=5, pico=NO_ROTATION | {"tie": True}),
    "smollm3-untied": Case("smollm3", "tiny_onn", 5, tied_embeddings=False, pico=NO_ROTATION | {"tie": True}),
    "qwen3-tiny_onn": Case("qwen3", "tiny_onn", always_on=5, pico=WINDOWS | {"use_sliding_window": True}),
    "qwen2-tiny_onn": Case("qwen2", "tiny_onn", always_on=5, pico={"rope_parameters": YARN_ROPE}),
    "llama-tiny_onn": Case("llama", "tiny_onn", pico={"attention_bias": True, "rope_parameters": LLAMA3_ROPE}),
    "mistral-tiny_onn": Case("mistral", "tiny_onn", always_on=5, pico={"sliding_window": 4}),
    "phi3-tiny_onn": Case("phi3", "tiny_onn", always_on=5, pico={"rope_parameters": PARTIAL_ROPE}),
    "phi3-longrope-tiny_onn": Case("phi3", "tiny_onn", warned=1, pico=LONGROPE | {"tie": True}),
    "granite-tiny_onn": Case("granite", "tiny_onn", always_on=5, pico=MULTIPLIERS),
    "olmo2-bfloat16": Case("olmo2", "tiny_onn", always_on=5, dtype=torch.bfloat16),
    "qwen3-dense-last": Case("qwen3", "qwen3_moe", dense_layers=(1,)),
    "phi3-dense-first": Case("phi3", "qwen2_moe", always_on=5, dense_layers=(0,)),
    "glm4-dense-first": Case("qwen3", "glm4_moe", always_on=5, dense_layers=(0,)),
    "gemma2-dense-first": Case("gemma2", "tiny_onn", always_on=5, dense_layers=(0,), pico=GEMMA),
    "qwen2-padded": Case("qwen2", "qwen2_moe", always_on=5, pad_to=128, pico={"tie": True}),
    "granite-padded": Case("granite", "granitemoeshared", always_on=5, pad_to=128, pico={"tie": True}),
    "smollm3-padded": Case("smollm3", "tiny_onn", always_on=5, pad_to=128),
    "qwen3_5": Case("qwen3_5_text", "qwen3_5_moe_text", always_on=5, tolerance=3e-5, pico=HYBRID),
    "qwen3_5-none-always-on": Case("qwen3_5_text", "qwen3_5_moe_text", tolerance=3e-5, pico=HYBRID | {"tie": True}),
    "ministral3": Case("ministral3", "mixtral", pico={"rope_parameters": MINISTRAL_ROPE}),
    "mistral3-image": Case("mistral3_image", "mixtral", 0, 4, 32, pico={"tie": True}),
    "qwen3_vl-image": Case("qwen3_vl_image", "qwen3_vl_moe_text", 0, 4, 32, pad_to=40, pico={"tie": True}),
    "qwen3_vl-dense-last-image": Case("qwen3_vl_image", "qwen3_vl_moe_text", 0, 4, 32, pad_to=40, dense_layers=(3,)),
    "mistral3-text": Case("mistral3_image", "mixtral", 0, 4, 32, text_only=True),
    "gemma4-text": Case("gemma4_image", "gemma4_text", 32, 4, 24, text_only=True),
    "gemma3-text": Case("gemma3_image", "tiny_onn", 32, 4, 24, text_only=True),
    "qwen3_5-text": Case("qwen3_5_image", "qwen3_5_moe_text", 32, 4, 24, text_only=True, tolerance=3e-5),
    "qwen3_5-image": Case("qwen3_5_image", "qwen3_5_moe_text", 32, 4, 24, tolerance=3e-5, pico={"tie": True}),
}


def write_case(folder: Path, case: Case) -> None:
    """Write a dense checkpoint, its logits, and the MoE emitted from it."""
    if case.source.endswith(IMAGE):
        dense = write_checkpoint(case.source, folder / "dense")
        if case.pico.get("tie"):
            tie_embeddings(dense)
        whole = AutoModelForImageTextToText.from_pretrained(dense, dtype=torch.float32)
        batch = {"input_ids": torch.arange(33).view(3, 11)} if case.text_only else image_inputs(whole)
    else:
        pico = {"rope_parameters": PLAIN_ROPE, "layers": LAYERS, "hidden": HIDDEN} | case.pico
        dense = write_pico(folder / "dense", case.source, intermediate=case.width, dtype=case.dtype, **pico)
        whole = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
        batch = {"input_ids": torch.arange(33).view(3, 11)}
    with torch.no_grad():
        logits = whole(**batch).logits
    assert logits.std() > 0.5
    save_file({**batch, "logits": logits}, folder / "dense_logits.safetensors")
    target, decoder = MOE_TARGETS[case.target], find_decoder(dense, text_only=case.text_only)
    assert decoder.width == case.width
    assert not check_target(decoder, target, case.shape)
    with DenseReader(dense) as reader:

        def experts(layer: int):
            return slice_experts(reader.projections(layer), *neurons_of(case, layer))

        emit_checkpoint(
            dense,
            folder / "moe",
            target=target,
            shape=case.shape,
            routers=lambda _layer: torch.zeros(case.experts, decoder.hidden),
            experts=experts,
            pad_to=case.pad_to,
            text_only=case.text_only,
            tied_embeddings=case.tied_embeddings,
        )


def tie_embeddings(folder: Path) -> None:
    """Make the output embedding of a checkpoint that of the input."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for part in (config, config["text_config"]):
        part["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensors[name] for name in tensors if "lm_head" not in name}, folder / "model.safetensors")


def neurons_of(case: Case, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(E, N) neurons and (S,) always-on neurons of a layer, in another random order for each layer."""
    order = torch.randperm(case.width, generator=torch.Generator().manual_seed(layer)).int()
    always_on, routed = order[: case.always_on], order[case.always_on :]
    return routed.view(case.experts, case.n), always_on


def reload_all(folder: Path, *, path: Path | None = None) -> dict[str, dict[str, Any]]:
    """Load every case of a folder in a fresh process; packages in `path` precede the installed ones."""
    script = Path(__file__).with_name("reload_checkpoints.py")
    environment = os.environ | ({"PYTHONPATH": str(path)} if path else {})
    # Deprecation warnings of another transformers release are no errors.
    strict = [] if path else ["-W", "error"]
    done = subprocess.run(
        [sys.executable, *strict, script, folder], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, dict[str, Any]] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return report

import subprocess
import sys
from pathlib import Path

from pico import bare_decoder

from models.config import MoEShape
from models.targets.config import MOE_TARGETS
from models.targets.config_json import emit_config
from models.targets.tiny_onn import CODE_FILES, copy_code
from models.tiny_onn.configuration_tiny_onn import TinyONNConfig

SOURCE = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 24,
    "vocab_size": 61,
    "tie_word_embeddings": True,
    "torch_dtype": "float16",
    "transformers_version": "4.51.0",
    "quantization_config": {"quant_method": "bitsandbytes"},
}


def test_config_json_says_the_whole_model():
    before, target = dict(SOURCE), MOE_TARGETS["tiny_onn"]
    shape = MoEShape(experts=5, n=7, top_k=1, always_on=3)
    keys = emit_config(bare_decoder(SOURCE), target, shape, "bfloat16", tied=True)
    assert before == SOURCE
    assert keys == {
        "architectures": ["TinyONNForCausalLM"],
        "model_type": "tiny_onn",
        "auto_map": {
            "AutoConfig": "configuration_tiny_onn.TinyONNConfig",
            "AutoModel": "modeling_tiny_onn.TinyONNModel",
            "AutoModelForCausalLM": "modeling_tiny_onn.TinyONNForCausalLM",
        },
        "num_experts": 5,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 8,
        "shared_intermediate_size": 8,
        "routed_scaling_factor": 2.0,
        "norm_topk_prob": False,
        "scoring": "sigmoid",
        "topology": "per_layer",
        "dense_layers": [],
        "router_aux_loss_coef": 0.0,
        "output_router_logits": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        "dense_class": "Qwen3ForCausalLM",
        "ffn": {"layers": "model.layers", "module": "mlp", "activation": "act_fn"},
        "transformers_version": "4.51.0",
        "dense": {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "hidden_size": 24,
            "vocab_size": 61,
            "tie_word_embeddings": True,
            "transformers_version": "4.51.0",
        },
    }
    assert TinyONNConfig(**keys).dense.tie_word_embeddings


def test_all_the_code_that_is_imported_is_copied(tmp_path):
    copy_code(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(CODE_FILES)
    for path in tmp_path.iterdir():
        lines = path.read_text().splitlines()
        wanted = [line.split()[1].removeprefix(".") + ".py" for line in lines if line.startswith("from .")]
        assert set(wanted) <= set(CODE_FILES)
        assert not [line for line in lines if line.startswith(("from models", "import models", "from jaxtyping"))]


def test_writing_a_checkpoint_needs_no_torch():
    script = "import sys, models.targets.config, models.targets.config_json; print({'torch'} & set(sys.modules))"
    root = Path(__file__).parents[4]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"

"""What to type instead of words that other programs know."""

import re
from collections.abc import Iterator

from pipeline.help import groups
from pipeline.settings import STAGES

# Key → our word for it; {} stands for its value. A word without = is a sentence.
SYNONYMS = {
    **dict.fromkeys(("path", "checkpoint", "pretrained", "model_path", "model_name", "name_or_path"), "model={}"),
    **dict.fromkeys(("model.name_or_path", "model_name_or_path", "model_id", "base_model"), "model={}"),
    **dict.fromkeys(("text", "texts", "corpus", "dataset", "data_path", "dataset_name", "train_file"), "data={}"),
    **dict.fromkeys(("device", "cuda_device"), "model.device={}"),
    **dict.fromkeys(("gpu", "cuda", "gpu_id"), "model.device=cuda:{}"),
    **dict.fromkeys(("dtype", "torch_dtype", "precision"), "model.dtype={}"),
    **dict.fromkeys(("lr", "learning_rate", "train.lr", "train.learning_rate"), "train.expert_rate={}"),
    **dict.fromkeys(("epochs", "steps", "max_steps", "train.epochs", "train.steps"), "train.tokens=1000000"),
    **dict.fromkeys(("batch_size", "scan.batch_size", "bs"), "scan.batch_tokens=4096"),
    **dict.fromkeys(("train.batch_size", "per_device_train_batch_size"), "train.batch={}"),
    **dict.fromkeys(("seq_len", "sequence_length", "max_seq_len", "max_seq_length", "max_len"), "data.max_length={}"),
    **dict.fromkeys(("tokens", "num_tokens", "nsamples", "num_samples"), "data.tokens={}"),
    **dict.fromkeys(("dry_run", "dry", "plan_only", "estimate"), "plan={}"),
    **dict.fromkeys(("resume", "resume_from_checkpoint"), "the same command again goes on where it stopped"),
    **dict.fromkeys(("force", "overwrite", "no_cache"), "fresh={}"),
    **dict.fromkeys(("load_in_4bit", "model.load_in_4bit"), "model.quantization=nf4"),
    **dict.fromkeys(("quantize=true", "quantization=true"), "model.quantization=nf4"),
    **dict.fromkeys(("quantize", "quantization"), "model.quantization={}"),
    **dict.fromkeys(("load_in_8bit", "model.load_in_8bit"), "model.quantization=int8"),
    **dict.fromkeys(("assemble.experts", "num_experts", "n_experts", "num_local_experts"), "experts={}"),
    **dict.fromkeys(("k", "topk", "assemble.top_k", "num_experts_per_tok", "active_experts"), "top_k={}"),
    **dict.fromkeys(("expert_size", "expert_width", "moe_intermediate_size", "cluster.n"), "n={}"),
    **dict.fromkeys(("density", "ratio", "active_ratio"), "active={}"),
    "sparsity": "give the share that stays active, 1 - {}, as active=",
    **dict.fromkeys(("target", "architecture", "arch"), "assemble.target={}"),
    **dict.fromkeys(("workers", "nproc", "num_processes", "gpus"), "torchrun --nproc-per-node={} -m pipeline"),
    **dict.fromkeys(("output", "output_folder", "outdir", "out", "save_path", "out_dir"), "output_dir={}"),
    **dict.fromkeys(("verbose", "v", "debug_level", "log_level"), "outputs/latest/run.log has every message"),
    "push_to_hub": "hf upload OWNER/NAME outputs/latest/checkpoint",
    "template": "data.chat_template={}",
    **dict.fromkeys(("stage=carve", "stage=run"), "stage=all"),
    "stage=plan": "plan=true",
}
# Words without =.
COMMANDS = {
    **dict.fromkeys(("carve", "run"), "stage=all"),
    "plan": "plan=true",
    **{stage: f"stage={stage}" for stage in ("all", *STAGES)},
}
# Values of choices, by other names.
VALUES = {
    **{name: "nf4" for name in ("int4", "4bit", "q4", "4")},
    **{name: "int8" for name in ("8bit", "q8", "8")},
    **{name: "bfloat16" for name in ("bf16", "torch.bfloat16")},
    **{name: "float16" for name in ("fp16", "half", "f16", "torch.float16")},
    **{name: "float32" for name in ("fp32", "float", "f32", "torch.float32")},
}
_UNITS = {"k": 10**3, "m": 10**6, "b": 10**9, "ki": 2**10, "mi": 2**20}


def other_values(value: object) -> Iterator[object]:
    """What a value may mean: 1M, 1e6, 50 %, another name, one item of a list."""
    text = str(value).lower()
    if text in VALUES:
        yield VALUES[text]
    if found := re.fullmatch(r"(\d{1,18}(?:\.\d*)?|\.\d+)\s*([kmb]i?)?(%)?", text, re.ASCII):
        number = float(found[1]) * _UNITS.get(found[2] or "", 1)
        yield from (int(number),) if number == int(number) and not found[3] else ()
        yield number / 100
    yield [value]


def presets_like(group: str, value: str) -> str:
    """The remedy for an unknown model or text."""
    like = [name for name in groups()[group] if name.startswith(value[:4])]
    place = {"model": "model=/FOLDER, model=OWNER/NAME", "data": "data=/FILE_OR_FOLDER, data=OWNER/DATASET"}[group]
    return f"{place} or a preset such as {group}={' or '.join(like[:3] or groups()[group][:3])}"

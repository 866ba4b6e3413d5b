"""Run in a fresh process: load the named TinyONN checkpoints and report what they compute.

    python -W error reload_tiny_onn.py <folder of cases> '{"registered": [<case>...], "remote": [<case>...]}'

`registered` imports the project; `remote` uses only the code in the checkpoint's folder, in a fork that has imported
transformers alone. Reads `<case>/moe` and `<case>/dense_logits.safetensors`, writes `<registered or remote>.json`. Runs
with transformers 4.57 and 5.
"""

import importlib
import json
import logging
import os
import sys
import traceback
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM


def main() -> None:
    folder = Path(sys.argv[1])
    for how, names in json.loads(sys.argv[2]).items():
        if not (child := os.fork()):
            code = 1
            try:
                write_report(folder, how, names)
                code = 0
            finally:
                if code:
                    traceback.print_exc()
                    sys.stderr.flush()
                os._exit(code)
        if os.waitpid(child, 0)[1]:
            sys.exit(1)


def write_report(folder: Path, how: str, names: list[str]) -> None:
    remote = how == "remote"
    if not remote:
        sys.path.insert(0, str(Path(__file__).parents[2]))
        importlib.import_module("models.tiny_onn.register")
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("transformers").addHandler(handler)
    report = {}
    for name in names:
        warned.clear()
        report[name] = reload(folder / name, trust_remote_code=remote) | {"warnings": list(warned)}
        report[name]["decoder"] = reload_decoder(folder / name, trust_remote_code=remote)
    (folder / f"{how}.json").write_text(json.dumps(report), encoding="utf-8")


@torch.no_grad()
def reload(case: Path, *, trust_remote_code: bool) -> dict[str, object]:
    remote = {"trust_remote_code": True} if trust_remote_code else {}
    model, info = AutoModelForCausalLM.from_pretrained(
        case / "moe", dtype=torch.float32, output_loading_info=True, **remote
    )
    dense = load_file(case / "dense_logits.safetensors")
    ids = dense["ids"]
    logits = model(ids).logits
    model.save_pretrained(case / "again")
    again = AutoModelForCausalLM.from_pretrained(case / "again", dtype=torch.float32, **remote)
    half = AutoModelForCausalLM.from_pretrained(case / "moe", dtype=torch.bfloat16, **remote)
    return {
        "module": type(model).__module__.split(".")[0],
        "difference": float((logits - dense["logits"]).abs().max()),
        "again": float((again(ids).logits - logits).abs().max()),
        "loading": {name: str(found) for name, found in info.items() if found},
        "cached": generate(model, ids, use_cache=True),
        "uncached": generate(model, ids, use_cache=False),
        "bias_dtypes": sorted({str(b.dtype) for n, b in half.named_buffers() if n.endswith("correction_bias")}),
        "tied": model.lm_head.weight is model.get_input_embeddings().weight,
    }


@torch.no_grad()
def reload_decoder(case: Path, *, trust_remote_code: bool) -> float | None:
    """Largest difference of AutoModel's last hidden states; None for a pool or without an AutoModel class."""
    config = json.loads((case / "moe" / "config.json").read_text())
    if config["topology"] == "global_pool" or (trust_remote_code and "AutoModel" not in config["auto_map"]):
        return None
    remote = {"trust_remote_code": True} if trust_remote_code else {}
    model, decoder = (
        kind.from_pretrained(case / "moe", dtype=torch.float32, **remote) for kind in (AutoModelForCausalLM, AutoModel)
    )
    ids = load_file(case / "dense_logits.safetensors")["ids"]
    return float((decoder(ids).last_hidden_state - model.model(ids).last_hidden_state).abs().max())


def generate(model: torch.nn.Module, ids: torch.Tensor, *, use_cache: bool) -> list[list[int]]:
    prompt = ids[:2, :5]
    generated = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=9, min_new_tokens=9, do_sample=False,
        use_cache=use_cache,
    )  # fmt: skip
    return generated[:, 5:].tolist()


if __name__ == "__main__":
    main()

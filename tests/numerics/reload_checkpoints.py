"""Run in a fresh process: load every emitted checkpoint with transformers alone and report what it computes.

    python -W error reload_checkpoints.py <folder of cases>

Reads `<case>/moe` and the dense model's logits in `<case>/dense_logits.safetensors`, writes `report.json`.
"""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def main() -> None:
    folder = Path(sys.argv[1])
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    # Kernels that are not installed are those of the dense model, too.
    handler.addFilter(lambda record: "is falling back to its reference" not in record.getMessage())
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    # Kernels that are faster, and that this machine may lack.
    handler.addFilter(lambda record: "is not installed" not in record.getMessage())
    logging.getLogger("transformers").addHandler(handler)
    report = {}
    for case in sorted(path.parent for path in folder.glob("*/moe")):
        warned.clear()
        report[case.name] = reload(case) | {"warnings": list(warned)}
    (folder / "report.json").write_text(json.dumps(report), encoding="utf-8")


@torch.no_grad()
def reload(case: Path) -> dict[str, object]:
    dense = load_file(case / "dense_logits.safetensors")
    model, info = load(case / "moe", dtype=torch.float32, output_loading_info=True)
    wanted = dense.pop("logits")
    logits = model(**dense).logits
    model.save_pretrained(case / "again")
    config = json.loads((case / "moe" / "config.json").read_text(encoding="utf-8"))
    prompt = dense["input_ids"][:1, :3]
    generated = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, min_new_tokens=4)
    return {
        "transformers": transformers.__version__,
        "architecture": type(model).__name__,
        "difference": float((logits - wanted).abs().max()),
        "scale": float(wanted.std()),
        "saved_again": float((load(case / "again")(**dense).logits - logits).abs().max()),
        "loading": {name: str(found) for name, found in info.items() if found},
        "generated": generated.shape[1] - prompt.shape[1],
        "own_dtype": f"torch.{config['dtype']}",
    }


def load(folder: Path, **arguments: Any):
    """Load as a user does, with remote code only for the project's own class."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    wrapped = "text_config" in config
    auto = getattr(transformers, config["architectures"][0]) if wrapped else AutoModelForCausalLM
    own = {"trust_remote_code": True} if config["model_type"] == "tiny_onn" else {}
    return auto.from_pretrained(folder, **own, **arguments)


if __name__ == "__main__":
    main()

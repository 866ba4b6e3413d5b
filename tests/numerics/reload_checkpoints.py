"""Run in a fresh process by test_emission: load every emitted checkpoint with transformers alone and say what it gave.

    python -W error reload_checkpoints.py <folder of cases>

Reads `<case>/moe` and the dense model's logits in `<case>/dense_logits.safetensors`, writes `report.json`.
"""

import json
import logging
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def main() -> None:
    folder = Path(sys.argv[1])
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("transformers").addHandler(handler)
    report = {}
    for case in sorted(path.parent for path in folder.glob("*/moe")):
        warned.clear()
        report[case.name] = reload(case) | {"warnings": list(warned)}
    (folder / "report.json").write_text(json.dumps(report), encoding="utf-8")


@torch.no_grad()
def reload(case: Path) -> dict[str, object]:
    model, info = AutoModelForCausalLM.from_pretrained(case / "moe", dtype=torch.float32, output_loading_info=True)
    dense = load_file(case / "dense_logits.safetensors")
    ids = dense["ids"]
    prompt = ids[:1, :3]
    generated = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, min_new_tokens=4)
    return {
        "architecture": type(model).__name__,
        "difference": float((model(ids).logits - dense["logits"]).abs().max()),
        "loading": {name: str(found) for name, found in info.items() if found},
        "generated": generated.shape[1] - prompt.shape[1],
        "own_dtype": str(AutoModelForCausalLM.from_pretrained(case / "moe", dtype="auto").dtype),
    }


if __name__ == "__main__":
    main()

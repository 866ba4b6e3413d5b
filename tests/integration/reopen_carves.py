"""Run in a fresh process: open dense and carved checkpoints with transformers alone, and report what they compute.

    python -W error reopen_carves.py <folder>

Reads `cases.json`, {carve: {dense, checkpoints, sequences, remote?}}; writes `report.json`, {carve: {dense or stage:
findings}}.
"""

import json
import logging
import sys
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

WARNED: list[str] = []


def main() -> None:
    folder = Path(sys.argv[1])
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: WARNED.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("transformers").addHandler(handler)
    cases = json.loads((folder / "cases.json").read_text())
    report = {name: reopen(**case) for name, case in cases.items()}
    (folder / "report.json").write_text(json.dumps(report))


def reopen(
    dense: str, checkpoints: dict[str, str], sequences: list[list[int]], *, remote: bool = False
) -> dict[str, dict[str, object]]:
    """The findings for the dense model and each stage; `remote` trusts the checkpoint's code."""
    code = {"trust_remote_code": True} if remote else {}
    ids = [torch.tensor([sequence]) for sequence in sequences]
    model = load_dense(dense)
    wanted = logits_of(model, ids[0])
    report: dict[str, dict[str, object]] = {"dense": {"loss": loss_of(model, ids)}}
    for stage, checkpoint in checkpoints.items():
        WARNED.clear()
        model, info = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, output_loading_info=True, **code
        )
        report[stage] = {
            "architecture": type(model).__name__,
            "loading": {name: str(found) for name, found in info.items() if found},
            "difference": float((logits_of(model, ids[0]) - wanted).abs().max()),
            "loss": loss_of(model, ids),
            **speak(model, checkpoint, code),
            **train(model, ids[0]),
            "warnings": list(WARNED),
        }
    return report


@cache
def load_dense(folder: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def logits_of(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model(ids).logits


@torch.no_grad()
def loss_of(model: PreTrainedModel, sequences: list[Tensor]) -> float:
    """Mean over all predicted tokens, one sequence at a time: no padding, and transformers' own loss."""
    total = sum(float(model(ids, labels=ids).loss) * (ids.shape[1] - 1) for ids in sequences)
    return total / sum(ids.shape[1] - 1 for ids in sequences)


def speak(model: PreTrainedModel, checkpoint: str, code: dict[str, bool]) -> dict[str, object]:
    """Generate after a prompt, with the checkpoint's own tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, **code)
    prompt = tokenizer("three sparrows met", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=5, min_new_tokens=5, do_sample=False)[0]
    length = prompt["input_ids"].shape[1]
    return {"prompt": tokenizer.decode(answer[:length]), "generated": len(answer) - length}


def train(model: PreTrainedModel, ids: Tensor) -> dict[str, object]:
    """One step: norms of the routers' gradients, and the loss before and after."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    before = model(ids, labels=ids).loss
    before.backward()
    routers = [parameter for name, parameter in model.named_parameters() if name.endswith(".gate.weight")]
    norms = [float(parameter.grad.norm()) for parameter in routers]
    optimizer.step()
    return {"router_gradients": norms, "losses": [before.item(), model(ids, labels=ids).loss.item()]}


if __name__ == "__main__":
    main()

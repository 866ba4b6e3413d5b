"""Time prompts and generation of a carve in transformers by implementation of its experts, beside the dense model.

PYTHONPATH=.:tests python -m studies.kernel_speed DENSE CARVE [--dtype bfloat16] [--prompts 512 2048 8192]
"""

import argparse
from statistics import median
from time import perf_counter

import torch
from transformers import AutoModelForCausalLM

from models.training import LARGE_PRODUCTS

ROUNDS, GENERATED = 3, 24


def seconds(model, ids, generated=0):
    """Of one pass over the prompt, or of a prompt of 32 tokens and its continuation."""
    began = perf_counter()
    if generated:
        ids, length = ids[:, :32], {"min_new_tokens": generated, "max_new_tokens": generated}
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **length)
    else:
        model(ids, use_cache=True, logits_to_keep=1)
    return perf_counter() - began


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dense")
    parser.add_argument("carve")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 2048, 8192], help="lengths in tokens")
    wanted = parser.parse_args()
    models = {}
    for name in ("dense", "grouped_mm", "eager", LARGE_PRODUCTS):
        folder, kernels = wanted.carve, {"experts_implementation": name}
        if name == "dense":
            folder, kernels = wanted.dense, {}
        models[name] = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, wanted.dtype), **kernels)
    vocabulary = models["dense"].config.vocab_size
    ids = torch.randint(vocabulary, (1, max(wanted.prompts)), generator=torch.Generator().manual_seed(0))
    for length in [0, *wanted.prompts]:  # 0: generation, a token
        times = {name: [] for name in models}
        for _ in range(ROUNDS):  # in turn, so that a slower minute slows all
            for name, model in models.items():
                if length:
                    times[name].append(seconds(model, ids[:, :length]))
                else:
                    whole, first = seconds(model, ids, 1 + GENERATED), seconds(model, ids, 1)
                    times[name].append((whole - first) / GENERATED)
        dense = median(times["dense"])
        for name, each in times.items():
            print(f"{length:6} {name:16}{median(each):8.3f} s{median(each) / dense:8.2f} of the dense model's")  # noqa: T201


if __name__ == "__main__":
    main()

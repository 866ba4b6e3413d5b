"""The command line of the benchmarks, and the model, the batch and the passes that they compare."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from models.config import ModelConfig
from models.loading import load_dense, resolve_device
from models.source import EMBEDDED
from stages.losses import forward_losses
from stages.scan.config import ScanConfig
from stages.scan.passes import draw_reservoir
from stages.text.batches import TokenBatch
from stages.text.config import DataConfig

# Rows are measured by group; redis needs redis-server and redis-benchmark on the PATH.
GROUPS = ("scan", "forward", "scanner", "memory", "carve", "mscan", "redis", "moe", "dump", "watch")
SHAPES = {
    "qwen3-1.7b": {
        "model_type": "qwen3",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    }
}


def read_options(words: Sequence[str] | None = None) -> Namespace:
    """Parse the command line."""
    parser = ArgumentParser("benchmarks", description="Speed and memory, as ratios measured in one run.")
    parser.add_argument("--model", type=Path, help="folder of a dense checkpoint (default: the embedded model)")
    parser.add_argument("--shape", choices=[*SHAPES], help="random weights in a known shape, instead of a folder")
    parser.add_argument("--random", action="store_true", help="draw the weights of --model, too, instead of reading")
    parser.add_argument("--device", default="auto", help="cpu, cuda ... (default: a GPU where there is one)")
    parser.add_argument("--dtype", default="auto", help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--tokens", type=int, default=2048, help="of a batch")
    parser.add_argument("--length", type=int, default=256, help="of a sequence")
    parser.add_argument("--repetitions", type=int, default=7, help="of every measurement, after one that warms up")
    parser.add_argument("--experts", type=int, default=16, help="of the MoE timed against the dense model")
    parser.add_argument("--active", type=float, nargs="+", default=[0.5, 0.25], help="its shares of active neurons")
    parser.add_argument("--steps", type=int, default=16, help="tokens decoded after each sequence")
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=GROUPS, metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--json", type=Path, help="also write every single measurement here")
    return parser.parse_args(words)


@dataclass(frozen=True)
class Workbench:
    """A frozen model and one batch for it."""

    name: str
    model: PreTrainedModel
    batch: TokenBatch
    slots_BT: Tensor  # the default settings' share of tokens keeps its bits
    device: torch.device

    @property
    def width(self) -> int:
        """FFN width F."""
        return self.model.config.intermediate_size

    def first_sequence(self) -> "Workbench":
        """The same model with the batch's first sequence."""
        batch = self.batch
        one = TokenBatch(batch.input_ids[:1], batch.attention_mask[:1], batch.labels[:1], batch.names[:1])
        return replace(self, batch=one, slots_BT=self.slots_BT[:1])

    def forward_labels(self) -> Tensor:
        """Loss of a plain forward pass with labels."""
        inputs = {"input_ids": self.batch.input_ids, "attention_mask": self.batch.attention_mask}
        inputs |= {"labels": self.batch.labels}
        moved = {name: tensor.to(self.device) for name, tensor in inputs.items()}
        return self.model(**moved, use_cache=False).loss

    def train_step(self) -> None:
        """A training step without the optimizer."""
        self.forward_labels().backward()

    def frozen_step(self) -> None:
        """Forward and backward with a gradient for the embeddings only, as in the scan."""
        forward_losses(self.model, self.batch, inplace_backward_logits=True).sum().backward()

    def thaw(self) -> None:
        """All weights require gradients and have none yet."""
        self.model.requires_grad_(True).zero_grad(set_to_none=True)

    def freeze(self) -> None:
        """No weight requires or keeps a gradient."""
        self.model.zero_grad(set_to_none=True)
        self.model.requires_grad_(False)


def make_workbench(options: Namespace) -> Workbench:
    """Load or draw the model, and draw the tokens. Raises UserError: the device or the model cannot be used."""
    device = resolve_device(ModelConfig(device=options.device))
    dtype = options.dtype
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else "bfloat16"
    folder = options.model or EMBEDDED
    if options.shape or options.random:
        model = _draw_model(options.shape, folder, getattr(torch, dtype), device)
    else:
        model = load_dense(ModelConfig(kind="local", path=str(folder), device=str(device), dtype=dtype), folder)
    name = options.shape or folder.name
    return Workbench(name, model, *_draw_batch(model.config.vocab_size, options), device)


def _draw_model(shape: str | None, folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    config = AutoConfig.for_model(**SHAPES[shape]) if shape else AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.requires_grad_(False).eval()


def _draw_batch(vocabulary: int, options: Namespace) -> tuple[TokenBatch, Tensor]:
    samples = max(1, options.tokens // options.length)
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(vocabulary, (samples, options.length), generator=generator)
    names = [f"sequence {number}" for number in range(samples)]
    drawn = round(ids_BT.numel() * ScanConfig().reservoir_tokens / DataConfig().tokens)
    slots_BT = draw_reservoir(ids_BT.numel(), max(1, drawn), 0).view_as(ids_BT)
    return TokenBatch(ids_BT, torch.ones_like(ids_BT), ids_BT.clone(), names), slots_BT

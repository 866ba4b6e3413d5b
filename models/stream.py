"""A dense model run layer by layer from its shards, one layer in memory at a time.

Many streams of hidden states can pass the same layers side by side (the dense model, the carved one, baselines), each
with its own FFN. Memory is the hidden states plus one layer, whatever the model's size.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from models.checkpoint.reader import ShardReader
from models.errors import ConfigError
from models.ffn import DenseFFN


class _CaptureFFN(nn.Module):
    """Stands in for a layer's FFN: keeps the input, adds nothing."""

    x: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        return torch.zeros_like(x)


class StreamLayer:
    """One decoder layer: attention by transformers' own code, FFN by whoever streams."""

    def __init__(self, module: nn.Module, ffn: DenseFFN, rotary: nn.Module) -> None:
        """Replace the layer's FFN by one that only shows its input."""
        self.ffn = ffn
        self._capture = _CaptureFFN()
        module.mlp = self._capture
        self._module, self._rotary = module, rotary

    @torch.no_grad()
    def attend(self, hidden_BTD: Float[Tensor, "B T D"]) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T D"]]:
        """Residual stream after attention, and the FFN's input; the layer's output is residual + FFN(input).

        Right padding needs no mask: under causal attention no real token sees it.
        """
        positions = torch.arange(hidden_BTD.shape[1], device=hidden_BTD.device)[None]
        residual = self._module(
            hidden_BTD,
            attention_mask=None,
            position_ids=positions,
            position_embeddings=self._rotary(hidden_BTD, positions),
        )
        return (residual[0] if isinstance(residual, tuple) else residual), self._capture.x


class LayerStream:
    """The layers, embedding and head of one checkpoint of a supported dense family."""

    def __init__(self, folder: Path, *, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        """Read the configuration; weights are read when they are needed."""
        self.config = AutoConfig.from_pretrained(folder, local_files_only=True)
        self.config._attn_implementation = "sdpa"
        self.device, self.dtype = device, dtype
        self._reader = ShardReader(folder)
        with torch.device("meta"):
            self._skeleton = AutoModelForCausalLM.from_config(self.config, dtype=dtype).eval()
        decoder = self._skeleton.get_decoder()
        self._rotary = type(decoder.rotary_emb)(self.config).to(device)

    def __enter__(self) -> "LayerStream":
        """Keep the shards open."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close the shards."""
        self._reader.close()

    @property
    def depth(self) -> int:
        """L."""
        depth: int = self.config.num_hidden_layers
        return depth

    def embed(self, batches: Sequence[Tensor]) -> list[Tensor]:
        """Hidden states (B, T, D) before the first layer, for token ids (B, T); B and T differ from batch to batch."""
        self._check_window(max((ids.shape[1] for ids in batches), default=0))
        table_VD = self._reader.tensor("model.embed_tokens.weight")
        return [table_VD[ids].to(self.device, self.dtype) for ids in batches]

    def layers(self) -> Iterator[StreamLayer]:
        """Every decoder layer in order; the one before is freed."""
        for index, module in enumerate(self._skeleton.get_decoder().layers):
            act = module.mlp.act_fn
            weights = self._layer_weights(index)
            gate_FD, up_FD, down_DF = (weights.pop(f"mlp.{name}_proj.weight") for name in ("gate", "up", "down"))
            ffn = DenseFFN(gate_FD, up_FD, down_DF, act)
            attention = _without_ffn(module)
            attention.load_state_dict(weights, assign=True)
            yield StreamLayer(attention, ffn, self._rotary)
            attention.to("meta")

    def head(self) -> Callable[[Float[Tensor, "B T D"]], Float[Tensor, "B T V"]]:
        """Final norm and output embedding, as a function from hidden states to logits."""
        norm: nn.Module = self._skeleton.get_decoder().norm
        norm.load_state_dict({"weight": self._tensor("model.norm.weight")}, assign=True)
        tied = self.config.tie_word_embeddings or "lm_head.weight" not in self._reader.names
        output_VD = self._tensor("model.embed_tokens.weight" if tied else "lm_head.weight")

        def logits(hidden_BTD: Tensor) -> Tensor:
            result: Tensor = norm(hidden_BTD) @ output_VD.T
            return result

        return torch.no_grad()(logits)

    def _tensor(self, name: str) -> Tensor:
        return self._reader.tensor(name).to(self.device, self.dtype)

    def _layer_weights(self, index: int) -> dict[str, Tensor]:
        prefix = f"model.layers.{index}."
        names = [name for name in self._reader.names if name.startswith(prefix)]
        return {name.removeprefix(prefix): self._tensor(name) for name in names}

    def _check_window(self, length: int) -> None:
        window: Any = getattr(self.config, "sliding_window", None)
        if window and getattr(self.config, "use_sliding_window", True) and length > window:
            raise ConfigError(
                f"sequences of {length} tokens are longer than the model's attention window of {window}",
                where="data.max_length",
                do=f"data.max_length={window}",
            )


def _without_ffn(module: nn.Module) -> nn.Module:
    module.mlp = nn.Identity()
    return module

"""Twenty-five small healthy models of six kinds, each with a batch and a loss; instruments must not report problems."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from pico_moes import make_moe
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

B, T, V = 4, 12, 61


def convnet(norm: Callable[[int], nn.Module], act: type[nn.Module], widths: tuple[int, ...]) -> nn.Module:
    """Convolutions, a mean over positions, a classification head."""
    layers: list[nn.Module] = []
    for inputs, outputs in zip((3, *widths), widths, strict=False):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), norm(outputs), act()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


class ResBlock(nn.Module):
    """The weight of the last norm starts at 0, as usual, so the convolutions get no gradient at step 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.last = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        nn.init.zeros_(self.last.weight)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.last(self.second(self.norm(self.first(x)).relu()))).relu()


class Recurrent(nn.Module):
    """Token numbers in, logits of the next token out."""

    def __init__(self, cell: type[nn.RNNBase], **kind: Any) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(V, 24), cell(24, 32, batch_first=True, **kind)
        self.head = nn.Linear(32 * (1 + self.cell.bidirectional), V)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.cell(self.embed(ids))[0])


class PlainMoE(nn.Module):
    """Experts in a loop, each called with its tokens; an expert without tokens is not called."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(V, 24), nn.LayerNorm(24)
        self.router, self.head = nn.Linear(24, experts, bias=False), nn.Linear(24, V)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24)) for _ in range(experts)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        flat = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            if len(token):
                out = out.index_add(0, token, (expert(flat[token]) * weights[token, place, None]).to(out.dtype))
        return self.head(x + out.view_as(x))


class Transformer(nn.Module):
    """torch's own encoder layers."""

    def __init__(self, **kind: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, 4, 48, dropout=0.0, batch_first=True, **kind)
        self.embed, self.head = nn.Embedding(V, 24), nn.Linear(24, V)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(ids)))


class PlainViT(nn.Module):
    """Patches, torch's own encoder layers, a head on their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 24, 4, stride=4), nn.Linear(24, 10)
        self.places = nn.Parameter(0.02 * torch.randn(16, 24))
        layer = nn.TransformerEncoderLayer(24, 4, 48, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, pixel_values: Tensor) -> Tensor:
        patches = self.patches(pixel_values).flatten(2).mT + self.places
        return self.head(self.encoder(patches).mean(1))


SIZES = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": V,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
IMAGE = {"image_size": 16, "patch_size": 4, "num_channels": 3}


def from_config(kind: str, auto: Any = AutoModel, **changes: Any) -> nn.Module:
    """A model of transformers."""
    return auto.from_config(AutoConfig.for_model(kind, **{**SIZES, **changes}), attn_implementation="eager")


decoder = partial(from_config, auto=AutoModelForCausalLM)
GPT2 = {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64}
# Name, which begins with the kind → constructor.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "cnn batch norm": lambda: convnet(nn.BatchNorm2d, nn.ReLU, (8, 16)),
    "cnn group norm": lambda: convnet(lambda width: nn.GroupNorm(4, width), nn.SiLU, (8, 16, 16)),
    "cnn no norm": lambda: convnet(lambda _: nn.Identity(), nn.Tanh, (8, 16)),
    "cnn residual": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3), ResBlock(8), ResBlock(8), nn.Flatten(), nn.Linear(1568, 10)
    ),
    "lstm": lambda: Recurrent(nn.LSTM),
    "lstm bidirectional": lambda: Recurrent(nn.LSTM, bidirectional=True),
    "lstm deep": lambda: Recurrent(nn.LSTM, num_layers=3),
    "lstm gru": lambda: Recurrent(nn.GRU, num_layers=2),
    "vit": lambda: from_config("vit", **IMAGE),
    "vit deit": lambda: from_config("deit", **IMAGE),
    "vit plain": PlainViT,
    "vit beit": lambda: from_config("beit", **IMAGE),
    "encoder bert": lambda: from_config("bert"),
    "encoder roberta": lambda: from_config("roberta", max_position_embeddings=80),
    "encoder electra": lambda: from_config("electra", embedding_size=16),
    "encoder torch": Transformer,
    "encoder torch pre-norm": lambda: Transformer(norm_first=True, activation="gelu"),
    "decoder llama": lambda: decoder("llama", num_key_value_heads=2),
    "decoder gpt2": lambda: decoder("gpt2", **GPT2),
    "decoder qwen3": lambda: decoder("qwen3", num_key_value_heads=2, head_dim=8),
    "decoder gemma2": lambda: decoder("gemma2", num_key_value_heads=2, head_dim=8),
    "moe plain": lambda: PlainMoE(5),
    "moe plain many": lambda: PlainMoE(16),
    "moe mixtral": lambda: make_moe("mixtral"),
    "moe qwen3": lambda: make_moe("qwen3_moe"),
}  # fmt: skip


def make(name: str, seed: int = 0) -> nn.Module:
    """Build the model; its weights depend on the seed alone."""
    torch.manual_seed(seed)
    return MODELS[name]()


def batch_of(name: str, step: int = 0) -> dict[str, Tensor] | tuple[Tensor]:
    """Arguments of the forward pass: token numbers or images."""
    draw = torch.Generator().manual_seed(step)
    if name.startswith(("cnn", "vit")):
        pixels = torch.randn(B, 3, 16, 16, generator=draw)
        return {"pixel_values": pixels} if name.startswith("vit") else (pixels,)
    ids = torch.randint(3, V, (B, T), generator=draw)
    plain = name.startswith(("lstm", "encoder torch", "moe plain"))
    return (ids,) if plain else {"input_ids": ids}


def loss_of(name: str, model: nn.Module, step: int = 0) -> Tensor:
    """Cross entropy of the next token or of a class; for a bare encoder, the squared distance of its outputs to 0.5."""
    batch = batch_of(name, step)
    made = model(**batch) if isinstance(batch, dict) else model(*batch)
    if name.startswith("cnn") or name == "vit plain":
        return functional.cross_entropy(made, torch.arange(B))
    logits = made if isinstance(made, Tensor) else getattr(made, "logits", None)
    if logits is None:
        parts = [part for part in (made.last_hidden_state, getattr(made, "pooler_output", None)) if part is not None]
        return torch.stack([(part - 0.5).square().mean() for part in parts]).sum()
    ids = batch["input_ids"] if isinstance(batch, dict) else batch[0]
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())

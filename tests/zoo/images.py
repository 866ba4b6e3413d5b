"""Inputs with an image for image-text models, made by hand in the form that the model takes, without a processor."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

GRID = 4  # patches along each side of the image
TOKENS = ("image_token_id", "image_token_index")  # names of the token that an image's features replace
BEFORE, AFTER = 6, 10  # tokens of text before and after the image


class NoImageError(Exception):
    """Why no image can be made for a model; without text for a model that takes none."""


@torch.no_grad()
def image_inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """Token ids and an image that the model's forward takes. Raises NoImageError."""
    taken = inspect.signature(model.forward).parameters
    if "pixel_values" not in taken:
        raise NoImageError
    token = next((getattr(model.config, name) for name in TOKENS if hasattr(model.config, name)), None)
    failures: list[str] = []
    for image in images(model.config, taken):
        try:
            batch = with_text(model, image, token, taken)
            model(**batch, use_cache=False)
            return batch
        except Exception as error:  # noqa: BLE001 - the next form may be the right one
            failures.append(f"{type(error).__name__}: {str(error)[:80]}")
    raise NoImageError(f"no image: {'; '.join(dict.fromkeys(failures))}")


def images(config: PretrainedConfig, taken: Any) -> Iterator[dict[str, Tensor]]:
    """The same image in all forms that could fit the arguments of forward; the first that fits is used."""
    vision = getattr(config, "vision_config", config)
    patch, side = _of(vision, "patch_size", 14), _of(vision, "image_size", 56)
    channels = _of(vision, "num_channels", None) or _of(vision, "in_channels", 3)
    draw = torch.Generator().manual_seed(0)

    def pixels(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    if "image_grid_thw" in taken:
        frames = _of(vision, "temporal_patch_size", None) or _of(vision, "patch_temporal", 1)
        width = channels * frames * patch**2
        grid = {"image_grid_thw": torch.tensor([[1, GRID, GRID]])}
        grid |= {"image_merge_sizes": torch.tensor([1])} if "image_merge_sizes" in taken else {}
        yield {"pixel_values": pixels(GRID**2, width), **grid}
        yield {"pixel_values": pixels(GRID**2, channels, patch, patch), **grid}
        yield {"pixel_values": pixels(1, GRID**2, channels, patch, patch), **grid}
    if "image_position_ids" in taken:  # one position for each patch, or for each of those that are pooled to a token
        pooled = GRID * _of(vision, "pooling_kernel_size", 1)
        for rows, extent in ((pooled, patch), (GRID, getattr(vision, "model_patch_size", patch))):
            places = torch.cartesian_prod(torch.arange(rows), torch.arange(rows))[None]
            yield {"pixel_values": pixels(1, rows**2, channels * extent**2), "image_position_ids": places}
    if "spatial_shapes" in taken:
        yield {
            "pixel_values": pixels(1, GRID**2, channels * patch**2),
            "spatial_shapes": torch.tensor([[GRID, GRID]]),
            "pixel_attention_mask": torch.ones(1, GRID**2, dtype=torch.long),
        }
    if "target_sizes" in taken:
        yield {
            "pixel_values": pixels(1, channels, patch, GRID**2 * patch),
            "target_sizes": torch.tensor([[GRID, GRID]]),
        }
    for extent in (side, GRID * patch):
        sizes = {"image_sizes": torch.tensor([[extent, extent]])} if "image_sizes" in taken else {}
        for tiles in ((), (1,), (2,), (5,)):
            image = pixels(1, *tiles, channels, extent, extent)
            yield {"pixel_values": image}
            yield {"pixel_values": image, **sizes}


def with_text(model: PreTrainedModel, image: dict[str, Tensor], token: int | None, taken: Any) -> dict[str, Tensor]:
    """The image within a text, with as many image tokens as the model makes features of it."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(64, vocabulary - 64, (1, BEFORE + AFTER), generator=torch.Generator().manual_seed(1))
    if token is None:
        return {"input_ids": ids, **image}
    marks = torch.full((1, count_features(model, image)), token)
    ids = torch.cat([ids[:, :BEFORE], marks, ids[:, BEFORE:]], 1)
    kinds = {name: (ids == token).long() for name in ("token_type_ids", "mm_token_type_ids") if name in taken}
    return {"input_ids": ids, **image, **kinds}


def count_features(model: PreTrainedModel, image: dict[str, Tensor]) -> int:
    """How many vectors of the decoder's hidden size the model makes of an image."""
    function = getattr(model, "get_image_features", None) or model.model.get_image_features
    known = inspect.signature(function).parameters
    image = image if {"args", "kwargs"} & known.keys() else {name: image[name] for name in image if name in known}
    found = function(**image)
    hidden = model.config.get_text_config(decoder=True).hidden_size
    for output in (getattr(found, "pooler_output", None), found, getattr(found, "last_hidden_state", None)):
        parts = output if isinstance(output, list | tuple) else [output]
        if all(isinstance(part, Tensor) and part.shape[-1] == hidden for part in parts):
            return sum(part.numel() for part in parts) // hidden
    raise ValueError("no features of the hidden size")


def _of(config: PretrainedConfig, name: str, otherwise: Any) -> Any:
    """A value of a configuration; the first of a pair."""
    value = getattr(config, name, None)
    if isinstance(value, list | tuple):
        value = value[-1]
    return otherwise if value is None else value

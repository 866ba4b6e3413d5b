"""Draws of tokens that depend on the seed, the prompt and the step alone."""

from collections.abc import Sequence
from hashlib import blake2b

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import LogitsProcessor


class SeededSampling(LogitsProcessor):  # type: ignore[misc]  # transformers is not typed
    """Noise under which the largest logit is a draw from softmax(logits / temperature).

    Every prompt has noise of its own at every step, so that its continuation depends neither on its batch nor on what
    was drawn before: batches, workers and resumed runs give the same tokens.

    Numerics: fp32; argmax(z + τ·g) with Gumbel noise g = -log(Exp(1)) follows softmax(z / τ) exactly.
    Source: the Gumbel-max trick, arXiv:1411.0030.
    """

    def __init__(self, numbers: Sequence[int], *, temperature: float, seed: int, prompt_length: int) -> None:
        """Sample a batch.

        Args:
            numbers: of its prompts, one per row.
            temperature: τ, above 0.
            seed: of all draws.
            prompt_length: tokens of a row before the first written one, padding included.
        """
        self.numbers, self.temperature, self.seed, self.prompt_length = numbers, temperature, seed, prompt_length

    def __call__(self, input_ids: Int64[Tensor, "B T"], scores: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        """Add the noise of this step to the logits."""
        step = input_ids.shape[1] - self.prompt_length
        noise_BV = torch.empty_like(scores, dtype=torch.float32)
        for row_V, number in zip(noise_BV, self.numbers, strict=True):
            generator = torch.Generator(scores.device).manual_seed(draw_seed(self.seed, number, step))
            row_V.exponential_(generator=generator).log_()
        return scores - self.temperature * noise_BV


def draw_seed(seed: int, number: int, step: int) -> int:
    """A seed of its own for each prompt and step."""
    return int.from_bytes(blake2b(f"{seed} {number} {step}".encode(), digest_size=7).digest(), "big")

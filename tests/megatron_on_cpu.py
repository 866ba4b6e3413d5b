"""Megatron-core on the CPU: three CUDA functions are replaced, the installed files are not changed."""

import warnings
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron_sizes import GROUPS, HEADS, B, D, F, L, T, V

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # on Apex, Transformer Engine and Megatron's own deprecations
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.transformer_config import TransformerConfig


@contextmanager
def megatron_group(rank=0, world=1, store=None):
    """Initialise torch.distributed (gloo) and Megatron's groups, with tensor parallelism over all processes."""
    answers = ExitStack()
    answers.enter_context(patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")))
    answers.enter_context(patch.object(random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()))
    answers.enter_context(patch.object(random, "_set_cuda_rng_state", lambda *_, **__: None))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    try:
        yield
    finally:
        answers.close()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def make_gpt(world=1, **settings):
    """A GPT of Megatron's local layer specification, with the same weights for any number of processes."""
    torch.manual_seed(0)
    shape = dict(
        num_layers=L,
        hidden_size=D,
        ffn_hidden_size=F,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        tensor_model_parallel_size=world,
        gated_linear_unit=True,
        add_bias_linear=False,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return GPTModel(
            TransformerConfig(**shape, **settings),
            get_gpt_layer_local_spec(),
            vocab_size=V,
            max_sequence_length=2 * T,
            share_embeddings_and_output_weights=False,
        )


def make_batches(count=2):
    """Arguments of the model's forward pass."""
    ids = torch.randint(V, (count, B, T), generator=torch.Generator().manual_seed(1))
    positions, mask = torch.arange(T).expand(B, T), torch.ones(1, 1, T, T).triu(1).bool()
    return [{"input_ids": one, "position_ids": positions, "attention_mask": mask, "labels": one} for one in ids]

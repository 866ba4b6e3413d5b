"""The dense model and its tokenizer through transformers: frozen, from local files only."""

import ctypes
import gc
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import get_max_memory
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from instruments.errors import CheckpointError, ConfigError, UserError, first_line, printable, some
from models.checkpoint.folder import read_checkpoint
from models.checkpoint.shards import ShardReader
from models.config import ModelConfig, memory_bytes
from models.ffn import separate_ffns
from models.quantization import import_bitsandbytes, stored_quantization
from models.source import read_config
from models.structure import model_class
from models.targets.config import text_of
from models.targets.config_json import source_dtype
from models.training import LARGE_PRODUCTS

logger = logging.getLogger(__name__)


def _escape(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(record.getMessage()), ()
    return True


for _handler in logging.getLogger("transformers").handlers:
    _handler.addFilter(_escape)  # its report of what was loaded shows names of tensors as they are

_BELONGS = "check that config.json belongs to these weights, or download the checkpoint again"


def placement(model: ModelConfig, device: torch.device) -> dict[str, Any]:
    """Placement arguments of `from_pretrained`: everything on `device`, or memory limits per device.

    With a CPU as `device` no GPU is used. Weights that fit in no memory stay on disk and are read when needed.
    """
    if model.device_map == "none":
        return {"device_map": {"": device}}
    free = get_max_memory()
    # In bytes: accelerate reads 20gb as bits, and no TB.
    limits: dict[int | str, int] = {"cpu": memory_bytes(model.cpu_memory) if model.cpu_memory else free["cpu"]}
    if device.type != "cpu":
        most = memory_bytes(model.gpu_memory) if model.gpu_memory else None
        limits |= {place: free[place] if most is None else most for place in free if place != "cpu"}
    return {"device_map": model.device_map, "max_memory": limits}


def is_offloaded(model: nn.Module) -> bool:
    """Whether weights are copied from memory or disk each time they are used.

    Autograd would keep every copy until the backward pass; with gradient checkpointing it keeps those of one layer at
    a time.
    """
    return any(parameter.device.type == "meta" for parameter in model.parameters())


def input_device(model: PreTrainedModel) -> torch.device:
    """The embeddings' device, which token ids, masks and labels must be on; logits are returned on it."""
    return execution_device(model.get_input_embeddings())


def execution_device(module: nn.Module) -> torch.device:
    """The device where a module with a weight computes, even if the weight is kept elsewhere."""
    device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    return module.weight.device if device is None else torch.device(device)  # type: ignore[return-value]


def resolve_device(model: ModelConfig) -> torch.device:
    """The device in `model.device`; auto takes a GPU if there is one. Raises ConfigError."""
    if model.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(model.device)
        found = 1 if device.type == "cpu" else torch.get_device_module(device).device_count()
    except RuntimeError as error:
        raise ConfigError(f"unknown device {model.device!r}", where="model.device", do="model.device=auto") from error
    if (device.index or 0) >= found:
        what = f"device {model.device} is not here: {found} GPUs found"
        raise ConfigError(what, where="model.device", do="model.device=auto, or model.device=cpu")
    return device


def resolve_dtype(model: ModelConfig, device: torch.device) -> torch.dtype | None:
    """The number format in `model.dtype`; None: the checkpoint's own, which auto takes on a GPU."""
    if model.dtype == "auto":
        # CPUs often multiply half precision more slowly than float32.
        return torch.float32 if device.type == "cpu" else None
    dtype: torch.dtype = getattr(torch, model.dtype)
    return dtype


def load_tokenizer(folder: Path, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint. Raises CheckpointError: it is missing, unusable or another model's."""
    vocabulary = _stated_vocabulary(folder)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
        # If files are missing, some architectures get a tokenizer without a vocabulary and no error: it finds no token
        # (Qwen), or only unknown ones (Gemma).
        found, special = tokenizer("text", add_special_tokens=False)["input_ids"], {*tokenizer.all_special_ids}
        if not found or (special.issuperset(found) and special.issuperset(tokenizer.get_vocab().values())):
            raise ValueError("it finds no token in plain text")
        if vocabulary is not None and (tokens := int(tokenizer.vocab_size)) > vocabulary:
            raise ValueError(f"it has {tokens} tokens, the model {vocabulary}")
        if vocabulary is not None and len(tokenizer) > vocabulary:
            _warn_of_tokens(len(tokenizer), vocabulary)
    except BaseException as error:  # the files are untrusted, and tokenizer classes raise errors of any type
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        do = "put the model's tokenizer files beside its config.json, both as they were downloaded"
        raise CheckpointError(f"no usable tokenizer: {first_line(error)}", where=str(folder), do=do) from error
    return tokenizer


@cache  # every stage loads the same tokenizer
def _warn_of_tokens(known: int, vocabulary: int) -> None:
    """Warn of tokens without an embedding. Some checkpoints are published so; their text does not contain them."""
    beyond = known - vocabulary
    logger.warning("%d added tokens of the tokenizer have no embedding: text must not contain them", beyond)


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id for padding; 0 if the tokenizer has none, or one that has no embedding in its checkpoint."""
    known, pad_id = vocabulary_size(tokenizer), tokenizer.pad_token_id
    return 0 if pad_id is None or (known is not None and pad_id >= known) else int(pad_id)


@lru_cache(maxsize=2)  # asked for every question, and checking the folder reads its large JSON files
def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Number of tokens of the model in the tokenizer's folder; None: its config.json does not state it."""
    return _stated_vocabulary(Path(tokenizer.name_or_path))


def _stated_vocabulary(folder: Path) -> int | None:
    """`vocab_size` in config.json: of a wrapper in its text part, of TinyONN in `dense`, which may be a wrapper."""
    whole = read_config(folder)
    dense = whole.get("dense")
    parts = [part for one in (whole, dense) if isinstance(one, Mapping) for part in (text_of(one), one)]
    return next((size for part in parts if isinstance(size := part.get("vocab_size"), int)), None)


@contextmanager
def explained_loading(folder: Path) -> Iterator[None]:
    """Turn transformers' errors into CheckpointError; errors about memory pass."""
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the files are untrusted, and transformers' classes raise errors of any type
        if "DefaultCPUAllocator" in str(error):
            raise
        what = f"transformers cannot load this checkpoint: {first_line(error)}"
        hidden = "during automatic conversion" in what  # then any error of joining experts, with its reason in the log
        do = f"more free memory of GPU or host, if the lines above say so; else {_BELONGS}" if hidden else _BELONGS
        raise CheckpointError(what, where=str(folder), do=do) from error


def is_panic(error: BaseException) -> bool:
    """Whether a tokenizer's compiled code failed, whose error is no Exception and has no class to import."""
    return type(error).__name__ == "PanicException"


def experts_argument(config: PreTrainedConfig, implementation: str) -> str | dict[str, str]:
    """As transformers takes it; a wrapper's class may refuse what its text part takes."""
    return {"text_config": implementation} if "text_config" in config.sub_configs else implementation


def load_whole(folder: Path, **arguments: Any) -> PreTrainedModel:  # noqa: ANN401 - those of from_pretrained
    """Load the model in this folder, frozen and in evaluation mode.

    Raises CheckpointError: weights are missing or of another shape; transformers would initialise them at random.
    """
    with explained_loading(folder):
        _check_size(folder, trust_remote_code=bool(arguments.get("trust_remote_code")))
        remote = bool(arguments.get("trust_remote_code"))
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=remote)
        kind = _class_of(config, remote=remote)
        if kernels := arguments.get("experts_implementation"):
            arguments["experts_implementation"] = experts_argument(config, kernels)
        if stored_quantization(read_config(folder)) == "fp8":
            loaded, found = _load_decoded(kind, folder, config, arguments)
        else:
            given = {"local_files_only": True, "use_safetensors": True, "output_loading_info": True, **arguments}
            # The class alone would read EXAONE's config.json as a Llama's, without the other names of its keys.
            loaded, found = kind.from_pretrained(folder, config=config, **given)
    drawn = sorted({*found["missing_keys"], *(str(entry[0]) for entry in found["mismatched_keys"])})
    if drawn:
        what = f"{len(drawn)} weights of the model are not in the checkpoint, or of another shape"
        raise CheckpointError(what, where=f"{folder}: {some(drawn, 3, ', ')}", do=_BELONGS)
    model: PreTrainedModel = loaded
    return model.requires_grad_(False).eval()


def load_carved(folder: Path, model: ModelConfig, dtype: torch.dtype, offload_folder: Path) -> PreTrainedModel:
    """Load the checkpoint, frozen, with the placement settings of the dense `model`.

    Weights that do not fit on the devices go to `offload_folder`: transformers joins experts while loading, so it could
    not read them later from the checkpoint's files.
    """
    placed = placement(model, resolve_device(model)) | {"offload_folder": offload_folder}
    return load_whole(folder, dtype=dtype, experts_implementation=LARGE_PRODUCTS, **placed)


@dataclass(frozen=True)
class _Decoded:
    """A tensor that transformers, in several threads, takes by `[...]`, as it takes those of a safetensors file."""

    reader: ShardReader
    name: str

    def __getitem__(self, _whole: object) -> torch.Tensor:
        return self.reader.tensor(self.name)


def _load_decoded(kind: Any, folder: Path, config: PreTrainedConfig, arguments: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """Load FP8 weights as this project decodes them; transformers on a CPU reads only some forms of their scales."""
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    with ShardReader(folder) as reader:
        tensors = {name: _Decoded(reader, name) for name in reader.names}
        dtype = source_dtype(read_config(folder)) or "bfloat16"
        given = {**arguments, "dtype": dtype if arguments.get("dtype", "auto") == "auto" else arguments["dtype"]}
        loaded, found = kind.from_pretrained(None, config=config, state_dict=tensors, output_loading_info=True, **given)
    if (folder / "generation_config.json").is_file():
        loaded.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return loaded, found


def _class_of(config: PreTrainedConfig, *, remote: bool) -> Any:  # noqa: ANN401 - a class with from_pretrained
    """The model's class; a class of the checkpoint's own comes through transformers' automatic one."""
    if remote and hasattr(config, "auto_map"):
        return AutoModelForCausalLM
    return model_class(config)


def _check_size(folder: Path, *, trust_remote_code: bool) -> None:
    """Refuse a config.json that describes more weights than are stored, before allocation. Raises CheckpointError."""
    entries = read_checkpoint(folder).values()
    stored = sum(prod(entry.shape) for entry in entries)
    said = read_config(folder)
    counts = {key: value for key, value in said.items() if key.startswith("num_") and isinstance(value, int)}
    bounds = {key: len(entries) if key == "num_hidden_layers" else stored for key in counts}
    beyond = [f"{key}={value}" for key, value in counts.items() if value > bounds[key]]
    if not beyond:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            kind = _class_of(config, remote=trust_remote_code)
            planned = (kind.from_config if kind is AutoModelForCausalLM else kind._from_config)(config)
        if (size := planned.num_parameters()) > stored:
            beyond.append(f"a model of {size:,} parameters")
    if beyond:
        what = f"config.json says {', '.join(beyond)}, and the weights are {stored:,} numbers"
        raise CheckpointError(what, where=str(folder), do=_BELONGS)


def load_dense(model: ModelConfig, folder: Path) -> PreTrainedModel:
    """Load the dense model, frozen, in evaluation mode, quantised and placed by its settings. Raises UserError.

    Its class is transformers' own, also with `trust_remote_code`: `LayerStream` and the targets know no other.
    """
    device, config = resolve_device(model), read_config(folder)
    dtype, stored = resolve_dtype(model, device), stored_quantization(config)
    quantization = "none" if stored == "fp8" else stored or model.quantization
    arguments = placement(model, device) | {"dtype": dtype or "auto"}
    if quantization == "none":
        dense = load_whole(folder, **arguments)
    else:
        require_bitsandbytes(quantization)
        compute_dtype = dtype or getattr(torch, source_dtype(config) or "bfloat16")
        if stored is None:
            # No double quantisation: it saves only 0.4 bits per weight, and rounds the scales, too.
            four_bits = {"load_in_4bit": True, "bnb_4bit_quant_type": quantization}
            kind = {"load_in_8bit": True} if quantization == "int8" else four_bits
            arguments["quantization_config"] = BitsAndBytesConfig(**kind, bnb_4bit_compute_dtype=compute_dtype)
        dense = load_whole(folder, **arguments)
        prepare_quantised(dense, compute_dtype)
    separate_ffns(dense)
    return dense


def require_bitsandbytes(quantization: str) -> None:
    """Raise ConfigError if bitsandbytes is missing, too old, or without code for the devices here."""
    try:
        import_bitsandbytes()
        # Not at the top: it imports bitsandbytes.
        from transformers.integrations import validate_bnb_backend_availability  # noqa: PLC0415

        validate_bnb_backend_availability(raise_exception=True)
    except (ImportError, OSError, RuntimeError) as error:
        what = f"bitsandbytes cannot be used here: {first_line(error)}"
        do = "pip install -U bitsandbytes, or model.quantization=none and an unquantised checkpoint"
        raise ConfigError(what, where=f"weights in {quantization}", do=do) from error


def prepare_quantised(model: nn.Module, dtype: torch.dtype) -> None:
    """Make a quantised model compute in `dtype`, with gradients on every CPU.

    In a checkpoint stored in 4 or 8 bits, transformers leaves the unquantised weights in their format on disk, even if
    `dtype` is requested. On a CPU with AVX512-BF16, bitsandbytes repacks a weight at its first use without gradients;
    later products with it silently give no gradient.
    """
    # Every product of every int8 layer warns that inputs are cast to float16.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point() and getattr(parameter, "quant_state", None) is None:
                parameter.data = parameter.data.to(dtype)
        if isinstance(module, import_bitsandbytes().nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False
            # A stored checkpoint names its own compute dtype, mostly float32. The forward pass decodes weights to the
            # compute dtype, but the backward pass to the format before quantisation.
            module.compute_dtype, module.compute_type_is_set = dtype, True
            module.weight.quant_state.dtype = dtype


# Parameters of glibc's mallopt, and their values in bytes: blocks of `KEPT_BLOCK` and more are not kept.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _KEPT_MEMORY, KEPT_BLOCK = -1, -3, 2**28, 2**25


def keep_freed_memory() -> None:
    """Let glibc keep up to 256 MiB of freed blocks of up to 32 MiB, its largest, until `release_freed_memory`.

    Without it, most results of 4,096 tokens are fetched from the system page by page, a sixth of a layer pass's time.
    """
    with suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, KEPT_BLOCK)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_MEMORY)


def release_freed_memory() -> None:
    """Collect garbage, return unused blocks of a GPU, of pinned memory, and of the heap if the C library is glibc.

    After many layers of odd-sized tensors glibc keeps hundreds of megabytes, and the next phase would need more on top.
    """
    gc.collect()
    torch.cuda.empty_cache()  # does nothing before the first use of a GPU
    with suppress(AttributeError):
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch._C._host_emptyCache()  # pinned copies of weights
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def explained_memory(where: str, remedy: str) -> Iterator[None]:
    """Turn an out-of-memory error into one that names the setting to lower. Raises UserError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # Pinned memory, and libraries on a full GPU, have errors of other classes.
        signs = ("DefaultCPUAllocator", "CUDA error: out of memory", "STATUS_ALLOC_FAILED")
        of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in str(error) for sign in signs)
        if not of_memory:
            raise
        raise UserError(f"out of memory: {first_line(error)}", where=where, do=remedy) from error

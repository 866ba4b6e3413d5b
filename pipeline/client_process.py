"""Runs one step in a serving client's interpreter: `PYTHON client_process.py STEP REQUEST.json RESULT.json`.

Started by `pipeline.gguf` and `pipeline.serve_check`. It imports nothing of this project, which is not installed in an
interpreter with transformers 4.57, llama.cpp or vLLM. Both files hold a JSON object; REQUEST has the arguments of the
step's function.
"""

import json
import math
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

CLIENTS = ("transformers", "llama_cpp", "vllm", "sentencepiece")


def probe() -> dict[str, str]:
    """Client → version, for the clients of this interpreter, and the package that llama.cpp's converter needs."""
    distributions = packages_distributions()
    return {client: version(distributions[client][0]) for client in CLIENTS if client in distributions}


def convert(llama_cpp: str, checkpoint: str, out: str, outtype: str, head: bool) -> dict[str, str]:
    """Run llama.cpp's converter, with three corrections to its tokenizer code.

    The converter recognises pre-tokenizers by a hash that depends on the vocabulary, so plain byte-level ones with
    another vocabulary are set to GPT-2's. It also assumes that every Glm4Moe model has GLM's special tokens,
    and every HunYuanMoEV1 the tokenizer in Python of one model. `head`: tied embeddings are written twice, for the
    classes of llama.cpp that demand an output embedding.
    """
    sys.path[:0] = [llama_cpp, f"{llama_cpp}/gguf-py"]
    import convert_hf_to_gguf  # type: ignore[import-not-found]  # noqa: PLC0415 - of llama.cpp
    from conversion.base import TextModel  # type: ignore[import-not-found]  # noqa: PLC0415
    from conversion.hunyuan import HunYuanMoEModel  # type: ignore[import-not-found]  # noqa: PLC0415

    by_hash, glm_vocabulary = TextModel.get_vocab_base_pre, TextModel._set_vocab_glm

    def pre_tokenizer(model: Any, tokenizer: Any) -> str:  # noqa: ANN401 - of llama.cpp
        try:
            name: str = by_hash(model, tokenizer)
        except NotImplementedError:
            if not _is_gpt2(Path(checkpoint)):
                raise
            name = "gpt-2"
        return name

    def vocabulary(model: Any) -> None:  # noqa: ANN401
        tokens = json.loads((Path(checkpoint) / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
        own = "[gMASK]" in [token["content"] for token in tokens]
        glm_vocabulary(model) if own else model._set_vocab_gpt2()

    TextModel.get_vocab_base_pre, TextModel._set_vocab_glm = pre_tokenizer, vocabulary
    HunYuanMoEModel.set_vocab = TextModel._set_vocab_gpt2
    if head:
        index_tensors = TextModel.index_tensors

        def with_head(model: Any, *args: Any, **keys: Any) -> dict[str, Any]:  # noqa: ANN401
            tensors: dict[str, Any] = index_tensors(model, *args, **keys)
            return {"lm_head.weight": tensors["model.embed_tokens.weight"], **tensors}

        TextModel.index_tensors = with_head
    # A carve has no layers that predict the second next token, without which Qwen3.5's class stops; as by --no-mtp.
    TextModel.no_mtp = True
    sys.argv = ["convert_hf_to_gguf.py", checkpoint, "--outfile", out, "--outtype", outtype]
    convert_hf_to_gguf.main()
    return {"out": out}


def _is_gpt2(checkpoint: Path) -> bool:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    splitter = tokenizer.get("pre_tokenizer") or {}
    plain = splitter.get("type") == "ByteLevel" and splitter.get("use_regex", True)
    return plain and not splitter.get("add_prefix_space") and tokenizer.get("normalizer") is None


def quantise(source: str, out: str, outtype: str, threads: int) -> dict[str, str]:
    """Run llama.cpp's quantiser."""
    import llama_cpp  # noqa: PLC0415

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{outtype.upper()}")
    parameters.nthread = threads
    if status := llama_cpp.llama_model_quantize(source.encode(), out.encode(), parameters):
        raise RuntimeError(f"llama_model_quantize returned {status}")
    return {"out": out}


def count(llama_cpp: str, file: str) -> dict[str, Any]:
    """Type → weights and bytes of the tensors in a GGUF file."""
    sys.path.insert(0, f"{llama_cpp}/gguf-py")
    from gguf import GGUFReader  # noqa: PLC0415 - of llama.cpp

    found: dict[str, list[int]] = {}
    for tensor in GGUFReader(file).tensors:
        weights, size = found.setdefault(tensor.tensor_type.name, [0, 0])
        found[tensor.tensor_type.name] = [weights + int(tensor.n_elements), size + int(tensor.n_bytes)]
    return found


def measure_transformers(
    model: str, ids: Sequence[int], text: str, threads: int, experts: str | dict[str, str] | None, architecture: str
) -> dict[str, Any]:
    """Log-probabilities in fp32, and the tokens of the text."""
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    more = {"experts_implementation": experts} if experts else {}
    remote = architecture.startswith("Auto")  # a class of the checkpoint's own
    kind = getattr(transformers, architecture)
    loaded = kind.from_pretrained(model, dtype=torch.float32, trust_remote_code=remote, **more)
    found = _answers(loaded(torch.tensor([list(ids)])).logits[0, :-1].log_softmax(-1).numpy(), ids)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model, trust_remote_code=remote)
    found["tokens"] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


def measure_llama(model: str, ids: Sequence[int], text: str, threads: int) -> dict[str, Any]:
    """The same for a GGUF file in llama.cpp, with an fp32 KV cache."""
    import llama_cpp  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415

    llama_cpp.llama_backend_init()
    loaded = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
    if not loaded:
        raise RuntimeError("llama.cpp cannot load the file")
    vocabulary = llama_cpp.llama_model_get_vocab(loaded)
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = len(ids)
    settings.n_threads = settings.n_threads_batch = threads
    settings.type_k = settings.type_v = llama_cpp.GGML_TYPE_F32
    settings.flash_attn_type = 0  # it rounds to 16 bits
    context = llama_cpp.llama_init_from_model(loaded, settings)
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, i, 1, 0, True
    if status := llama_cpp.llama_decode(context, batch):
        raise RuntimeError(f"llama_decode returned {status}")
    size = llama_cpp.llama_vocab_n_tokens(vocabulary)
    logits = [llama_cpp.llama_get_logits_ith(context, i) for i in range(len(ids) - 1)]
    rows_TV = np.array([np.ctypeslib.as_array(row, (size,)) for row in logits], dtype=np.float64)
    rows_TV -= rows_TV.max(1, keepdims=True)
    found = _answers(rows_TV - np.log(np.exp(rows_TV).sum(1, keepdims=True)), ids)
    data = text.encode()
    buffer = (llama_cpp.llama_token * (len(data) + 8))()
    count = llama_cpp.llama_tokenize(vocabulary, data, len(data), buffer, len(buffer), False, False)
    found["tokens"] = list(buffer[:count])
    return found


def measure_vllm(model: str, ids: Sequence[int], text: str, remote: bool) -> dict[str, Any]:
    """The same in vLLM, in fp32."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]  # noqa: PLC0415

    settings = {"max_model_len": len(ids) + 8, "max_num_seqs": 1, "enforce_eager": True, "dtype": "float32"}
    loaded = LLM(model, trust_remote_code=remote, enable_prefix_caching=False, **settings)
    wanted = SamplingParams(max_tokens=1, prompt_logprobs=1)
    (answer,) = loaded.generate([{"prompt_token_ids": list(ids)}], wanted, use_tqdm=False)
    pairs = list(zip(ids[1:], answer.prompt_logprobs[1:], strict=True))
    return {
        "log_probabilities": [seen[token].logprob for token, seen in pairs],
        "best": [max(seen, key=lambda token: seen[token].logprob) for _token, seen in pairs],
        "tokens": loaded.get_tokenizer()(text, add_special_tokens=False)["input_ids"],
    }


def _answers(rows_TV: Any, ids: Sequence[int]) -> dict[str, Any]:  # noqa: ANN401 - an array
    """Log-probability of each next token of `ids`, and the likeliest token at each position."""
    return {
        "log_probabilities": [float(row[token]) for row, token in zip(rows_TV, ids[1:], strict=True)],
        "best": [int(row.argmax()) for row in rows_TV],
    }


STEPS: dict[str, Callable[..., dict[str, Any]]] = {
    "probe": probe,
    "convert": convert,
    "quantise": quantise,
    "count": count,
    "transformers": measure_transformers,
    "llama.cpp": measure_llama,
    "vLLM": measure_vllm,
}

if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):  # Python 3.10 has no such flag
        sys.path.pop(0)  # this folder, whose gguf.py would hide the package gguf
    step, request, result = sys.argv[1:]
    outcome = STEPS[step](**json.loads(Path(request).read_text(encoding="utf-8")))
    if not all(map(math.isfinite, outcome.get("log_probabilities", []))):
        raise RuntimeError("log-probabilities that are no numbers")
    Path(result).write_text(json.dumps(outcome), encoding="utf-8")

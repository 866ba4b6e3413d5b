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
from time import perf_counter
from typing import Any

CLIENTS = ("transformers", "llama_cpp", "vllm")
Clock = Callable[[], float]  # runs the model once and returns seconds


def probe() -> dict[str, str]:
    """Client → version, for the clients of this interpreter."""
    distributions = packages_distributions()
    return {client: version(distributions[client][0]) for client in CLIENTS if client in distributions}


def convert(llama_cpp: str, checkpoint: str, out: str, outtype: str) -> dict[str, str]:
    """Run llama.cpp's converter, with two corrections to its tokenizer code.

    The converter recognises pre-tokenizers by a hash that depends on the vocabulary, so plain byte-level ones with
    another vocabulary are set to GPT-2's. It also assumes that every Glm4Moe model has GLM's special tokens.
    """
    sys.path[:0] = [llama_cpp, f"{llama_cpp}/gguf-py"]
    import convert_hf_to_gguf  # type: ignore[import-not-found]  # noqa: PLC0415 - of llama.cpp
    from conversion.base import TextModel  # type: ignore[import-not-found]  # noqa: PLC0415

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


def measure_transformers(
    models: Sequence[str], ids: Sequence[int], text: str, rounds: int, sizes: Sequence[int], threads: int,
    experts: str | None, remote: bool,
) -> dict[str, Any]:  # fmt: skip
    """Log-probabilities of the first model, and times of all models, in fp32."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    more = {"experts_implementation": experts} if experts else {}
    load = AutoModelForCausalLM.from_pretrained
    loaded = [load(models[0], dtype=torch.float32, trust_remote_code=remote, **more)]
    loaded += [load(model, dtype=torch.float32) for model in models[1:]]
    rows = loaded[0](torch.tensor([list(ids)])).logits[0].log_softmax(-1)
    found = _answers(rows[:-1].numpy(), ids)
    if (Path(models[0]) / "tokenizer_config.json").exists() and text:
        tokenizer = AutoTokenizer.from_pretrained(models[0], trust_remote_code=remote)
        found["tokens"] = tokenizer(text, add_special_tokens=False)["input_ids"]

    def clocks(model: Any) -> tuple[Clock, Clock]:  # noqa: ANN401
        prompt = torch.tensor([(list(ids) * sizes[0])[: sizes[0]]])

        def read() -> float:
            start = perf_counter()
            model(prompt, logits_to_keep=1)
            return perf_counter() - start

        def write() -> float:
            state = model(prompt, logits_to_keep=1, use_cache=True).past_key_values
            start = perf_counter()
            for place in range(sizes[1]):
                token = prompt[:, place % sizes[0], None]
                state = model(token, past_key_values=state, use_cache=True).past_key_values
            return perf_counter() - start

        return read, write

    return found | _paired([clocks(model) for model in loaded], rounds)


def measure_llama(
    models: Sequence[str], ids: Sequence[int], text: str, rounds: int, sizes: Sequence[int], threads: int
) -> dict[str, Any]:
    """The same for GGUF files in llama.cpp: log-probabilities with an fp32 KV cache, times with its defaults."""
    loaded = [_LlamaModel(model, threads, max(len(ids), sum(sizes))) for model in models]
    found = _answers(loaded[0].log_probabilities(ids)[:-1], ids)
    if text:
        found["tokens"] = loaded[0].tokens(text)
    prompt = (list(ids) * sizes[0])[: sizes[0]]
    return found | _paired([model.clocks(prompt, sizes[1]) for model in loaded], rounds)


class _LlamaModel:
    """A GGUF file loaded by llama.cpp."""

    def __init__(self, path: str, threads: int, length: int) -> None:
        import llama_cpp  # noqa: PLC0415

        self.api, self.threads, self.length = llama_cpp, threads, length
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise RuntimeError("llama.cpp cannot load the file")
        self.vocabulary = llama_cpp.llama_model_get_vocab(self.model)

    def context(self, *, exact: bool) -> Any:  # noqa: ANN401 - of llama.cpp
        settings = self.api.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = self.length
        settings.n_threads = settings.n_threads_batch = self.threads
        if exact:
            settings.type_k = settings.type_v = self.api.GGML_TYPE_F32
            settings.flash_attn_type = 0  # it rounds to 16 bits
        return self.api.llama_init_from_model(self.model, settings)

    def decode(self, context: Any, ids: Sequence[int], start: int, *, all_logits: bool = False) -> None:  # noqa: ANN401
        batch = self.api.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, start + i, 1, 0
            batch.logits[i] = all_logits or i == len(ids) - 1
        status = self.api.llama_decode(context, batch)
        self.api.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        self.api.llama_synchronize(context)

    def log_probabilities(self, ids: Sequence[int]) -> Any:  # noqa: ANN401 - an array
        import numpy as np  # noqa: PLC0415

        context, size = self.context(exact=True), self.api.llama_vocab_n_tokens(self.vocabulary)
        self.decode(context, ids, 0, all_logits=True)
        logits = [self.api.llama_get_logits_ith(context, i) for i in range(len(ids))]
        rows_TV = np.array([np.ctypeslib.as_array(row, (size,)) for row in logits], dtype=np.float64)
        self.api.llama_free(context)
        rows_TV -= rows_TV.max(1, keepdims=True)
        return rows_TV - np.log(np.exp(rows_TV).sum(1, keepdims=True))

    def tokens(self, text: str) -> list[int]:
        data = text.encode()
        buffer = (self.api.llama_token * (len(data) + 8))()
        count = self.api.llama_tokenize(self.vocabulary, data, len(data), buffer, len(buffer), False, False)
        return list(buffer[:count])

    def clocks(self, prompt: Sequence[int], written: int) -> tuple[Clock, Clock]:
        context = self.context(exact=False)

        def read() -> float:
            self.api.llama_memory_clear(self.api.llama_get_memory(context), True)
            start = perf_counter()
            self.decode(context, prompt, 0)
            return perf_counter() - start

        def write() -> float:
            read()
            start = perf_counter()
            for place in range(written):
                self.decode(context, [prompt[place % len(prompt)]], len(prompt) + place)
            return perf_counter() - start

        return read, write


def measure_vllm(
    models: Sequence[str], ids: Sequence[int], text: str, rounds: int, sizes: Sequence[int], remote: bool
) -> dict[str, Any]:
    """The same in vLLM, in fp32."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]  # noqa: PLC0415

    length = max(len(ids), sum(sizes)) + 8
    settings = {"max_model_len": length, "enforce_eager": True, "enable_prefix_caching": False, "dtype": "float32"}
    # The code of the first is the project's own; no other model needs any.
    loaded = [
        LLM(model, trust_remote_code=remote and model == models[0], max_num_seqs=1, **settings) for model in models
    ]
    prompt = {"prompt_token_ids": list(ids)}
    (answer,) = loaded[0].generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=1), use_tqdm=False)
    pairs = list(zip(ids[1:], answer.prompt_logprobs[1:], strict=True))
    found: dict[str, Any] = {
        "log_probabilities": [seen[token].logprob for token, seen in pairs],
        "best": [max(seen, key=lambda token: seen[token].logprob) for _token, seen in pairs],
    }
    if text and (Path(models[0]) / "tokenizer_config.json").exists():
        found["tokens"] = loaded[0].get_tokenizer()(text, add_special_tokens=False)["input_ids"]

    def clocks(model: Any) -> tuple[Clock, Clock]:  # noqa: ANN401
        long = {"prompt_token_ids": (list(ids) * sizes[0])[: sizes[0]]}

        def run(tokens: int) -> float:
            start = perf_counter()
            model.generate([long], SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0), use_tqdm=False)
            return perf_counter() - start

        return lambda: run(1), lambda: run(sizes[1] + 1) - run(1)

    return found | _paired([clocks(model) for model in loaded], rounds)


def _answers(rows_TV: Any, ids: Sequence[int]) -> dict[str, Any]:  # noqa: ANN401 - an array
    """Log-probability of each next token of `ids`, and the likeliest token at each position."""
    return {
        "log_probabilities": [float(row[token]) for row, token in zip(rows_TV, ids[1:], strict=True)],
        "best": [int(row.argmax()) for row in rows_TV],
    }


def _paired(clocks: Sequence[tuple[Clock, Clock]], rounds: int) -> dict[str, Any]:
    """Seconds of every round for prompt and decode; models alternate, the first round is a warm-up."""
    prompt: list[list[float]] = []
    decode: list[list[float]] = []
    for number in range(rounds + 1 if rounds else 0):
        seconds = [[clock[part]() for clock in clocks] for part in (0, 1)]
        if number:
            prompt.append(seconds[0])
            decode.append(seconds[1])
    return {"prompt_seconds": prompt, "decode_seconds": decode}


STEPS: dict[str, Callable[..., dict[str, Any]]] = {
    "probe": probe,
    "convert": convert,
    "quantise": quantise,
    "transformers": measure_transformers,
    "llama.cpp": measure_llama,
    "vLLM": measure_vllm,
}

if __name__ == "__main__":
    step, request, result = sys.argv[1:]
    outcome = STEPS[step](**json.loads(Path(request).read_text(encoding="utf-8")))
    if not all(map(math.isfinite, outcome.get("log_probabilities", []))):
        raise RuntimeError("log-probabilities that are no numbers")
    Path(result).write_text(json.dumps(outcome), encoding="utf-8")

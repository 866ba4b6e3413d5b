"""Every emitted checkpoint is read by transformers 4.57 from a separate folder of packages."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from numerics.emission_cases import CASES, reload_all, write_case
from transformers import AutoTokenizer

from models.emit import copy_tokenizer_files
from models.source import EMBEDDED
from models.targets.config import MOE_TARGETS

pytestmark = pytest.mark.slow
# The image of mistral3-image is larger than its config.json says, which only transformers 5 computes.
KNOWN = [name for name, case in CASES.items() if MOE_TARGETS[case.target].transformers_4 and name != "mistral3-image"]
PACKAGES = (
    "transformers==4.57.6", "huggingface-hub>=0.34,<1", "tokenizers>=0.22,<=0.23",
    # Dependencies of that huggingface-hub; newer ones use another HTTP client.
    "requests", "urllib3", "charset-normalizer", "idna", "certifi",
)  # fmt: skip


@pytest.fixture(scope="module")
def transformers4(pytestconfig: pytest.Config) -> Path:
    """A folder with transformers 4.57 and dependencies that are missing or too new here; kept in pytest's cache."""
    assert pytestconfig.cache is not None
    folder = pytestconfig.cache.mkdir("transformers-4.57.6")
    complete = folder / "complete"
    if complete.exists() and complete.read_text() == repr(PACKAGES):
        return folder
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", folder]
    done = subprocess.run([*command, *PACKAGES], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"transformers 4.57 cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    complete.write_text(repr(PACKAGES))
    return folder


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, transformers4: Path) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("emission")
    for name in KNOWN:
        write_case(folder / name, CASES[name])
    return reload_all(folder, path=transformers4)


@pytest.mark.parametrize("name", KNOWN)
def test_all_experts_on_equals_dense(report: dict[str, dict[str, Any]], name: str) -> None:
    found, case = report[name], CASES[name]
    assert found["transformers"] == "4.57.6"
    assert found["architecture"] == case.architecture
    assert found["difference"] <= case.tolerance * max(1.0, found["scale"])
    assert found["saved_again"] == 0.0
    assert found["loading"] == {}, "missing or unexpected keys"
    assert found["generated"] == 4
    assert found["own_dtype"] == str(case.dtype)


def test_a_copied_tokenizer_gives_the_same_tokens(tmp_path: Path, transformers4: Path) -> None:
    copy_tokenizer_files(EMBEDDED, tmp_path)
    text = "<|user|>\ndef carve(model):  # ½ naïve 🚀\n\treturn 12345<|assistant|><|endoftext|>"
    script = (
        "import sys; from transformers import AutoTokenizer, __version__; "
        "t = AutoTokenizer.from_pretrained(sys.argv[1]); "
        "print(__version__, type(t).__name__, t(sys.argv[2])['input_ids'], t.all_special_tokens)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path, text],
        capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": str(transformers4)},
    )  # fmt: skip
    ours = AutoTokenizer.from_pretrained(EMBEDDED)
    expected = f"4.57.6 PreTrainedTokenizerFast {ours(text)['input_ids']} {ours.all_special_tokens}\n"
    assert done.stdout == expected

"""`compare`: the losses of any checkpoint beside the dense model's."""

import json
from math import exp

import pytest
import torch
from pico import write_pico
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline import compare

TEXT = "A model is compared with the dense one on a text. " * 12


def run(capsys, *words):
    code = compare.main([str(word) for word in (*words, "--device", "cpu")])
    return code, *capsys.readouterr()


def logits_of(folder, ids):
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits.double().log_softmax(-1)


def test_figures_are_those_of_the_models_own_logits(carve, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(TEXT)
    dense = carve.parent / "dense"
    (tmp_path / "LICENSE.txt").write_text("Not read.")
    code, out, _ = run(capsys, dense, carve, dense, "--text", tmp_path, "--length", 64)
    assert code == 0
    assert out.startswith(f"{tmp_path} (1 .txt, without LICENSE.txt)\n")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line[:1] == "|"][2:]
    assert [row[0] for row in rows] == [str(dense), str(carve), str(dense)]
    tokenizer = AutoTokenizer.from_pretrained(dense)
    ids = [*tokenizer(TEXT.strip())["input_ids"], tokenizer.eos_token_id]
    pieces = [torch.tensor([ids[start : start + 64]]) for start in range(0, len(ids), 64)]
    assert f"{len(ids) - len(pieces):,} tokens in {len(pieces)} sequences" in out
    ours, theirs = ([logits_of(folder, piece)[0, :-1] for piece in pieces] for folder in (carve, dense))
    gaps, losses, distances, same = [], [], [], []
    for piece, our, their in zip(pieces, ours, theirs, strict=True):
        targets = piece[0, 1:, None]
        losses.append(-their.gather(1, targets))
        gaps.append(-our.gather(1, targets) - losses[-1])
        distances.append((their.exp() * (their - our)).sum(1))
        same.append(our.argmax(1) == their.argmax(1))
    assert float(rows[0][1]) == pytest.approx(exp(torch.cat(losses).mean()), abs=2e-3)
    assert float(rows[1][2]) == pytest.approx(float(torch.cat(gaps).mean()), abs=1e-4)
    assert float(rows[1][4]) == pytest.approx(float(torch.cat(distances).mean()), abs=1e-4)
    assert float(rows[1][5].rstrip("%")) == pytest.approx(100 * float(torch.cat(same).double().mean()), abs=0.06)
    assert float(rows[1][3]) > 0
    assert rows[0][2:] == ["+0.0000", "–", "–", "–"]
    assert rows[2][2:] == ["+0.0000", "0.0000", "0.0000", "100.0%"]


def test_wrong_inputs(carve, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "latin.txt").write_bytes(b"A text.\ncaf\xe9")
    dense = carve.parent / "dense"
    renamed = write_pico(tmp_path / "renamed", "qwen3", tokenizer=True)
    fast = json.loads((renamed / "tokenizer.json").read_text())
    words = sorted(fast["model"]["vocab"], key=fast["model"]["vocab"].get)
    fast["model"]["vocab"] = {word: (place + 7) % len(words) for place, word in enumerate(words)}
    (renamed / "tokenizer.json").write_text(json.dumps(fast))
    for checkpoints, text, code, where in (
        ((dense, renamed), "text.txt", 2, str(renamed)),
        ((dense, "none"), "text.txt", 1, "none"),
        ((dense, carve), "none.txt", 1, "--text none.txt"),
        ((dense, carve), "latin.txt", 1, "--text latin.txt; latin.txt:2"),
    ):
        found, _, said = run(capsys, *checkpoints, "--text", text)
        assert (found, f"  where: {where}" in said) == (code, True), said
        assert ("iconv" in said) == (text == "latin.txt")
    found, _, said = run(capsys, dense, carve, "--text", "text.txt", "--length", "513")
    assert (found, "  do:    --length 512" in said) == (2, True), said
    with pytest.raises(SystemExit):
        run(capsys, dense, carve, "--text", "text.txt", "--length", "0")

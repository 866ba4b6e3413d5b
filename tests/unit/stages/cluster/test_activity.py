from pico import write_pico

from models.config import ModelConfig
from stages.artifacts.job import Job
from stages.calibration.batches import CalibrationContext
from stages.calibration.config import VocabularyConfig
from stages.cluster.stage import open_activities
from stages.text.config import DataConfig

L, D, F = 3, 24, 40


def test_the_pass_reads_the_calibration_text(tmp_path):
    folder = write_pico(tmp_path / "pico", "qwen3", layers=L, hidden=D, intermediate=F, tokenizer=True)
    data = DataConfig(tokens=96, max_length=32)
    model, job = ModelConfig(kind="local", path=str(folder), device="cpu"), Job({}, tmp_path, tmp_path)

    def read(vocabulary, layers=None, tokens=200):
        context = CalibrationContext.of(model, data, VocabularyConfig(vocabulary, layers), 0, job, 64)
        return [(len(x_TD), ffn.width) for ffn, x_TD in open_activities(context, tokens)]

    assert read(0) == [(96, F)] * L
    assert read(40, 2) == [(96 + 40, F), (96 + 40, F), (96, F)]
    assert read(0, tokens=50) == [(50, F)] * L

"""An output folder with the files that the report reads: manifests, evaluations, a picture."""

import json
from hashlib import sha256
from pathlib import Path

import yaml

from pipeline.artifacts import Manifest, artifact_folder
from pipeline.report import read_chain
from pipeline.run_folder import RunRecord, StageRun
from pipeline.settings import PROJECTED, TRAINED, with_ancestors
from stages.artifacts.job import Table

LAYERS, WIDTH = 3, 40
GAPS = {"dense": 0.0, "carved": 0.05, "static_mask": 0.2, "static_mask_aligned": 0.1, "oracle_aligned": 0.04}
TRAINING = [
    {"step": 0, "phase": "start", "dense_heldout_loss": 2.0, "heldout_loss": 2.25},
    {"step": 5, "phase": "router", "tokens": 500, "load_max_over_mean": 3.5, "load_max_over_mean_average": 2.5},
    {"step": 5, "phase": "router", "heldout_loss": 2.125},
    {"step": 9, "phase": "experts", "tokens": 900, "load_max_over_mean": 1.5, "load_max_over_mean_average": 1.25},
    {"step": 9, "phase": "experts", "heldout_loss": 1.9375},
]
PIXEL = b"\x89PNG\r\n\x1a\n not much of a picture"


class Outputs:
    """Publishes whole chains below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def carve(
        self,
        *,
        label="pico",
        seed=0,
        top_k=2,
        always_on=4,
        gaps=GAPS,
        identity="a",
        text="1234",
        trained=False,
        **settings,
    ):
        """Publish every stage of one carve; returns the evaluation's folder."""
        shape = {"experts": 5, "n": 8, "top_k": top_k, "always_on": always_on} | settings.pop("shape", {})
        nodes = {
            "model": {"label": label, "path": f"/models/{label}"},
            "data": {
                "kind": "text",
                "path": "text.txt",
                "heldout_tokens": 300,
                "tokens": settings.pop("tokens", 900),
                "sample_tokens": settings.pop("sample_tokens", 400),
            },
            "assemble": {"router": settings.pop("router", "ridge")},
            "cluster": {"method": "rank", "map": settings.pop("map", "none")},
            "train": {"tokens": 5000},
            "shape": shape,
            "seed": seed,
        }
        fingerprints, folder, evaluated = {}, Path(), TRAINED if trained else PROJECTED
        for stage in with_ancestors("evaluate", evaluated):
            name = stage.name
            recipe = {
                "stage": name,
                "version": 1,
                "settings": {node: nodes[node] for node in stage.nodes if node in nodes},
                "identity": {"model": {"config": identity}, "data": {"files": [text], "heldout_files": ["5678"]}},
                "parents": {parent: fingerprints[parent] for parent in stage.parents},
            }
            fingerprints[name] = sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
            folder = artifact_folder(self.folder, label, name, fingerprints[name])
            folder.mkdir(parents=True, exist_ok=True)
            files = self.fill(name, folder, shape, gaps)
            Manifest(fingerprints[name], recipe, {key: {} for key in files}, self.table(name, gaps)).write(folder)
        return folder

    def fill(self, name, folder, shape, gaps):
        """Write the files of a stage that the report reads; returns their names."""
        if name == "cluster":
            (folder / "neuron_map_layer_002.png").write_bytes(PIXEL)
            return ["neuron_map_layer_002.png"]
        if name == "train":
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in TRAINING))
            return ["metrics.jsonl"]
        if name != "evaluate":
            return []
        layer = {"error": 0.01, "agreement": 0.7, "imbalance": 1.5, "unused_experts": 1}
        record = {
            "shape": shape,
            "dense_width": WIDTH,
            "lacking": 0.0,
            "heldout_tokens": 290,
            "models": {model: {"loss": 3 + gap, "perplexity": 20 + gap, "gap": gap} for model, gap in gaps.items()},
            "layers": [layer] * LAYERS,
        }
        (folder / "evaluation.json").write_text(json.dumps(record))
        return ["evaluation.json"]

    def table(self, name, gaps):
        if name != "evaluate":
            return Table(name, ["layer", "figure"], [[layer, f"{name} {layer}"] for layer in range(LAYERS)], ["a note"])
        rows = [[model, f"{gap:+.4f}", ""] for model, gap in gaps.items()]
        return Table("evaluate", ["model", "loss gap (nats)", "tokens/s"], rows, ["290 held-out tokens"])

    def run(self, evaluation, *, label="pico", overrides=("stage=all",), kept=("scan",)):
        """Record, label, settings and last result of a run; the stages in `kept` were reused, not computed."""
        config = {"model": {"label": label}, "output_dir": str(self.folder), "seed": 0}
        record = RunRecord(overrides)
        for seconds, (stage, manifest) in enumerate(read_chain(evaluation).items(), 1):
            figures = (None, None) if stage in kept else (float(seconds), seconds << 20)
            record.stages.append(StageRun(stage, manifest.fingerprint, *figures))
        return record, label, yaml.safe_dump(config), evaluation

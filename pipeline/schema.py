"""Every setting there is, typed: the root of the configuration."""

from dataclasses import dataclass, field

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from models.config import ModelConfig
from models.shape import PER_LAYER, TOPOLOGIES
from pipeline.layout import REPOSITORY
from pipeline.stages_table import ALL
from stages.assemble.config import AssembleConfig
from stages.calibration.config import VocabularyConfig
from stages.cluster.config import ClusterConfig
from stages.data.config import DataConfig
from stages.diagnose.config import CHECKS, DiagnoseConfig
from stages.dump.config import DumpStageConfig
from stages.evaluate.config import EvaluateConfig
from stages.extract.config import ExtractConfig
from stages.project.config import ProjectConfig
from stages.scan.config import ScanConfig
from stages.score.config import ScoreConfig
from stages.stores.config import StoreConfig
from stages.train.config import TrainConfig


@dataclass
class Settings:
    """The dials, and one node per configuration group. conf/config.yaml says what each dial means."""

    stage: str = ALL
    check: str = field(default=CHECKS[0], metadata={"choices": CHECKS})
    topology: str = field(default=PER_LAYER, metadata={"choices": TOPOLOGIES})
    experts: int | None = field(default=MISSING, metadata={"minimum": 1})
    n: int | None = field(default=MISSING, metadata={"minimum": 1})
    top_k: int | None = field(default=None, metadata={"minimum": 1})
    always_on: int | None = field(default=None, metadata={"minimum": 0})
    active: float = field(default=0.5, metadata={"above": 0, "maximum": 1})
    seed: int = field(default=0, metadata={"minimum": 0})
    fresh: bool = False
    output_dir: str = MISSING

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    vocabulary: VocabularyConfig = field(default_factory=VocabularyConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    scan: ScanConfig = field(default_factory=ScanConfig)
    score: ScoreConfig = field(default_factory=ScoreConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    extract: ExtractConfig = field(default_factory=ExtractConfig)
    assemble: AssembleConfig = field(default_factory=AssembleConfig)
    project: ProjectConfig = field(default_factory=ProjectConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    dump: DumpStageConfig = field(default_factory=DumpStageConfig)
    diagnose: DiagnoseConfig = field(default_factory=DiagnoseConfig)


def register_schema() -> None:
    """Make the schema known to Hydra as `schema`, and `${repository:}` as the folder of this repository."""
    ConfigStore.instance().store("schema", node=Settings)
    OmegaConf.register_new_resolver("repository", lambda: str(REPOSITORY), replace=True)


def to_settings(config: DictConfig) -> Settings:
    """Resolve a composed configuration, once; below this call there are only dataclasses."""
    settings = OmegaConf.to_object(config)
    assert isinstance(settings, Settings)
    return settings

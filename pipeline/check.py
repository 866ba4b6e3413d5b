"""Finds all errors in the settings before any weights are loaded, and reports them together."""

import logging
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from math import isfinite
from operator import gt, le, lt
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from instruments.cpu import lacks_bfloat16
from instruments.errors import ConfigError, UserError
from models.check import check_source
from models.checkpoint.folder import expand_user
from models.config import GLOBAL_POOL, PER_LAYER, MoEShape, is_on_host, setting_word
from models.decoder import Decoder
from models.finding import source_decoder
from models.source import config_folder, explained_config
from models.targets.base import ALIGNMENT, MoETarget, expert_width, long_texts
from models.targets.config import check_target
from pipeline.advice import SYNONYMS, other_values, presets_like
from pipeline.disk import nearest_existing
from pipeline.help import LOCAL, OVERLAYS, groups
from pipeline.settings import LOOKING, PLACES, TRAINED, Settings, enables, unneeded
from pipeline.shape import ShapeRequest, dense_layer_errors, find_remedy, resolve_shape, shape_faults
from stages.accumulators.redis_connection import check_store
from stages.artifacts.job import find_workers
from stages.diagnose.config import CHECKS
from stages.evaluate.config import POOL_BASELINES, EvaluateConfig
from stages.text.check import check_data, check_length, check_template, check_training
from stages.text.config import DataConfig, TrainingData, list_sources
from stages.train.config import TrainConfig

logger = logging.getLogger(__name__)

LARGEST = 2**63 - 1
# Default maximum of an integer setting, by the last word of its name; a larger value is a typing error.
MAX_COUNTS = {"steps": 10**6, "rounds": 1000, "tokens": 10**12}
# Topology → settings that the other one does not read.
READ_BY = {
    PER_LAYER: ("project.descent_", "project.refit_tokens", "assemble.balance=", "vocabulary."),
    GLOBAL_POOL: ("project.pool_",),
}
LIMITS = {"minimum": (lt, "at least"), "above": (le, "above"), "maximum": (gt, "at most")}


def find_fields(node: Any, prefix: str = "") -> Iterator[tuple[str, Any, Field[Any]]]:  # noqa: ANN401 - any dataclass
    """Dotted name, value and field of every setting, at any depth."""
    for spec in fields(node):
        value, name = getattr(node, spec.name), f"{prefix}{spec.name}"
        if is_dataclass(value):
            yield from find_fields(value, f"{name}.")
        elif isinstance(value, list) and value and is_dataclass(value[0]):
            for number, item in enumerate(value):
                yield from find_fields(item, f"{name}.{number}.")
        else:
            yield name, value, spec


def field_errors(node: Any) -> Iterator[ConfigError]:  # noqa: ANN401 - any settings dataclass
    """Every setting, at any depth, that breaks the rule in its field's metadata."""
    for name, value, spec in find_fields(node):
        if value == [] and spec.metadata.get("nonempty"):
            yield ConfigError(f"{name} is an empty list", where=f"setting {name}", do=f"{name}={default_text(spec)}")
        elif value is not None:
            for item in value if isinstance(value, list) else [value]:
                yield from value_errors(name, item, spec)


def value_errors(name: str, value: Any, spec: Field[Any]) -> Iterator[ConfigError]:  # noqa: ANN401 - any value
    """Errors of one value; numbers must be finite, integers must fit in 64 bits."""
    choices = spec.metadata.get("choices", ())
    if choices and value not in choices:
        yield unknown_choice(name, value, choices, listed=callable(spec.default_factory))
    faults = []
    pattern, meant = spec.metadata.get("pattern", (".*", ""))
    if isinstance(value, str):
        faults += [] if re.fullmatch(pattern, value, re.DOTALL) else [meant]
    elif isinstance(value, float) and not isfinite(value):
        faults.append("a finite number")
    elif isinstance(value, int) and abs(value) > LARGEST:
        faults.append(f"between -{LARGEST} and {LARGEST}")
    else:
        most = MAX_COUNTS.get(spec.name.rpartition("_")[2]) if isinstance(value, int) else None
        rules = {"maximum": most, **spec.metadata}
        bounds = {rule: rules[rule] for rule in LIMITS if rules.get(rule) is not None}
        faults += [f"{LIMITS[rule][1]} {bound}" for rule, bound in bounds.items() if LIMITS[rule][0](value, bound)]
    for fault in faults:
        yield ConfigError(
            f"{name}={str(value)[:100]} must be {fault}", where=f"setting {name}", do=f"{name}={default_text(spec)}"
        )


def as_word(value: object) -> str:
    """A value as Hydra reads it on the command line, after the shell."""
    if is_dataclass(value):  # an item of a list
        return "{...}"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{as_word(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(as_word, value))}]"
    if isinstance(value, str | Path):
        return shlex.split(setting_word("", str(value)))[0][1:]
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def default_text(spec: Field[Any]) -> str:
    """The default of a setting as command-line text."""
    return as_word(spec.default_factory() if callable(spec.default_factory) else spec.default)


def unknown_choice(name: str, value: object, choices: Iterable[object], *, listed: bool = False) -> ConfigError:
    """The error for a name outside the choices, with the closest one as the remedy; `listed`: the setting is a list."""
    known = [str(choice) for choice in choices]
    close = get_close_matches(str(value), known, n=1, cutoff=0.8 if name in LOCAL else 0.5)
    meant = [str(other) for other in other_values(value) if str(other) in known] or close
    word = f"{name}=[{(meant or known)[0]}]" if listed else f"{name}={(meant or known)[0]}"
    do = presets_like(name, str(value)) if name in LOCAL and not meant else SYNONYMS.get(f"{name}={value}", word)
    return ConfigError(f"{name}={value} is none of {', '.join(known)}", where=f"setting {name}", do=do)


class InvalidSettingsError(ConfigError):
    """Several errors, reported together."""

    def __init__(self, errors: Sequence[UserError]) -> None:
        """Join the texts of all errors, each once."""
        self.errors = list({str(error): error for error in errors}.values())
        super().__init__("")
        self.what = "\n\n".join(str(error) for error in self.errors)
        self.args = (self.what,)


@dataclass(frozen=True)
class Checked:
    """Settings that passed validation."""

    settings: Settings
    shape: MoEShape | None  # None if no requested stage depends on it
    source: Decoder

    @property
    def request(self) -> ShapeRequest:
        """The shape as requested."""
        return request_shape(self.settings, self.source)


def validate(settings: Settings, words: Sequence[str] = ()) -> Checked:
    """As `check_settings`; warns of surprises."""
    checked = check_settings(settings, words)
    for warning in warnings(settings, words, checked.shape, checked.request):
        logger.warning(warning)
    return checked


def check_settings(settings: Settings, words: Sequence[str] = ()) -> Checked:
    """Check the settings against each other, the source model, the data and the disk.

    `words` are those of the command line. Raises InvalidSettingsError.
    """
    if errors := find_errors(settings, words):
        raise InvalidSettingsError(errors)
    source = source_decoder(settings.model, text_only=settings.assemble.text_only)
    request = request_shape(settings, source)
    return Checked(settings, resolve_shape(request, request.width) if carves(settings) else None, source)


def find_errors(
    settings: Settings, words: Sequence[str] = (), unreadable_groups: Set[str] = frozenset()
) -> list[UserError]:
    """Every error in the settings.

    `words`: those of the command line, in which a setting without effect is an error. `unreadable_groups`: groups and
    dials whose words could not be read, so that they keep their defaults. Checks that depend on them are left out:
    their errors would concern values that the user did not choose.
    """
    errors: list[UserError] = [*field_errors(settings)]
    try:
        if "output_dir" not in unreadable_groups:
            errors += _output_errors(settings.output_dir)
        sound = not errors and unreadable_groups <= groups().keys() - {"model", "assemble", *OVERLAYS}
        errors += contradictions(settings, unreadable_groups)
        errors += [error for group, error in unread_errors(settings, words) if group not in unreadable_groups]
        if not unreadable_groups & {"data", "output_dir"}:
            errors += circle_errors(settings)
        if "data" not in unreadable_groups:
            errors += check_data(settings.data, heldout=any(stage.reads_heldout for stage in settings.stages))
            if training := training_text(settings):
                errors += check_training(training)
        if "store" not in unreadable_groups:
            try:
                check_store(settings.store)
            except UserError as error:  # a server that is off matters only if the scan runs
                errors += [error] * isinstance(error, ConfigError)
        if "model" not in unreadable_groups:
            errors += _source_errors(settings, unreadable_groups, sound=sound)
    except OSError as error:  # of a path that the system does not take: a name too long, a folder that is closed
        what = f"cannot open {str(error.filename)[:100]}: {error.strerror}"
        errors.append(ConfigError(what, where=PLACES, do="another path"))
    return errors


def _source_errors(settings: Settings, unreadable_groups: Set[str], *, sound: bool) -> list[UserError]:
    """Errors of the dense model, and if all other settings are `sound`, of the shape that is carved out of it."""
    if faults := check_source(settings.model):
        return faults
    try:
        source = source_decoder(settings.model, text_only=settings.assemble.text_only)
    except ConfigError as error:  # there is no text part
        return [error]
    errors: list[UserError] = [*map_errors(settings, source)]
    if "data" not in unreadable_groups:
        errors[:0] = check_length(settings.data, source.config)
        heldout = any(stage.reads_heldout for stage in settings.stages)
        folder, training = config_folder(settings.model), training_text(settings)
        errors += check_template(settings.data, folder, heldout=heldout)
        errors += check_template(training, folder, heldout=False) if training else []
    if sound and carves(settings):
        errors += _carve_errors(settings, request_shape(settings, source))
    return errors


def _carve_errors(settings: Settings, request: ShapeRequest) -> list[UserError]:
    """Errors of the shape and its target."""
    if unusable := [*dense_layer_errors(request)]:
        return [*unusable]
    shape = resolve_shape(request, request.width)
    place = f"shape, model={settings.model.label} with F={request.width} neurons a layer"
    faults = shape_faults(shape, request.width)
    do = find_remedy(request) or "a model with wider FFNs" if faults else ""
    errors: list[UserError] = [ConfigError(what, where=f"{place}{more}", do=do) for what, more in faults]
    errors += width_errors(shape, request.assemble.pad_to)
    try:
        with explained_config(f"config.json of {settings.model.source_name}"):
            target = request.target(shape)
            errors += square_errors(request, shape, target)
            errors += check_target(request.source, target, shape)
            if settings.dense_layers is None:
                errors += auto_errors(settings, request, target, shape)
    except UserError as error:
        errors.append(error)
    return errors


def auto_errors(settings: Settings, request: ShapeRequest, target: MoETarget, shape: MoEShape) -> Iterator[ConfigError]:
    """Errors: `dense_layers=auto` where no layer can stay dense, or nothing is left for the others to pay with."""
    where = "setting dense_layers=auto"
    if shape.pooled:
        yield ConfigError("a pool serves every layer: none stays dense", where=where, do="dense_layers=[]")
    elif request.source.narrow:
        yield ConfigError("layers of fewer neurons stay dense anyway", where=where, do="dense_layers=[]")
    elif None not in (settings.top_k, settings.always_on):
        what = f"top_k={shape.top_k} and always_on={shape.always_on} leave no width that the others could give up"
        yield ConfigError(what, where=where, do="top_k=null, or always_on=null")
    elif target.dense_layers == "none":
        faults = check_target(request.source, target, replace(shape, dense_layers=(0,)))
        yield ConfigError(f"{target.model_type} has no dense layers", where=where, do=faults[0].do or "dense_layers=[]")


def map_errors(settings: Settings, source: Decoder) -> Iterator[ConfigError]:
    """Errors: layers to draw that the source does not have."""
    if not settings.involves("cluster") or settings.cluster.map == "none":
        return
    layers = source.depth
    if unknown := [layer for layer in settings.cluster.map_layers if not -layers <= layer < layers]:
        what = f"no layer {', '.join(map(str, unknown))}: the model has {layers}"
        yield ConfigError(what, where="setting cluster.map_layers", do="cluster.map_layers=[]")


def width_errors(shape: MoEShape, pad_to: int | None) -> Iterator[ConfigError]:
    """An error if the experts on disk have a width at which transformers would stop in the first pass."""
    if (stored := expert_width(shape, pad_to)) % ALIGNMENT:
        what = (
            f"experts of {stored} neurons on disk: grouped_mm, by which transformers runs them, needs a multiple of 8"
        )
        yield ConfigError(what, where=f"n={shape.n}, assemble.pad_to={pad_to}", do="assemble.pad_to=8")


def square_errors(request: ShapeRequest, shape: MoEShape, target: MoETarget) -> Iterator[ConfigError]:
    """An error if nothing shows that the experts' matrices are transposed on disk: they would load, and wrongly."""
    stored, hidden = expert_width(shape, request.assemble.pad_to), request.source.hidden
    if target.transposed and hidden in {stored, 2 * stored}:
        what = (
            f"{target.model_type} stores experts transposed, and of {stored} neurons at hidden_size={hidden} nothing "
        )
        what += "shows it: programs would read rows as columns"
        yield ConfigError(what, where=f"n={shape.n}", do="another n, or assemble.target=tiny_onn")


def request_shape(settings: Settings, source: Decoder) -> ShapeRequest:
    """The dials of the shape, for this source."""
    dials = settings.experts, settings.n, settings.top_k, settings.always_on, settings.active, settings.topology
    dense = sorted({layer + source.depth if layer < 0 else layer for layer in settings.dense_layers or ()})
    return ShapeRequest(*dials, settings.assemble, source, tuple(sorted({*dense, *source.narrow})))


def carves(settings: Settings) -> bool:
    """Whether a stage of this run depends on the shape."""
    return any("shape" in stage.nodes for stage in settings.stages)


def _output_errors(output_dir: str) -> Iterator[ConfigError]:
    """Errors: an output folder that no run can be written to, or in which something else is called `latest`."""
    if unusable := [*folder_errors("output_dir", output_dir, "output_dir=outputs", "artifacts", "runs")]:
        yield from unusable
        return
    latest = Path(output_dir) / "latest"
    if latest.exists() and not latest.is_symlink():
        what = f"{latest} is no link, so that this run cannot make it point to its results"
        yield ConfigError(what, where="setting output_dir", do=shlex.join(["mv", str(latest), f"{latest}-old"]))


def folder_errors(name: str, folder: str, do: str, *inner: str) -> Iterator[ConfigError]:
    """Errors: a folder to write, whose setting is `name`, that is empty, begins with ~, or cannot be written to.

    `inner`: folders in it, which may be links to another disk.
    """
    where = f"setting {name}"
    if not folder.strip():
        yield ConfigError(f"{name} is empty: is a variable of the shell not set?", where=where, do=do)
        return
    if folder.startswith("~"):
        what = f"{name}={folder} begins with ~, which the shell did not replace by your home folder"
        home = expand_user(folder)
        yield ConfigError(what, where=where, do=setting_word(name, str(home)) if home.is_absolute() else do)
        return
    for part in ("", *inner):
        try:
            # Permission bits do not suffice: root, read-only mounts, kernel file systems.
            TemporaryFile(dir=nearest_existing(Path(folder) / part)).close()
        except OSError as error:
            place = Path(error.filename).parent if error.filename else folder
            yield ConfigError(f"cannot write to {str(place)[:100]}: {error.strerror}", where=where, do=do)
            return


@dataclass(frozen=True)
class Unread:
    """A setting that has no effect."""

    name: str
    value: object
    default: object
    disabled_by: str
    remedy: str


def find_unread(node: Any, prefix: str) -> Iterator[Unread]:  # noqa: ANN401 - any settings dataclass
    """Every setting, at any depth, that has no effect."""
    off, plain = unneeded(node), type(node)()
    specs = {spec.name: spec for spec in fields(node)}
    for key, spec in specs.items():
        name, value = f"{prefix}{key}", getattr(node, key)
        if by := off.get(key):
            reason = f"{prefix}{by}={as_word(getattr(plain if by in off else node, by))}"
            yield Unread(name, value, getattr(plain, key), reason, _switch_on(prefix, specs[by], spec))
        elif is_dataclass(value):
            yield from find_unread(value, f"{name}.")
        elif isinstance(value, list) and value and is_dataclass(value[0]):
            for number, item in enumerate(value):
                yield from find_unread(item, f"{name}.{number}.")


def _switch_on(prefix: str, by: Field[Any], spec: Field[Any]) -> str:
    """The word that gives a setting its effect: the default of the one that disables it if that suffices."""
    wanted = spec.metadata["needs"][by.name]
    if enables(by.default, wanted):
        value = default_text(by)
    elif isinstance(wanted, bool):
        value = str(wanted).lower() if by.type is bool else "..."
    else:
        value = min(wanted) if isinstance(wanted, tuple | frozenset) else "null" if wanted is None else wanted
    return f"{prefix}{by.name}={value}"


def unread_settings(settings: Settings) -> Iterator[Unread]:
    """Settings without effect of all groups that the stages of the run read."""
    read = {name for stage in settings.stages for name in stage.nodes}
    for group, node in vars(settings).items():
        if group in read and is_dataclass(node):
            yield from find_unread(node, f"{group}.")


def unread_errors(settings: Settings, words: Sequence[str]) -> Iterator[tuple[str, ConfigError]]:
    """Group, and an error, for each setting of the command line that has no effect."""
    typed = {word.lstrip("+").partition("=")[0] for word in words}
    for unread in unread_settings(settings):
        name = unread.name
        listed = unread.value != unread.default and any(name.startswith(f"{key}.") for key in typed if "." in key)
        if name in typed or listed:
            what = f"{name}={as_word(unread.value)} has no effect: {unread.disabled_by}"
            do = f"{unread.remedy}, or the command without {name}"
            yield name.partition(".")[0], ConfigError(what, where=f"setting {name}", do=do)


def training_text(settings: Settings) -> TrainingData | None:
    """The settings of the text that is read by train alone; None: there is none, or train does not run."""
    return settings.train.own_text(settings.data) if settings.involves(TRAINED) else None


def circle_errors(settings: Settings) -> Iterator[ConfigError]:
    """An error for each folder of text in which the runs write their own files."""
    outputs = Path(os.path.realpath(expand_user(settings.output_dir)))
    texts = filter(None, (settings.data, training_text(settings)))
    sources = [source for text in texts for source in list_sources(text, "calibration") if source.kind == "text"]
    paths = [path for source in sources for path in (*source.paths, source.path)]
    for path in filter(None, (*paths, settings.data.heldout_path)):
        if outputs.is_relative_to(os.path.realpath(expand_user(path))):
            what = f"the text in {path} would include the runs' files in output_dir={settings.output_dir}"
            yield ConfigError(what, where="setting output_dir", do="output_dir=A_FOLDER_BESIDE_THE_TEXT")


def warnings(settings: Settings, words: Sequence[str], shape: MoEShape | None, request: ShapeRequest) -> Iterator[str]:
    """Surprises in settings without errors: what a file under conf/ says without effect, and words not for this run."""
    for unread in unread_settings(settings):
        if unread.value != unread.default:
            yield f"{unread.name}={as_word(unread.value)} is ignored: {unread.disabled_by}"
    data, reading = settings.data, [stage for stage in settings.stages if "data" in stage.nodes]
    sample = data.sample_tokens or data.tokens
    if sample < data.tokens != DataConfig.tokens and all(stage.samples for stage in reading):
        what = f"stage={settings.stage} reads the first data.sample_tokens={sample} of data.tokens={data.tokens}"
        yield f"{what}; data.sample_tokens=null reads all"
    for stage in (TRAINED, *LOOKING):
        groups = {stage, "check"} if stage == "diagnose" else {stage}
        typed = [word for word in words if word.partition("=")[0].partition(".")[0] in groups]
        if typed and not settings.involves(stage):
            yield f"{' '.join(typed)} is ignored: stage={settings.stage} does not run {stage}"
    elsewhere = tuple(name for topology, names in READ_BY.items() if topology != settings.topology for name in names)
    if typed := [word for word in words if word.startswith(elsewhere)]:
        yield f"{' '.join(typed)} is ignored: topology={settings.topology}"
    others = tuple(f"diagnose.{check}." for check in CHECKS if check != settings.check)
    if settings.stage == "diagnose" and (typed := [word for word in words if word.startswith(others)]):
        yield f"{' '.join(typed)} is ignored: check={settings.check}"
    yield from _slow_formats(settings)
    if shape is not None:
        yield from _carve_warnings(settings, shape, request.target(shape), request.source)


def _slow_formats(settings: Settings) -> Iterator[str]:
    formats = {"model.dtype": settings.model.dtype}
    if settings.involves("train"):
        formats["train.precision"] = settings.train.precision
    rounded = [name for name, chosen in formats.items() if chosen == "bfloat16"]
    if rounded and lacks_bfloat16() and is_on_host(settings.model):
        slow = "this CPU multiplies bfloat16 ten times as slowly as float32, large matrices worse"
        yield f"{' '.join(f'{name}=bfloat16' for name in rounded)}: {slow}"


def _carve_warnings(settings: Settings, shape: MoEShape, target: MoETarget, source: Decoder) -> Iterator[str]:
    filled = ["top_k"] if shape.pooled else ["experts", "n", "top_k", "always_on"]
    if settings.active != Settings.active and all(getattr(settings, name) is not None for name in filled):
        yield f"active={settings.active:g} is ignored: it fills what is null of {', '.join(filled)}"
    baselines = settings.evaluate.baselines
    left_out = [name for name in baselines if name not in POOL_BASELINES]
    if shape.pooled and left_out and baselines != EvaluateConfig().baselines and settings.involves("evaluate"):
        yield f"evaluate.baselines=[{','.join(left_out)}] is ignored: topology=global_pool"
    if settings.involves("assemble") and (difference := long_texts(target, source.config)):
        yield difference
    if not settings.involves("train"):
        return
    method, other = ("selection biases", "balance_weight") if target.selection_bias else ("a loss", "bias_rate")
    if settings.train.balance == "auto" and getattr(settings.train, other) != getattr(TrainConfig, other):
        value = as_word(getattr(settings.train, other))
        yield f"train.{other}={value} is ignored: train.balance=auto balances {target.model_type} by {method}"
    if settings.train.straight_through:
        return
    if shape.top_k == 1 < shape.experts and target.normalised(shape):
        yield (
            f"top_k=1: {target.model_type} gives the chosen expert a gate of 1, so the loss has no gradient for the "
            "routers, and only train.balance and train.z_weight move them; train.straight_through=true gives it one"
        )


def contradictions(settings: Settings, unreadable_groups: Set[str] = frozenset()) -> Iterator[ConfigError]:
    """Errors that do not depend on the source model."""
    workers = find_workers().world
    if settings.involves("score"):
        yield from settings.score.contradictions(gradients=settings.scan.gradients)
    if settings.involves("dump") and "dump" not in unreadable_groups:
        yield from settings.dump.contradictions()
    if settings.involves("diagnose") and "diagnose" not in unreadable_groups:
        yield from settings.diagnose.contradictions()
    if settings.involves("train"):
        yield from settings.train.contradictions(workers)
        if settings.assemble.logit_std == 0:
            what = "assemble.logit_std=0 makes all routers 0, whose learning rate is 0, too"
            yield ConfigError(what, where="setting assemble.logit_std", do="assemble.logit_std=null")
        if settings.train.straight_through and settings.topology == GLOBAL_POOL:
            what = "train.straight_through=true computes all experts for every token, in a pool those of all layers"
            where = "settings train.straight_through and topology=global_pool"
            yield ConfigError(what, where=where, do="train.straight_through=false")
    if workers > 1 and settings.model.device_map != "none":
        yield ConfigError(
            f"model.device_map={settings.model.device_map} spreads one model over all devices; torchrun started "
            f"{workers} workers, and each loads its own",
            where="setting model.device_map",
            do="model.device_map=none, or python -m pipeline without torchrun",
        )

"""The files under conf/ and the help page, written from them."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
CONF = REPOSITORY / "conf"
PACKAGE = __name__.removesuffix("pipeline.help")  # in an installed package, all our names begin with its own


def find_workspace() -> Path:
    """The folder of `outputs/`: the repository, or the working folder if the package is installed without one."""
    return REPOSITORY if (REPOSITORY / "pyproject.toml").is_file() else Path.cwd()


# Groups whose options can change any setting.
OVERLAYS = ("experiment", "debug")
# Groups with options for what a user names → the option for a path.
LOCAL = {"model": "local", "data": "text"}


def groups() -> dict[str, list[str]]:
    """Configuration groups and their options, read from the folders under conf/."""
    folders = sorted(folder for folder in CONF.iterdir() if folder.is_dir())
    return {folder.name: sorted(option.stem for option in folder.glob("*.yaml")) for folder in folders}


NEXT_LINE = "\n" + 15 * " "
PAGE = """Carve a sparse Mixture-of-Experts out of a pretrained dense language model.

  python -m pipeline [setting=value ...]

Examples
  python -m pipeline                                    the whole chain on the small model in the repository
  python -m pipeline stage=scan                         one stage, after the earlier stages that have no result yet
  python -m pipeline stage=project experts=100 n=256    another shape; scan and score are used again
  python -m pipeline model=qwen2_5_0_5b data=ultrachat  a model and a dataset of the Hugging Face hub
  python -m pipeline model=/my/qwen data=/my/texts
  python -m pipeline -m active=0.25,0.5 score=s_p,wanda a sweep: every combination, below outputs/sweeps/
  torchrun --nproc-per-node=8 -m pipeline               the whole chain in eight processes, one per GPU if available

Stages
  scan      run the dense model on text: activations, frequency and gradients of every FFN neuron
  score     score the neurons
  cluster   group the neurons into experts
  extract   slice the experts out of the weights
  assemble  fit the routers and write a checkpoint that transformers loads
  project   fit the experts to the dense model: closed form, layer-wise descent, gradient projection
  train     continued pretraining: routers first, then routers and experts
  evaluate  compare with the dense model and baselines on held-out text
  layers    measure what narrowing each layer costs; dense_layers=auto runs it
  dump      write inputs, weights and gradients of the dense model's layers, to study number formats
  diagnose  find where low precision goes wrong; check= chooses how

Dials
{dials}

Groups (group=option; * is the default)
{groups}

Settings inside a group: group.setting=value, such as data.tokens=16384. The files under conf/ explain each setting.
  python -m pipeline --help GROUP         the settings of a group, such as data, with their explanations
  python -m pipeline --cfg job --resolve  print all settings and their values
  python -m pipeline --hydra-help         Hydra's own flags

Other programs: python -m pipeline PROGRAM --help
{programs}
"""
# Program → its module, which has a `main`, and what it does.
PROGRAMS = {
    "answer": ("pipeline.answer", "let a model answer conversations: text for its carve"),
    "cache_check": ("pipeline.cache_check", "count the bytes of experts that a carve reads from slow memory"),
    "compare": ("pipeline.compare", "compare losses of checkpoints, trained anywhere, with the dense model's"),
    "dump": ("instruments.tensor_dump.command", "show, compare or export tensor dumps"),
    "generate": ("pipeline.generate", "print what a checkpoint writes after a prompt"),
    "gguf": ("pipeline.gguf", "convert a checkpoint for llama.cpp"),
    "mbpp": ("pipeline.mbpp", "count the programming tasks that checkpoints solve"),
    "mscan": ("instruments.parameter_scan.command", "show the results of a parameter-level scan"),
    "runs": ("pipeline.runs", "list the runs with their figures, or remove some of them"),
    "serve_check": ("pipeline.serve_check", "check a checkpoint's results in transformers, llama.cpp, vLLM"),
    "static_check": ("instruments.static_check.check", "find faults in training code without running it"),
    "store": ("pipeline.store", "averages beside the sums that a scan has in Redis"),
    "watch_log": ("instruments.training_watch.step_log", "show a watched training step by step"),
}


def help_page(words: Iterable[str] = ()) -> str:
    """The text of `python -m pipeline --help`; with names of groups among the words, the options of these groups."""
    if asked := [word for word in words if word in groups()]:
        return "\n".join(line for group in asked for line in option_lines(group)) + "\n"
    programs = "\n".join(f"  {name:13}{about}" for name, (_module, about) in PROGRAMS.items())
    return PAGE.format(dials="\n".join(dial_lines()), groups="\n".join(group_lines()), programs=programs)


def option_lines(group: str) -> Iterator[str]:
    """Every option of a group with the settings and explanations of its file, which may build on another option."""
    for option in groups()[group]:
        text = (CONF / group / f"{option}.yaml").read_text(encoding="utf-8")
        base = "".join(f", changes {name}" for name in re.findall(r"^  - (?!_self_)(\w+)$", text, re.MULTILINE))
        yield f"{group}={option}{base}"
        shown = re.sub(r"^defaults:\n(  - .*\n)+", "", text, flags=re.MULTILINE)
        yield from (f"  {line}" for line in shown.splitlines())


def dial_lines() -> Iterator[str]:
    """Every dial with the comment above it in conf/config.yaml and its default."""
    comment: list[str] = []
    for line in (CONF / "config.yaml").read_text(encoding="utf-8").partition("\n\n")[2].splitlines():
        dial = re.fullmatch(r"(\w+): (.+)", line)
        if line.startswith("# "):
            comment.append(line[2:])
        elif dial:
            name, default = dial.groups()
            if default.startswith("${model."):
                default = "as in model="
            default = default.replace("${workspace:}", str(find_workspace()))
            yield f"  {name:13}{NEXT_LINE.join(comment)} [{default}]"
            comment = []


def group_lines() -> Iterator[str]:
    """Every group and its options with the first line of each file, in the order of the defaults list."""
    options = groups()
    chosen = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    defaults = {group: option for entry in chosen if isinstance(entry, dict) for group, option in entry.items()}
    for group in filter(options.get, defaults):  # without Hydra's own groups
        yield f"  {group}"
        for option in options[group]:
            star = "*" if option == defaults[group] else " "
            yield f"    {star} {option:20}{summary(CONF / group / f'{option}.yaml')}"


def summary(path: Path) -> str:
    """The first comment of a file, without `@package`."""
    lines = (line[2:] for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# "))
    return next(line for line in lines if not line.startswith("@"))

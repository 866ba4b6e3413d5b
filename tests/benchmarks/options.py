"""Command line of the benchmarks."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

# Rows are measured by group; redis needs redis-server and redis-benchmark on the PATH.
GROUPS = (
    "scan", "forward", "scanner", "memory", "carve", "products", "mscan", "startup", "redis", "moe", "cluster", "dump",
    "watch",
)  # fmt: skip


def read_options(words: Sequence[str] | None = None) -> Namespace:
    """Parse the command line."""
    parser = ArgumentParser("benchmarks", description="Speed and memory, as ratios measured in one run.")
    parser.add_argument("--model", type=Path, help="folder of a dense checkpoint (default: the embedded model)")
    parser.add_argument("--shape", choices=("qwen3-1.7b",), help="random weights in a known shape, instead of a folder")
    parser.add_argument("--random", action="store_true", help="draw the weights of --model, too, instead of reading")
    parser.add_argument("--device", default="auto", help="cpu, cuda ... (default: a GPU where there is one)")
    parser.add_argument("--dtype", default="auto", help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--tokens", type=int, default=2048, help="of a batch")
    parser.add_argument("--length", type=int, default=256, help="of a sequence")
    parser.add_argument("--longest", type=int, default=4096, help="up to which Gram and direct product are compared")
    parser.add_argument("--repetitions", type=int, default=7, help="of every measurement, after one that warms up")
    parser.add_argument("--experts", type=int, default=16, help="of the MoE timed against the dense model")
    parser.add_argument("--active", type=float, nargs="+", default=[0.5, 0.25], help="its shares of active neurons")
    parser.add_argument("--steps", type=int, default=16, help="tokens decoded after each sequence")
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=GROUPS, metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--json", type=Path, help="also write every single measurement here")
    return parser.parse_args(words)

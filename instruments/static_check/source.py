"""A file of Python code, the rules, and findings in it."""

import ast
import io
import re
import tokenize
import warnings
from dataclasses import dataclass
from pathlib import Path

SEVERE, WARNING = "severe", "warning"


@dataclass(frozen=True)
class Rule:
    """One rule; the message is completed where it applies."""

    severity: str
    why: str
    fix: str


RULES = {
    "LP001": Rule(SEVERE, "nothing in it was checked", "correct the file, or leave it out of PATH"),
    "LP101": Rule(SEVERE,
        "updates smaller than half a unit in the last place of a 16-bit weight are lost, and GradScaler refuses to "
        "unscale float16 gradients",
        "keep the weights in float32 and let autocast choose: drop the cast"),
    "LP102": Rule(SEVERE,
        "the loss is computed in the model's 16-bit output: float16 overflows at 65504, which ends in inf or NaN; "
        "bfloat16 keeps 8 bits",
        "compute the loss inside the autocast block, or of logits.float()"),
    "LP103": Rule(WARNING,
        "small probabilities are rounded to 8 (bfloat16) or 11 (float16) bits or flushed to zero, and their sum is no "
        "longer 1; autocast does not promote it here",
        "pass dtype=torch.float32"),
    "LP104": Rule(SEVERE,
        "a probability next to 1 rounds to 1 in 16 bits and its logarithm is lost; where autocast knows it, it raises",
        "use binary_cross_entropy_with_logits (BCEWithLogitsLoss) on the logits, without the sigmoid"),
    "LP105": Rule(WARNING,
        "the result is rounded to 16 bits (bfloat16 keeps 8 of them), and in float16 a sum above 65504 is inf",
        "reduce in float32: dtype=torch.float32 where the function takes it, else .float() before it"),
    "LP201": Rule(SEVERE,
        "gradients are still multiplied by the loss scale, so that the bound is as much too small",
        "call scaler.unscale_(optimizer) before clipping"),
    "LP202": Rule(SEVERE,
        "the loss scale never adapts, and the next unscale_ of this optimizer raises",
        "call scaler.update() once, after all optimizers' scaler.step()"),
    "LP203": Rule(SEVERE,
        "the second call raises: gradients would be divided by the scale twice",
        "call unscale_ once for each optimizer between two scaler.update()"),
    "LP204": Rule(SEVERE,
        "the optimizer takes gradients that are multiplied by the loss scale, inf and NaN included",
        "call scaler.step(optimizer), then scaler.update()"),
    "LP205": Rule(WARNING,
        "what is measured is the gradient times the loss scale, and overflows that GradScaler is there to skip",
        "call scaler.unscale_(optimizer) first"),
    "LP301": Rule(WARNING,
        "backward ops already run in the types that autocast chose forward; under autocast, those written in Python "
        "are cast once more",
        "end the autocast block after the loss is computed"),
    "LP302": Rule(WARNING,
        "float16 gradients below 6e-8 are zero without loss scaling",
        "scale the loss with torch.amp.GradScaler, or use dtype=torch.bfloat16"),
}  # fmt: skip


@dataclass(frozen=True, order=True)
class Finding:
    """One place in one file."""

    path: str
    line: int
    column: int
    code: str
    message: str
    severity: str

    def __str__(self) -> str:
        """Three lines: what and where, why, what to do."""
        rule = RULES[self.code]
        head = f"{self.path}:{self.line}: {self.code} {self.severity} {self.message}"
        return f"{head}\n    why: {rule.why}\n    fix: {rule.fix}"

    def record(self) -> dict[str, object]:
        """For JSON."""
        rule = RULES[self.code]
        return {**vars(self), "why": rule.why, "fix": rule.fix}


_NOQA = re.compile(r"#.*?\bnoqa\b(?::\s*(?P<codes>[A-Z]+[0-9]+(?:[\s,]+[A-Z]+[0-9]+)*))?", re.IGNORECASE)
MAX_LINES, MAX_BYTES = 20_000, 4 << 20  # more is generated code, and takes minutes
EVERY: frozenset[str] = frozenset({"*"})


@dataclass(frozen=True)
class Source:
    """A file that parses."""

    path: str
    tree: ast.Module
    silenced: dict[int, frozenset[str]]  # line → codes, or EVERY

    def is_silenced(self, code: str, node: ast.AST) -> bool:
        """Whether a comment on one of the node's lines says so."""
        first = getattr(node, "lineno", 1)
        lines = range(first, (getattr(node, "end_lineno", None) or first) + 1)
        return any(self.silenced.get(line, frozenset()) & {code, *EVERY} for line in lines)


def read_source(path: Path) -> Source | Finding:
    """The file, or a finding that says why not."""
    if not path.is_file():
        return unreadable(path, 1, "is no regular file")
    try:
        size = path.stat().st_size
        data = path.read_bytes() if size <= MAX_BYTES else b""
    except OSError as error:
        return unreadable(path, 1, f"cannot be read: {error.strerror}")
    if size > MAX_BYTES or data.count(b"\n") > MAX_LINES:
        return unreadable(path, 1, f"is longer than {MAX_LINES:,} lines or {MAX_BYTES:,} bytes, and not checked")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of invalid escapes and the like: not ours to report
            tree = ast.parse(data, filename=str(path))
        return Source(str(path), tree, find_silenced(data))
    except SyntaxError as error:
        return unreadable(path, error.lineno or 1, f"does not parse: {error.msg}")
    except (ValueError, RecursionError, MemoryError) as error:
        return unreadable(path, 1, f"does not parse: {error}")


def find_silenced(data: bytes) -> dict[int, frozenset[str]]:
    """Lines with `# noqa` or `# noqa: CODE, CODE`."""
    if b"noqa" not in data.lower():
        return {}
    found = {}
    for token in tokenize.tokenize(io.BytesIO(data).readline):
        match = _NOQA.search(token.string) if token.type == tokenize.COMMENT else None
        if match:
            codes = match["codes"]
            found[token.start[0]] = frozenset(re.findall(r"[A-Z]+[0-9]+", codes.upper())) if codes else EVERY
    return found


def unreadable(path: Path, line: int, message: str) -> Finding:
    """What is found where a file could not be checked."""
    return Finding(str(path), line, 0, "LP001", message, RULES["LP001"].severity)

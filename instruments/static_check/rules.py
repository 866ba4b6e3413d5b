"""The rules, each with its reason and fix; `report` records findings."""

import ast
from dataclasses import dataclass

from instruments.static_check.source import NOTE, SEVERE, WARNING, Finding
from instruments.static_check.state import Frame


@dataclass(frozen=True)
class Rule:
    """One rule; the caller of `report` gives the message."""

    severity: str
    why: str
    fix: str


RULES = {
    "LP101": Rule(SEVERE,
        "updates smaller than half a unit in the last place of a 16-bit weight are lost, float16 gradients underflow, "
        "and GradScaler refuses to unscale them",
        "remove the cast: keep the weights in float32 and use autocast"),
    "LP102": Rule(SEVERE,
        "the loss is computed in the model's 16-bit output: float16 overflows at 65504, which ends in inf or NaN; "
        "bfloat16 keeps 8 bits",
        "compute the loss inside the autocast block, or of logits.float()"),
    "LP103": Rule(WARNING,
        "small probabilities are rounded to 8 (bfloat16) or 11 (float16) bits or flushed to zero, and their sum is no "
        "longer 1; here the operation is not promoted to float32",
        "pass dtype=torch.float32"),
    "LP104": Rule(SEVERE,
        "a probability next to 1 rounds to 1 in 16 bits and its logarithm is lost; float16 autocast on CUDA raises",
        "use binary_cross_entropy_with_logits (BCEWithLogitsLoss) on the logits, without the sigmoid"),
    "LP105": Rule(WARNING,
        "the result is rounded to 16 bits (bfloat16 keeps 8 of them), and in float16 a sum above 65504 is inf",
        "compute it in float32: dtype=torch.float32 where the function takes it, else .float() before it"),
    "LP106": Rule(WARNING,
        "running statistics and scales are rounded to 16 bits: small updates of them are lost",
        "keep normalisation layers in float32 (autocast does)"),
    "LP107": Rule(SEVERE,
        "the format cannot hold the constant: below 3e-8 it is zero in float16, above 65504 it is inf or raises",
        "compute in float32, or take the limit from torch.finfo(x.dtype)"),
    "LP108": Rule(WARNING,
        "the intermediate result can overflow or become zero although the final one does not; in 16 bits it does early",
        "use log_softmax, logsigmoid, logsumexp, softplus or softmax, or subtract the maximum first"),
    "LP109": Rule(WARNING,
        "the difference of two large, nearly equal numbers keeps few digits, and may be negative",
        "use torch.var or torch.var_mean in float32, or the mean of (x - mean) ** 2"),
    "LP110": Rule(WARNING,
        "integers above 256 (bfloat16) or 2048 (float16) are rounded: neighbouring positions become equal",
        "count in float32 or integers, and cast only what is computed from them"),
    "LP201": Rule(SEVERE,
        "gradients are still multiplied by the loss scale, so the bound is too small by this factor",
        "call scaler.unscale_(optimizer) before clipping"),
    "LP202": Rule(SEVERE,
        "the loss scale never adapts, and the next unscale_ or step of this optimizer raises",
        "call scaler.update() once, after all optimizers' scaler.step()"),
    "LP203": Rule(SEVERE,
        "the second call raises: gradients would be divided by the scale twice",
        "call unscale_ once for each optimizer between two scaler.update(), after the last micro-batch"),
    "LP204": Rule(SEVERE,
        "the optimizer takes gradients that are multiplied by the loss scale or not checked for inf and NaN, or takes "
        "them twice",
        "call scaler.step(optimizer) alone, then scaler.update()"),
    "LP205": Rule(WARNING,
        "the value is that of the gradient times the loss scale, with overflows that GradScaler would skip",
        "call scaler.unscale_(optimizer) first"),
    "LP206": Rule(SEVERE,
        "scaler.step() divides gradients by a loss scale that they were never multiplied by: the step is 65536 times "
        "too small",
        "call scaler.scale(loss).backward()"),
    "LP301": Rule(WARNING,
        "backward operations already run in the types that autocast chose in the forward pass; under autocast, those "
        "written in Python are cast again",
        "end the autocast block after the loss is computed"),
    "LP302": Rule(WARNING,
        "float16 gradients below 6e-8 are zero without loss scaling",
        "scale the loss with torch.amp.GradScaler, or use dtype=torch.bfloat16"),
    "LP401": Rule(WARNING,
        "accelerate (and Fabric) scale the loss, unscale gradients and count micro-batches only in their own calls",
        "call accelerator.backward(loss), accelerator.clip_grad_norm_(parameters, bound), or Fabric's equivalents"),
    "LP402": Rule(WARNING,
        "Lightning scales the loss and unscales gradients only in its own calls",
        "call self.manual_backward(loss) and self.clip_gradients(optimizer, ...), or leave both to the Trainer"),
}  # fmt: skip


def report(frame: Frame, code: str, node: ast.expr, message: str, severity: str | None = None) -> None:
    """Record a finding, unless a `noqa` comment silences it."""
    rule, source = RULES[code], frame.report.source
    if not source.is_silenced(code, node):
        path, line = source.place(node.lineno)
        found = Finding(path, line, node.col_offset, code, message, severity or rule.severity, rule.why, rule.fix)
        frame.report.findings.add(found)


def grade(precision: str | None, frame: Frame) -> str:
    """Severity of a formula that loses digits in every format, by the precision of its values."""
    if precision == "float16" and not frame.region.enabled:
        return SEVERE
    in_16_bits = precision in {"float16", "bfloat16", "low"} or frame.region.enabled or frame.weights is not None
    return WARNING if in_16_bits else NOTE

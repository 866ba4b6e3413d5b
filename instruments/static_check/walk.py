"""The walk through a file: statement by statement, into autocast blocks, and into the functions that are called."""

import ast
import re
from collections.abc import Sequence
from dataclasses import replace

from instruments.static_check.calls import evaluate
from instruments.static_check.definitions import Function
from instruments.static_check.names import Region, read_region, text_of
from instruments.static_check.precision_rules import note_region
from instruments.static_check.state import UNKNOWN, Frame, Report, State, Value, join

_MOST_WAYS = 16
_DEEPEST = 6
_SCALING = {"scale", "unscale_", "step", "update", "backward", "clip_grad_norm_", "clip_grad_value_"}
# Conditions that are one and the same, whatever variable carries them.
_MIXED = re.compile(r"scaler|\bamp\b|_amp|fp16|mixed|autocast|\bhalf\b", re.IGNORECASE)


def walk_file(report: Report) -> None:
    """Look at everything: what nobody in the file calls by itself, all else where it is called."""
    frame = Frame(report, call_function)
    walk_body(report.source.tree.body, [State()], frame)
    definitions = report.definitions
    methods = [(function, name.rpartition(".")[0] or None) for name, function in definitions.functions.items()]
    called = {
        node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        for node in ast.walk(report.source.tree)
        if isinstance(node, ast.Call)
    }
    # First those that nobody calls: they reach the others in the regions these run in.
    for function, owner in sorted(methods, key=lambda pair: pair[0].name in called or pair[0].name == "forward"):
        if id(function) not in report.walked:
            report.walked.add(id(function))
            inner = replace(frame, class_name=owner, region=_decorated(function, frame), stack=(function,))
            start = State()
            note_region(start, inner)
            walk_body(function.body, [start], inner)


def call_function(
    frame: Frame, state: State, function: Function, owner: str | None, node: ast.Call, arguments: list[Value]
) -> Value:
    """Walk into a function of the file; its value is what it returns."""
    if function in frame.stack or len(frame.stack) >= _DEEPEST:
        return UNKNOWN
    frame.report.walked.add(id(function))
    names = [argument.arg for argument in [*function.args.posonlyargs, *function.args.args]]
    if owner is not None and names[:1] in (["self"], ["cls"]):
        names = names[1:]
    words = [word.arg or "" for word in node.keywords]
    bound = dict(
        zip(
            [*names[: len(node.args)], *words],
            [*arguments[: len(node.args)], *arguments[len(node.args) :]],
            strict=False,
        )
    )
    start = state.copy()
    start.values = {name: value for name, value in state.values.items() if name.startswith("self.")} | bound
    start.returned, start.facts = None, dict(state.facts)
    region = _decorated(function, frame) if function.decorator_list else frame.region
    inner = replace(frame, class_name=owner or frame.class_name, stack=(*frame.stack, function), region=region)
    ends = walk_body(function.body, [start], inner)
    end = join([way for way in ends if way.returned is not None] or ends)
    values = state.values | {name: value for name, value in end.values.items() if name.startswith("self.")}
    returned = end.returned
    state.adopt(replace(end, values=values, facts=state.facts, returned=state.returned, ended=state.ended))
    return returned or UNKNOWN


def _decorated(function: Function, frame: Frame) -> Region:
    regions = [read_region(one, frame.report.definitions.imports) for one in function.decorator_list]
    return next((region for region in regions if region is not None), frame.region)


def walk_body(body: Sequence[ast.stmt], ways: list[State], frame: Frame) -> list[State]:
    """Every statement on every way that reaches it."""
    for statement in body:
        going = [way for way in ways if not way.ended]
        ended = [way for way in ways if way.ended]
        if not going:
            break
        ways = [*ended, *(after for way in going for after in walk_statement(statement, way, frame))]
        if len(ways) > _MOST_WAYS:
            ways = [join(ways)]
    return ways


def walk_statement(statement: ast.stmt, way: State, frame: Frame) -> list[State]:  # noqa: PLR0911 - a case a kind
    """The ways that go on from here."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [way]
        case ast.If():
            return _walk_if(statement, way, frame)
        case ast.For() | ast.AsyncFor() | ast.While():
            evaluate(statement.test if isinstance(statement, ast.While) else statement.iter, way, frame)
            # At least once, and once is enough: what is learned here does not change from turn to turn.
            return _revived(walk_body([*statement.body, *statement.orelse], [way], frame))
        case ast.With() | ast.AsyncWith():
            return _walk_with(statement, way, frame)
        case ast.Try() | ast.TryStar():
            before = way.copy()
            ways = walk_body([*statement.body, *statement.orelse], [way], frame)
            for handler in statement.handlers:
                walk_body(handler.body, [before.copy()], frame)
            return walk_body(statement.finalbody, ways, frame)
        case ast.Match():
            evaluate(statement.subject, way, frame)
            return [join([end for case in statement.cases for end in walk_body(case.body, [way.copy()], frame)])]
        case _:
            _walk_simple(statement, way, frame)
            return [way]


def _walk_simple(statement: ast.stmt, way: State, frame: Frame) -> None:
    match statement:
        case ast.Assign():
            value = evaluate(statement.value, way, frame)
            for target in statement.targets:
                bind(target, value, way)
        case ast.AnnAssign() if statement.value is not None:
            bind(statement.target, evaluate(statement.value, way, frame), way)
        case ast.AugAssign():
            together = ast.copy_location(ast.BinOp(statement.target, statement.op, statement.value), statement)
            bind(statement.target, evaluate(together, way, frame), way)
        case ast.Return():
            value = evaluate(statement.value, way, frame) if statement.value else UNKNOWN
            way.returned, way.ended = value, True
        case ast.Raise() | ast.Continue() | ast.Break():
            way.ended = True
        case _:
            for part in ast.iter_child_nodes(statement):
                if isinstance(part, ast.expr):
                    evaluate(part, way, frame)


def bind(target: ast.expr, value: Value, way: State) -> None:
    """Give a target its value; of several, those called a loss are in float32 where the others are low."""
    if isinstance(target, ast.Tuple | ast.List):
        for part in target.elts:
            bind(part, UNKNOWN if "loss" in (text_of(part) or "") else value, way)
        return
    text = text_of(target)
    if text is None:
        return
    for name in [name for name in way.values if name.startswith(f"{text}.")]:
        del way.values[name]
    way.values[text] = value


def _walk_if(statement: ast.If, way: State, frame: Frame) -> list[State]:
    evaluate(statement.test, way, frame)
    fact, positive = _fact(statement.test)
    matters = frame.report.definitions.scales and _touches_scaling(statement)
    if matters and fact in way.facts:
        return walk_body(statement.body if way.facts[fact] == positive else statement.orelse, [way], frame)
    met, other = way, way.copy()
    if matters:
        met.facts[fact], other.facts[fact] = positive, not positive
    ends = [*walk_body(statement.body, [met], frame), *walk_body(statement.orelse, [other], frame)]
    if matters:
        return ends
    going = [end for end in ends if not end.ended]
    return [*([join(going)] if going else []), *(end for end in ends if end.ended)]


def _fact(test: ast.expr) -> tuple[str, bool]:
    """A condition by its text, and which side of it is the body."""
    positive = True
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, positive = test.operand, not positive
    if isinstance(test, ast.Compare) and isinstance(test.comparators[0], ast.Constant):
        operator, constant = test.ops[0], test.comparators[0].value
        if constant in (None, False) and isinstance(operator, ast.Is | ast.Eq):
            test, positive = test.left, not positive
        elif (constant is None and isinstance(operator, ast.IsNot)) or constant is True:
            test = test.left
    text = ast.unparse(test)
    return ("mixed precision" if _MIXED.search(text) else text), positive


def _touches_scaling(statement: ast.If) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr in _SCALING for node in ast.walk(statement))


def _walk_with(statement: ast.With | ast.AsyncWith, way: State, frame: Frame) -> list[State]:
    definitions = frame.report.definitions
    for item in statement.items:
        context = item.context_expr
        region = read_region(context, definitions.imports) or definitions.regions.get(text_of(context) or "")
        if region is None:
            value = evaluate(context, way, frame)
            if item.optional_vars is not None:
                bind(item.optional_vars, value, way)
        else:
            frame = replace(frame, region=region)
            note_region(way, frame)
    return walk_body(statement.body, [way], frame)


def _revived(ways: list[State]) -> list[State]:
    """`break` and `continue` end a turn of the loop; what returned stays so."""
    for way in ways:
        way.ended = way.returned is not None
    return ways

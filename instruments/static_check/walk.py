"""The walk through a file: statement by statement, into autocast blocks, and into the functions that are called."""

import ast
import re
from collections.abc import Sequence
from dataclasses import replace

from instruments.static_check.autocast import KNOWN, Region, called_name, read_dtype, read_region, text_of
from instruments.static_check.definitions import Function
from instruments.static_check.precision_rules import check_cast, check_gradients, check_operation
from instruments.static_check.state import UNKNOWN, Frame, Report, State, Value, join, mix

_CASTS = {"half": "float16", "bfloat16": "bfloat16", "float": "float32", "double": "float32"}
_PLACES = {"torch.nn.functional", "torch.special", "torch.linalg", "torch"}
# Modules and builtins whose functions of the same names are not torch's.
_PLAIN = {"sum", "pow", "print", "len", "min", "max", "range", "isinstance", "getattr", "str", "int", "float", "bool"}
_NO_TENSORS = {"item", "tolist", "numpy", "argmax", "argsort", "size", "dim", "numel", "long", "int", "bool", "keys"}


def evaluate_call(node: ast.Call, base: Value, arguments: list[Value], state: State, frame: Frame) -> Value:
    """The value of a call whose parts have been looked at."""
    done = check_gradients(node, arguments, state, frame)
    if done is not None:
        return done
    definitions = frame.definitions
    cast = read_cast(node, frame)
    if cast is not None:
        check_cast(node, cast, frame)
        if isinstance(node.func, ast.Attribute) and definitions.is_model(node.func.value):
            state.values[text_of(node.func.value)] = Value(cast)  # modules are cast in place
        return Value(cast, scaled=base.scaled)
    function, owner = _local_function(node, frame)
    if function is not None:
        return call_function(frame, state, function, owner, node, arguments)
    operation = find_operation(node, frame)
    if operation is not None:
        method = isinstance(node.func, ast.Attribute) and not definitions.full_name(node.func)
        inputs = [base, *arguments] if method and not definitions.loss_of(node.func) else arguments
        return check_operation(node, operation, inputs, frame)
    return _unknown(node, base, arguments, state, frame)


def read_cast(node: ast.Call, frame: Frame) -> str | None:
    """The type that `.half()`, `.to(torch.float16)` and the like cast to."""
    func = node.func
    if not isinstance(func, ast.Attribute) or frame.definitions.full_name(func):
        return None
    if func.attr in _CASTS and not node.args and not node.keywords:
        return _CASTS[func.attr]
    if func.attr not in {"to", "type"}:
        return None
    given = [*node.args, *(word.value for word in node.keywords if word.arg == "dtype")]
    named = [read_dtype(part) for part in given if not isinstance(part, ast.Constant)]
    return next((dtype for dtype in named if dtype), None)


def find_operation(node: ast.Call, frame: Frame) -> str | None:
    """What torch calls what is called: a function, a method of a tensor, a loss module."""
    full = frame.definitions.full_name(node.func)
    if full:
        place, _dot, name = full.rpartition(".")
        return name if place in _PLACES and name in KNOWN else None
    known = isinstance(node.func, ast.Attribute) and node.func.attr in KNOWN
    return frame.definitions.loss_of(node.func) or (called_name(node) if known else None)


def _local_function(node: ast.Call, frame: Frame) -> tuple[Function | None, str | None]:
    """The function of this file that is called, and its class."""
    definitions, text = frame.definitions, text_of(node.func)
    if text in definitions.functions and "." not in text:
        return definitions.functions[text], None
    owner, name = definitions.class_of(text), "forward"
    if owner is None:
        head, _dot, name = text.rpartition(".")
        owner = frame.class_name if head == "self" else definitions.class_of(head)
    return (definitions.method(owner, name) if owner and name else None), owner


def _unknown(node: ast.Call, base: Value, arguments: list[Value], state: State, frame: Frame) -> Value:
    """Under autocast, what others compute comes out in 16 bits; elsewhere methods keep the type of their tensor."""
    word = called_name(node)
    if word in _NO_TENSORS or word in _PLAIN or "loss" in word.lower() or "criterion" in word.lower():
        return UNKNOWN
    cast = state.values.get(text_of(node.func), UNKNOWN)
    if cast.is_low and not frame.region.enabled:
        return Value(cast.precision)  # a module whose weights were cast
    if frame.region.enabled and frame.region.certain and frame.definitions.is_model(node.func):
        return Value(frame.region.dtype)
    if base.precision is not None and isinstance(node.func, ast.Attribute):
        return Value(base.precision)
    if frame.definitions.full_name(node.func) and not node.keywords and len(arguments) == 1:
        return Value(mix(arguments).precision)
    return UNKNOWN


# Of a tensor, but no tensors of its precision.
_FACTS = {"shape", "device", "dtype", "grad", "ndim", "itemsize", "config", "loss"}


def evaluate(node: ast.expr, state: State, frame: Frame) -> Value:  # noqa: C901, PLR0911, PLR0912 - a case a kind
    """Its value; everything inside is looked at on the way, once."""
    match node:
        case ast.Call():
            base = evaluate(node.func.value, state, frame) if isinstance(node.func, ast.Attribute) else UNKNOWN
            arguments = [evaluate(part, state, frame) for part in node.args]
            words = [evaluate(word.value, state, frame) for word in node.keywords]
            return evaluate_call(node, base, [*arguments, *words], state, frame)
        case ast.Constant():
            return Value(constant=True)
        case ast.Name():
            return state.values.get(node.id, UNKNOWN)
        case ast.Attribute():
            base = evaluate(node.value, state, frame)
            other = UNKNOWN if node.attr in _FACTS else Value(base.precision)
            return state.values.get(text_of(node), other)
        case ast.Subscript():
            evaluate(node.slice, state, frame)
            return evaluate(node.value, state, frame)
        case ast.BinOp():
            sides = [evaluate(node.left, state, frame), evaluate(node.right, state, frame)]
            if isinstance(node.op, ast.MatMult) and frame.region.enabled:
                return Value(frame.region.dtype) if frame.region.certain else UNKNOWN
            mixed = mix(sides)
            return Value(mixed.precision, scaled=any(side.scaled for side in sides), constant=mixed.constant)
        case ast.UnaryOp():
            value = evaluate(node.operand, state, frame)
            return UNKNOWN if isinstance(node.op, ast.Not) else value
        case ast.IfExp():
            evaluate(node.test, state, frame)
            ways = [evaluate(node.body, state, frame), evaluate(node.orelse, state, frame)]
            return ways[0] if ways[0] == ways[1] else UNKNOWN
        case ast.NamedExpr():
            value = evaluate(node.value, state, frame)
            state.values[node.target.id] = value
            return value
        case ast.Tuple() | ast.List():
            parts = [evaluate(part, state, frame) for part in node.elts]
            return parts[0] if parts and all(part == parts[0] for part in parts) else UNKNOWN
        case ast.Lambda():
            return UNKNOWN  # it runs elsewhere
        case _:
            for part in ast.iter_child_nodes(node):
                _look_inside(part, state, frame)
            return UNKNOWN


def _look_inside(node: ast.AST, state: State, frame: Frame) -> None:
    if isinstance(node, ast.expr):
        evaluate(node, state, frame)
    else:
        for part in ast.iter_child_nodes(node):
            _look_inside(part, state, frame)


_MOST_WAYS = 16
_DEEPEST = 6
_MOST_CALLS = 5_000  # followed into functions; those that are left are looked at once, on their own
_SCALING = {"scale", "unscale_", "step", "update", "backward", "clip_grad_norm_", "clip_grad_value_"}
# Conditions with one meaning under many names.
_MIXED = re.compile(r"scaler|\bamp\b|_amp|fp16|mixed|autocast|\bhalf\b", re.IGNORECASE)


def walk_file(report: Report) -> None:
    """Look at everything: what nobody in the file calls by itself, all else where it is called."""
    frame = Frame(report)
    walk_body(report.source.tree.body, [State()], frame)
    definitions = report.definitions
    methods = [(function, name.rpartition(".")[0] or None) for name, function in definitions.functions.items()]
    called = {called_name(node) for node in ast.walk(report.source.tree) if isinstance(node, ast.Call)}
    # First those that nobody calls: they reach the others in the regions these run in.
    for function, owner in sorted(methods, key=lambda pair: pair[0].name in called or pair[0].name == "forward"):
        if id(function) not in report.walked:
            report.walked.add(id(function))
            inner = replace(frame, class_name=owner, region=_decorated(function, frame), stack=(function,))
            start = State()
            start.note_region(inner.region)
            walk_body(function.body, [start], inner)


def call_function(
    frame: Frame, state: State, function: Function, owner: str | None, node: ast.Call, arguments: list[Value]
) -> Value:
    """Walk into a function of the file; its value is what it returns."""
    if function in frame.stack or len(frame.stack) >= _DEEPEST or frame.report.calls >= _MOST_CALLS:
        return UNKNOWN
    frame.report.calls += 1
    frame.report.walked.add(id(function))
    names = [argument.arg for argument in [*function.args.posonlyargs, *function.args.args]]
    if owner is not None and names[:1] in (["self"], ["cls"]):
        names = names[1:]
    words = [word.arg or "" for word in node.keywords]
    bound = dict(zip([*names[: len(node.args)], *words], arguments, strict=False))
    own = {name: value for name, value in state.values.items() if name.startswith("self.")}
    start = replace(state.copy(), values=own | bound, returned=None)
    region = _decorated(function, frame) if function.decorator_list else frame.region
    inner = replace(frame, class_name=owner or frame.class_name, stack=(*frame.stack, function), region=region)
    ends = walk_body(function.body, [start], inner)
    end = join([way for way in ends if way.returned is not None] or ends)
    values = state.values | {name: value for name, value in end.values.items() if name.startswith("self.")}
    state.adopt(replace(end, values=values, facts=state.facts, returned=state.returned, ended=state.ended))
    return end.returned or UNKNOWN


def _decorated(function: Function, frame: Frame) -> Region:
    regions = [read_region(one, frame.definitions.imports) for one in function.decorator_list]
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
            bind(part, UNKNOWN if "loss" in text_of(part) else value, way)
        return
    text = text_of(target)
    if not text:
        return
    if text in way.owners:
        for name in [name for name in way.values if name.startswith(f"{text}.")]:
            del way.values[name]
    way.values[text] = value
    parts = text.split(".")
    way.owners.update(".".join(parts[:end]) for end in range(1, len(parts)))


def _walk_if(statement: ast.If, way: State, frame: Frame) -> list[State]:
    evaluate(statement.test, way, frame)
    fact, positive = _fact(statement.test)
    matters = frame.definitions.scales and _touches_scaling(statement)
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
    definitions = frame.definitions
    for item in statement.items:
        context = item.context_expr
        region = read_region(context, definitions.imports) or definitions.regions.get(text_of(context))
        if region is None:
            value = evaluate(context, way, frame)
            if item.optional_vars is not None:
                bind(item.optional_vars, value, way)
        else:
            frame = replace(frame, region=region)
            way.note_region(region)
    return walk_body(statement.body, [way], frame)


def _revived(ways: list[State]) -> list[State]:
    """`break` and `continue` end a turn of the loop; what returned stays so."""
    for way in ways:
        way.ended = way.returned is not None
    return ways

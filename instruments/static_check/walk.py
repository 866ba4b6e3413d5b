"""Walk a file statement by statement, into autocast blocks and called functions; a way is a path through branches."""

import ast
from collections.abc import Sequence
from dataclasses import replace

from instruments.static_check.autocast import BFLOAT16, FLOAT16, called_name, last_word, text_of
from instruments.static_check.definitions import Function
from instruments.static_check.evaluate import bind, evaluate
from instruments.static_check.gradient_rules import depends_on, read_condition, touches_scaling
from instruments.static_check.modules import check_unused, module_key
from instruments.static_check.numeric_rules import check_constant, check_growing
from instruments.static_check.state import UNKNOWN, FileFacts, Frame, Region, State, Value, join

_MOST_WAYS = 8
_DEEPEST = 6
_MOST_LOOPS = 3  # nested loops that are walked twice
_MOST_CALLS = 2_000  # calls followed into functions; the other functions are walked once, on their own
_NO_GRAD = {"torch.no_grad", "torch.inference_mode", "torch.autograd.no_grad"}


def walk_file(file: FileFacts) -> None:
    """Walk a whole file: functions at their calls, uncalled functions on their own."""
    frame, definitions = Frame(file), file.definitions
    file.follow = call_function
    for name in definitions.bases:
        if function := definitions.functions.get(f"{name}.__init__"):
            _walk_alone(function, name, frame)
    start = State(values=file.outer, modules=dict(file.modules))
    end = join(walk_body(file.source.tree.body, [start], frame))
    file.outer, file.modules = end.values, file.modules | end.modules
    called = {called_name(node) for node in definitions.nodes if isinstance(node, ast.Call)} | {"forward"}
    # First functions that are not called in the file: they call the others inside the right autocast regions.
    for function, owner in sorted(definitions.owners, key=lambda pair: pair[0].name in called):
        if id(function) not in file.walked:
            _walk_alone(function, owner, frame)
    for name, precision in check_unused(State(modules=file.modules), frame):
        for part in definitions.classes_within(name):
            if forward := definitions.method(part, "forward"):
                _walk_alone(forward, part, replace(frame, weights=precision))
    for policy in definitions.policies:
        if policy.pure and policy.precision == FLOAT16:
            frame.report("LP101", policy.node, f"{ast.unparse(policy.node.func)}(): the weights in float16")


def _walk_alone(function: Function, owner: str | None, frame: Frame) -> None:
    """Walk a function whose calls are not known."""
    file = frame.file
    file.walked.add(id(function))
    inner = _entered(function, owner, replace(frame, class_name=owner, stack=(function,)))
    values = file.outer | _attributes(owner, frame) | _parameters(function, frame)
    start = State(values=values, modules=dict(file.modules))
    start.note_region(inner.region)
    end = join(walk_body(function.body, [start], inner) or [start])
    file.modules = end.modules | file.modules if owner is None else file.modules | end.modules
    _keep_attributes(owner, end, frame)


def _own_values(state: State) -> dict[str, Value]:
    """Values of `self.…`."""
    return {name: value for name, value in state.values.items() if name.startswith("self.")}


def _keep_attributes(owner: str | None, end: State, frame: Frame) -> None:
    if owner is not None:
        known = {name: value for name, value in _own_values(end).items() if value != UNKNOWN}
        frame.file.attributes[owner] = known | frame.file.attributes.get(owner, {})


def _attributes(owner: str | None, frame: Frame) -> dict[str, Value]:
    """Values of `self.…` in the class and its bases in this file."""
    found: dict[str, Value] = {}
    for one in frame.definitions.lineage(owner) if owner else ():
        found = frame.file.attributes.get(one, {}) | found
    return found


def _parameters(function: Function, frame: Frame) -> dict[str, Value]:
    """Parameters with their defaults, such as eps=1e-8, where these are floats or dtypes."""
    given = function.args
    names = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    positional = len(names) - len(given.kwonlyargs)
    defaults = [*[None] * (positional - len(given.defaults)), *given.defaults, *given.kw_defaults]
    found = dict.fromkeys((name.arg for name in names), UNKNOWN)
    for name, default in zip(names, defaults, strict=True):
        value = evaluate(default, State(), frame) if isinstance(default, ast.Constant | ast.Attribute) else UNKNOWN
        if value.kind == "dtype" or isinstance(value.constant, float):
            found[name.arg] = value
    return found


def _entered(function: Function, owner: str | None, frame: Frame) -> Frame:
    """The frame inside a function: with no_grad and autocast from decorators and libraries."""
    definitions = frame.definitions
    for decorator in function.decorator_list:
        bare = decorator.func if isinstance(decorator, ast.Call) else decorator
        if definitions.full_name(bare) in _NO_GRAD:
            frame = replace(frame, no_grad=True)
        call = decorator if isinstance(decorator, ast.Call) else ast.copy_location(ast.Call(bare, [], []), decorator)
        known = State(values=dict(frame.file.outer))
        value = evaluate(call, known, frame) if "autocast" in ast.unparse(bare) else UNKNOWN
        if isinstance(value.ref, Region):
            frame = replace(frame, region=value.ref)
    lightning = definitions.policy("lightning") if frame.is_lightning else None
    trained = owner is not None and function.name == "forward" and definitions.is_module_class(owner)
    policy = lightning or (definitions.policy("accelerate", "transformers") if trained else None)
    inside = function.name == "forward" or function.name.endswith(("_step", "_loss"))
    if policy and policy.precision in {FLOAT16, BFLOAT16} and not policy.pure and inside and not frame.region.enabled:
        frame = replace(frame, region=Region(True, "cuda", policy.precision))
    if frame.is_lightning and function.name.startswith(("validation", "test_", "predict", "on_validation")):
        frame = replace(frame, no_grad=True)
    return frame


def call_function(
    frame: Frame, state: State, function: Function, owner: str | None, node: ast.Call, arguments: list[Value]
) -> Value:
    """Walk into a function of the file and return the value of its call."""
    file = frame.file
    if function in frame.stack or len(frame.stack) >= _DEEPEST or file.calls >= _MOST_CALLS:
        return UNKNOWN
    file.calls += 1
    file.walked.add(id(function))
    bound = _parameters(function, frame)
    if owner is not None and next(iter(bound), "") in {"self", "cls"}:
        del bound[next(iter(bound))]
    words = [word.arg or "" for word in node.keywords]
    bound |= dict(zip([*[*bound][: len(node.args)], *words], arguments, strict=False))
    same = owner is None or owner == frame.class_name
    nested = file.definitions.parents.get(id(function)) in {id(one) for one in frame.stack}
    outer = state.values if nested or not frame.stack else file.outer
    values = outer | _attributes(owner, frame) | (_own_values(state) if same else {}) | bound
    start = replace(state.copy(), values=values, returned=None)
    weights = frame.weights if same or function.name == "forward" else None
    inner = replace(frame, class_name=owner or frame.class_name, stack=(*frame.stack, function), weights=weights)
    inner = _entered(function, owner, inner)
    start.note_region(inner.region)
    ends = walk_body(function.body, [start], inner)
    end = join([way for way in ends if way.returned is not None] or ends)
    kept = state.values | _own_values(end) if same else state.values
    if not same:
        _keep_attributes(owner, end, frame)
    state.adopt(replace(end, values=kept, facts=state.facts, returned=state.returned, ended=state.ended))
    return end.returned or UNKNOWN


def walk_body(body: Sequence[ast.stmt], ways: list[State], frame: Frame) -> list[State]:
    """Walk every statement on every way that reaches it; returns the ways at the end."""
    for place, statement in enumerate(body):
        going = [way for way in ways if not way.ended]
        ended = [way for way in ways if way.ended]
        if not going:
            break
        match statement:  # a context entered in this way is taken to last until the end of the body
            case ast.Expr(ast.Call(ast.Attribute(attr="enter_context"), [context])):
                rest = ast.copy_location(ast.With([ast.withitem(context)], [*body[place + 1 :]]), statement)
                return [*ended, *(after for way in going for after in _walk_with(rest, way, frame))]
        ways = [*ended, *(after for way in going for after in walk_statement(statement, way, frame))]
        if len(ways) > _MOST_WAYS:
            ways = [join(ways)]
    return ways


def walk_statement(statement: ast.stmt, way: State, frame: Frame) -> list[State]:  # noqa: C901, PLR0912 - a case a kind
    """Walk a statement; returns the ways after it."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            pass
        case ast.If():
            return _walk_if(statement, way, frame)
        case ast.For() | ast.AsyncFor() | ast.While():
            return _walk_loop(statement, way, frame)
        case ast.With() | ast.AsyncWith():
            return _walk_with(statement, way, frame)
        case ast.Try() | ast.TryStar():
            start = way.copy()
            ways = walk_body([*statement.body, *statement.orelse], [way], frame)
            for handler in statement.handlers:
                walk_body(handler.body, [start.copy()], frame)
            return walk_body(statement.finalbody, ways, frame)
        case ast.Match():
            evaluate(statement.subject, way, frame)
            return [join([end for case in statement.cases for end in walk_body(case.body, [way.copy()], frame)])]
        case ast.Assign():
            value = evaluate(statement.value, way, frame)
            for target in statement.targets:
                match target, statement.value:
                    case ast.Attribute(owner, "data"), ast.BinOp() as average:  # e.data = m * e.data + ...
                        kept = evaluate(owner, way, frame)
                        if kept.kind == "parameter" and ast.unparse(target) in ast.unparse(average):
                            check_growing(average, kept, frame)
                    case ast.Subscript(owner), _:  # x[mask] = -1e9
                        check_constant(target, value.number, evaluate(owner, way, frame), frame)
                bind(target, value, way)
        case ast.AnnAssign() if statement.value is not None:
            bind(statement.target, evaluate(statement.value, way, frame), way)
        case ast.AugAssign():
            together = ast.copy_location(ast.BinOp(statement.target, statement.op, statement.value), statement)
            before = way.values.get(text_of(statement.target), UNKNOWN)
            if before.tag == "new" and frame.in_loop and isinstance(statement.op, ast.Add):
                check_growing(together, before, frame)
            value = evaluate(together, way, frame)
            keeps = value.precision is None and before.is_low  # an in-place operation keeps the type
            bind(statement.target, before if keeps else value, way)
        case ast.Return():
            way.returned = evaluate(statement.value, way, frame) if statement.value else UNKNOWN
            way.ended = True
        case ast.Raise() | ast.Continue() | ast.Break():
            way.ended = True
        case ast.Expr(ast.Call(ast.Attribute(owner, "half" | "bfloat16" | "to")) as call) if text_of(owner):
            # A cast whose result is dropped is one in place, of a module.
            module_key(owner, evaluate(owner, way, frame), way, frame, surely=True)
            evaluate(call, way, frame)
        case _:
            for part in ast.iter_child_nodes(statement):
                if isinstance(part, ast.expr):
                    evaluate(part, way, frame)
    return [way]


def _walk_loop(statement: ast.For | ast.AsyncFor | ast.While, way: State, frame: Frame) -> list[State]:
    """Walk a loop once; twice if it scales gradients, the second time without conditions that the loop changes."""
    given = evaluate(statement.test if isinstance(statement, ast.While) else statement.iter, way, frame)
    inner = replace(frame, in_loop=frame.in_loop + 1)
    ways = [way]
    inside = frame.definitions.within(statement)
    changing = {last_word(text_of(node)) for node in inside if isinstance(getattr(node, "ctx", None), ast.Store)}
    for turn in range(2 if touches_scaling(statement, frame) and frame.in_loop < _MOST_LOOPS else 1):
        for one in ways if turn else ():
            one.facts = {fact: met for fact, met in one.facts.items() if not depends_on(fact, changing)}
            for sure in ("surely_unscaled", "done"):  # a rebound name may be another optimizer
                setattr(one, sure, frozenset(name for name in getattr(one, sure) if not depends_on(name, changing)))
        if not isinstance(statement, ast.While):
            for one in ways:
                bind(statement.target, given.element, one)
        for one in ways:
            one.clipped = None
        done = [one for one in ways if one.ended]
        ways = [*done, *_revived(walk_body(statement.body, [one for one in ways if not one.ended], inner))]
    return _revived(walk_body(statement.orelse, ways, frame))


def _walk_if(statement: ast.If, way: State, frame: Frame) -> list[State]:
    evaluate(statement.test, way, frame)
    before = dict(way.modules)
    met, other = way, way.copy()
    matters = (frame.definitions.scales or bool(frame.definitions.policies)) and touches_scaling(statement, frame)
    if matters:
        fact, positive = read_condition(statement.test, way)
        if fact in way.facts:
            return walk_body(statement.body if way.facts[fact] == positive else statement.orelse, [way], frame)
        met.facts[fact], other.facts[fact] = positive, not positive
    ends = [*walk_body(statement.body, [met], frame), *walk_body(statement.orelse, [other], frame)]
    if matters:
        return ends
    going, ended = [end for end in ends if not end.ended], [end for end in ends if end.ended]
    if not going:
        return ended
    joined = join(going)
    for end in reversed(going):  # a cast on one branch is one
        joined.modules |= {key: module for key, module in end.modules.items() if module is not before.get(key)}
    return [joined, *ended]


def _walk_with(statement: ast.With | ast.AsyncWith, way: State, frame: Frame) -> list[State]:
    for item in statement.items:
        context = item.context_expr
        value = evaluate(context, way, frame)
        full = frame.definitions.full_name(context.func) if isinstance(context, ast.Call) else ""
        if isinstance(value.ref, Region):
            frame = replace(frame, region=value.ref)
            if not frame.no_grad:
                way.note_region(value.ref)
        elif full in _NO_GRAD:
            frame = replace(frame, no_grad=True)
        elif item.optional_vars is not None:
            bind(item.optional_vars, value, way)
    return walk_body(statement.body, [way], frame)


def _revived(ways: list[State]) -> list[State]:
    """Ways after a turn of a loop: those ended by break, continue or raise go on, those that returned do not."""
    for way in ways:
        way.ended = way.returned is not None
    return ways

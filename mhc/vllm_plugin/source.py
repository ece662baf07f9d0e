"""Reading vLLM's DSpark sources: find the one expansion of the embeddings, or say why it is not to be touched.

Works on source text alone, so the same checks run before patching, in `python -m mhc vllm-status` and in the tests.
The statement looked for, in the draft model's forward, is vLLM's

    hidden_states = inputs_embeds.unsqueeze(-2).repeat(1, self.hc_mult, 1)

and it becomes `inputs_embeds if <the plugin is active> else <the same expression>`: vLLM's own path stays in place.
For the token table the look-up before it, `inputs_embeds = self.embed_input_ids(input_ids)`, becomes a call of ours,
provided that nothing but the expansion and the first pre sees what it returns (`look_up`).
"""

from __future__ import annotations
import __future__

import ast
from dataclasses import dataclass
from types import CodeType

DRAFT_CLASS = "DSparkDeepseekV4Model"
LAYER_CLASS = "DeepseekV4DecoderLayer"
TARGET_CLASS = "DeepseekV4ForCausalLM"
BROADCAST_OP = "mhc_pre_broadcast_tilelang"
DELAYED_OP = "mhc_pre_delayed_tilelang"
WEIGHT = "hc_attn_fn_broadcast"
# what either pre takes after the embeddings and the projection; `first_pre` calls them with the same
PRE_ARGUMENTS = [f"self.{name}" for name in (
    "hc_attn_scale", "hc_attn_base", "rms_norm_eps", "hc_eps", "hc_eps", "hc_post_alpha", "hc_sinkhorn_iters"
)]  # fmt: skip
GUARD = "_mhc_keeps_embeddings"
LOOK_UP = "_mhc_embeddings"
EMBEDDING = "embed_tokens"
EXPANDING = {"repeat", "expand", "repeat_interleave", "tile", "broadcast_to", "expand_as"}


class Mismatch(ValueError):
    """This vLLM is not what the plugin knows: the message says what was found."""


@dataclass(frozen=True)
class Match:
    """What would be changed.

    Attributes:
        line: 1-based line of the expansion in the draft's module.
        statement: its source.
        delayed: whether the layer's pre is V4.1's delayed one, which only vLLM's own kernel computes.
        no_table: why the first pre cannot come from a token table; None where it can.
    """

    line: int
    statement: str
    delayed: bool
    no_table: str | None


def examine(draft: str, layer: str) -> Match:
    """Look at both sources: the draft model's module and that of its decoder layer.

    Raises:
        Mismatch: there is not exactly one expansion, or the draft or the layer is built differently.
    """
    tree, layer_tree = ast.parse(draft), ast.parse(layer)
    forward = _method(tree, DRAFT_CLASS, "forward")
    statement = _expansion(forward)
    _check_first_use(forward, statement)
    delayed = _is_delayed(layer_tree)
    no_table = "its pre is delayed" if delayed else None
    if not delayed:
        try:
            _look_up(tree, forward)
            _check_only_the_pre_reads(layer_tree)
            _function(_class(layer_tree, TARGET_CLASS), "load_weights")
        except Mismatch as error:
            no_table = str(error)
    return Match(statement.lineno, ast.unparse(statement), delayed, no_table)


def transformed(draft: str, filename: str, table: bool) -> CodeType:
    """Compile the draft's forward with the expansion made conditional; running the code defines `forward`.

    Lines are those of the original file, so tracebacks stay true.

    Args:
        draft: source of the draft's module.
        filename: where it is.
        table: whether the look-up of the token ids becomes ours, too.

    Raises:
        Mismatch: as `examine`.
    """
    tree = ast.parse(draft)
    forward = _method(tree, DRAFT_CLASS, "forward")
    statement = _expansion(forward)
    _check_first_use(forward, statement)
    embeddings = _embeddings(statement)
    if table:
        _look_up(tree, forward).value = _call(LOOK_UP, "self", "input_ids")
    statement.value = ast.IfExp(_call(GUARD, "self", embeddings), ast.Name(embeddings, ast.Load()), statement.value)
    flags = 0
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            for alias in node.names:
                flags |= getattr(__future__, alias.name).compiler_flag
    module = ast.fix_missing_locations(ast.Module([forward], []))
    return compile(module, filename, "exec", flags=flags, dont_inherit=True)


def calls_model_hook(loader: str) -> bool:
    """Whether vLLM's loader calls a model's own `process_weights_after_loading()`; 0.26.0 does not."""
    function = _function(ast.parse(loader), "process_weights_after_loading")
    return any(
        isinstance(node, ast.Call) and not node.args and ast.unparse(node.func) == "model.process_weights_after_loading"
        for node in ast.walk(function)
    )


def _call(function: str, *names: str) -> ast.Call:
    return ast.Call(ast.Name(function, ast.Load()), [ast.Name(name, ast.Load()) for name in names], [])


def _function(tree: ast.AST, name: str) -> ast.FunctionDef:
    found = [node for node in ast.iter_child_nodes(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
    if len(found) != 1:
        raise Mismatch(f"{len(found)} definitions of {name}, expected one")
    return found[0]


def _class(tree: ast.Module, name: str) -> ast.ClassDef:
    found = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    if len(found) != 1:
        raise Mismatch(f"{len(found)} classes {name}, expected one")
    if found[0].decorator_list:
        raise Mismatch(f"class {name} is decorated with {ast.unparse(found[0].decorator_list[0])}")
    return found[0]


def _method(tree: ast.Module, owner: str, name: str) -> ast.FunctionDef:
    try:
        method = _function(_class(tree, owner), name)
    except Mismatch as error:
        raise Mismatch(f"{owner}.{name}: {error}") from None
    if method.decorator_list:
        raise Mismatch(f"{owner}.{name} is decorated with {ast.unparse(method.decorator_list[0])}")
    if any(isinstance(node, ast.Name) and node.id in ("super", "__class__") for node in ast.walk(method)):
        raise Mismatch(f"{owner}.{name} uses super, which a compiled copy would not have")
    return method


def _is_expansion(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in EXPANDING
        and any("hc_mult" in ast.unparse(argument) for argument in node.args)
    )


def _expansion(forward: ast.FunctionDef) -> ast.Assign:
    """The one statement that expands, directly in the body."""
    found = [node for node in ast.walk(forward) if _is_expansion(node)]
    if len(found) != 1:
        lines = ", ".join(f"line {node.lineno}: {ast.unparse(node)}" for node in found)  # type: ignore[attr-defined]
        raise Mismatch(
            f"{len(found)} expansions by hc_mult in {DRAFT_CLASS}.forward, expected one" + f" ({lines})" * bool(lines)
        )
    for statement in forward.body:
        if isinstance(statement, ast.Assign) and statement.value is found[0]:
            _embeddings(statement)
            return statement
    raise Mismatch(f"the expansion is not a plain assignment in the body of {DRAFT_CLASS}.forward: "
                   f"{ast.unparse(found[0])}")  # fmt: skip


def _embeddings(statement: ast.Assign) -> str:
    """The name that is expanded, given that the statement has the known form."""
    source = statement.value
    if len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        base = source.func.value  # type: ignore[attr-defined]
        if (
            isinstance(base, ast.Call)
            and isinstance(base.func, ast.Attribute)
            and isinstance(base.func.value, ast.Name)
        ):
            name = base.func.value.id
            if ast.unparse(source) in {f"{name}.unsqueeze({d}).repeat(1, self.hc_mult, 1)" for d in (-2, 1)}:
                return name
    raise Mismatch(f"the expansion has an unknown form: {ast.unparse(statement)}")


def _check_first_use(forward: ast.FunctionDef, statement: ast.Assign) -> None:
    """The first to see the expanded tensor must be the first layer, as its first argument, with no residual yet."""
    target = statement.targets[0].id  # type: ignore[attr-defined]
    nones: set[str] = set()
    for following in forward.body[forward.body.index(statement) + 1 :]:
        if isinstance(following, ast.Assign) and isinstance(following.value, ast.Constant):
            if following.value.value is None:
                nones |= {ast.unparse(t) for t in following.targets}
                continue
        elif isinstance(following, ast.For) and ast.unparse(following.iter) == "self.layers":
            call = following.body[0].value if isinstance(following.body[0], ast.Assign) else None
            if (
                isinstance(call, ast.Call)
                and ast.unparse(call.func) == ast.unparse(following.target)
                and call.args
                and ast.unparse(call.args[0]) == target
                and target not in {ast.unparse(a) for a in call.args[1:]}
                and "residual" in nones & {ast.unparse(a) for a in call.args[1:]}
            ):
                return
        raise Mismatch(f"line {following.lineno}: expected self.layers to be first to see {target}, "
                       f"found {ast.unparse(following).splitlines()[0]}")  # fmt: skip
    raise Mismatch(f"{DRAFT_CLASS}.forward never hands {target} to self.layers")


def _look_up(tree: ast.Module, forward: ast.FunctionDef) -> ast.Assign:
    """The statement that looks the token ids up, given that its result is only expanded.

    With sequence parallelism its result is also cut into shards, but then no table is used.

    Raises:
        Mismatch: there is no such statement, or something else sees the embeddings.
    """
    own = _function(_class(tree, DRAFT_CLASS), "embed_input_ids").body
    if [ast.unparse(statement) for statement in own] != [f"return self.{EMBEDDING}(input_ids)"]:
        raise Mismatch(f"{DRAFT_CLASS}.embed_input_ids is more than self.{EMBEDDING}(input_ids)")
    expansion = _expansion(forward)
    name = _embeddings(expansion)
    wanted = f"if {name} is None:\n    {name} = self.embed_input_ids(input_ids)"
    found = [statement for statement in forward.body if ast.unparse(statement) == wanted]
    if len(found) != 1:
        raise Mismatch(f"{len(found)} look-ups of input_ids in {DRAFT_CLASS}.forward, expected one")
    for statement in forward.body:
        sharding = isinstance(statement, ast.If) and ast.unparse(statement.test) == "self.use_sequence_parallel"
        if statement not in (found[0], expansion) and not sharding and _reads(statement, name):
            raise Mismatch(f"line {statement.lineno}: {name} is also read by {ast.unparse(statement).splitlines()[0]}")
    return found[0].body[0]  # type: ignore[attr-defined]


def _reads(node: ast.AST, name: str) -> int:
    """How often a name is read in a piece of source."""
    return sum(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load) for n in ast.walk(node))


def _check_only_the_pre_reads(layer: ast.Module) -> None:
    """In the branch for 2-D embeddings the layer hands x to its pre, once, and never sees it again."""
    forward = _method(layer, LAYER_CLASS, "forward")
    outer, branch = _branch(forward)
    before = forward.body[: forward.body.index(outer)] if outer in forward.body else forward.body
    once = sum(_reads(statement, "x") for statement in branch.body) == 1
    replaced = any(
        isinstance(node, ast.Name) and node.id == "x" and isinstance(node.ctx, ast.Store)
        for statement in branch.body
        for node in ast.walk(statement)
    )
    if not (once and replaced and outer.body == [branch]) or any(_reads(statement, "x") for statement in before):
        raise Mismatch(f"{LAYER_CLASS}.forward reads 2-D embeddings outside of their pre")


def _branch(forward: ast.FunctionDef) -> tuple[ast.If, ast.If]:
    """Of the layer: `if residual is None` and in it `if x.dim() == 2`."""
    branches = [
        (outer, inner)
        for outer in ast.walk(forward)
        if isinstance(outer, ast.If) and ast.unparse(outer.test) == "residual is None"
        for inner in outer.body
        if isinstance(inner, ast.If) and ast.unparse(inner.test) == "x.dim() == 2"
    ]
    if len(branches) != 1:
        raise Mismatch(f"{len(branches)} branches for 2-D embeddings in {LAYER_CLASS}.forward, expected one")
    return branches[0]


def _is_delayed(layer: ast.Module) -> bool:
    """Check that the layer takes 2-D embeddings on its own; whether their pre is V4.1's delayed one."""
    _, branch = _branch(_method(layer, LAYER_CLASS, "forward"))
    calls = [node for part in branch.body for node in ast.walk(part) if isinstance(node, ast.Call)]
    pres = [call for call in calls if [ast.unparse(a) for a in call.args[2:]] == PRE_ARGUMENTS]
    if len(pres) == 1:
        first = [ast.unparse(argument) for argument in pres[0].args[:2]]
        named = {keyword.arg: ast.unparse(keyword.value) for keyword in pres[0].keywords}
        if {"norm_weight", "norm_eps"} <= set(named):
            if ast.unparse(pres[0].func) == BROADCAST_OP and first == ["x", "self.hc_attn_fn"]:
                if named.get("fn_broadcast") == f"self.{WEIGHT}":
                    return False
            elif first == ["residual", f"self.{WEIGHT}"] and named.get("x") == "x":
                return True
    raise Mismatch(
        f"the branch for 2-D embeddings in {LAYER_CLASS}.forward does not call a known pre with self.{WEIGHT}"
    )

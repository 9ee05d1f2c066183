"""Whether a layer's graph treats each token by itself, but for attention under a document mask.

Only such a layer may run on one row of documents in the place of rows with padding. A mean over all tokens, the
extremes of a tensor, a convolution, positions that are counted from a shape: whichever module, adapter or function of
the user's they come from, they are operations of the graph. So the graph is run once on fake tensors, with a prime
number of tokens: a dimension whose size it divides is the dimension of tokens, and each operation is looked up in a
table of those that are known to leave tokens apart. What is not in the table may mix them.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils._pytree import tree_leaves

from tunecompile._torch.fake_tensors import FakeTensorMode, TorchDispatchMode, guards_at, size_hint, size_with
from tunecompile.compiler.attention_calls import AttentionArguments, attention_calls, document_mask_of
from tunecompile.compiler.attention_calls.reading import asked
from tunecompile.compiler.token_wise.operations import (
    SHAPED,
    TOKENS,
    has_rows_behind,
    leaves_apart,
    mark_rows,
    tokens_of,
)
from tunecompile.ir.canonicalize import name_of, value
from tunecompile.ir.op import HALF, has_triton
from tunecompile.ir.pretend_gpu import on_gpu
from tunecompile.ir.rewrite import user_frame, where_from
from tunecompile.notes import Note, note
from tunecompile.ops import (
    branch_rows,
    channel_delta_rule,
    first_copies,
    gated_delta_rule,
    selective_scan,
    short_convolution,
    ssd_scan,
)

LENGTHS = (384, 1152, 8320, 40064, 1000064)  #: numbers of tokens that lead to the same graph, if it follows none
#: transformers' own code that sorts tokens by expert, and puts them back: a stated exception, since order is restored
_ROUTING = ("transformers/integrations/moe.py",)


class _MayMix(Exception):
    """Ends the reading of a graph: `reason` says why it may mix tokens."""

    def __init__(self, reason: Note):
        super().__init__(reason)
        self.reason = reason


def _end(code: str, detail: str = "") -> NoReturn:
    raise _MayMix(note(code, detail=detail) if detail else note(code))


def is_tree(mask: Node) -> bool:
    """Whether documents of a call of `document_mask` go on from others."""
    return len(mask.args) > 5 and mask.args[5] is not None


def not_by_documents(call: AttentionArguments, tree: bool = False) -> Note | None:
    """Why attention under a document mask cannot be `varlen_attention`, or `dropout_attention`.

    Args:
        call: with values in the place of nodes.
        tree: whether documents go on from others, so that it has to be `branch_attention`.
    """
    q, k, v = call.query, call.key, call.value
    if call.dropout and (tree or call.softcap or call.sinks is not None or not _is_share(call.dropout)):
        return note("attention-dropout")
    if call.causal or not all(isinstance(x, Tensor) and x.dim() == 4 and x.shape[0] == 1 for x in (q, k, v)):
        return note("own-mask")
    if not isinstance(call.scale, (int, float, type(None))):
        return note("attention-argument", "", "a scale that is a tensor")
    if on_gpu(q):
        half = q.dtype in HALF or torch.is_autocast_enabled(q.device.type)
        width = max(q.shape[-1], v.shape[-1])
        flash = width % 8 == 0 and width <= 256 and not (call.softcap or call.dropout or tree)
        if not half or not (flash or (has_triton() and 16 <= width <= 512)):
            return note("no-unpadded-kernel")
    return None


def _is_share(dropout: Any) -> bool:
    """Whether it is a number of weights to drop by, and not all of them."""
    return isinstance(dropout, (int, float)) and 0 <= dropout < 1


def why_not_token_wise(gm: GraphModule, unread: bool = False, collected: int = 0, is_tree: bool = False) -> Note | None:
    """Why a layer's graph, as Dynamo made it for a row of documents [1, N, ...], may mix tokens; None where it cannot.

    Args:
        gm: with N as a symbol. It is not changed.
        unread: whether attention weights among its results are not read.
        collected: how many of its results are values of modules inside, [N, ...] or [1, N, ...], that the caller takes.
        is_tree: whether documents go on from others, so that tokens are of several rows.
    """
    try:
        tokens = _number_of_tokens(gm)
        if not all(map(all, guards_at(tokens, LENGTHS))):
            return note("mixes-tokens", detail="it depends on the number of tokens")
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            inputs = _inputs(gm, tokens)
            with _LeavesTokensApart(is_tree) as mode:
                _Reader(gm, mode, unread, collected).run(*inputs)
    except _MayMix as found:
        return found.reason
    except Exception as error:  # an operation that fake tensors refuse, say
        return note("graph-not-understood", detail=f"{type(error).__name__}: {str(error).splitlines()[0][:120]}")
    return None


def _inputs(gm: GraphModule, tokens: Any) -> list[Any]:
    """The graph's inputs, as fake tensors of `TOKENS` tokens in the place of the symbol.

    Where a graph holds two rows and never compares them, each has a symbol of its own: what a decoder's layer is given
    of its encoder, say, whose tokens it must not mix either, or keys of another layer. Whole rows, of which tokens of a
    tree are shared, have twice as many.
    """
    nodes = gm.graph.find_nodes(op="placeholder")
    values = [*map(value, nodes)]
    rows = [n for v in values if isinstance(v, Tensor) and v.dim() > 1 and v.shape[0] == 1 for n in v.shape[1:3]]
    symbols = [(size, TOKENS) for size in (tokens, *rows) if not isinstance(size, int)]
    for name, dim, count in ((ROWS[0], 0, 2 * TOKENS), (ROWS[1], 1, TOKENS)):
        symbols += [(value(node).shape[dim], count) for node in nodes if _is_given(node, name)]

    def size(given: Any) -> int:
        if isinstance(given, int):
            return given
        sizes = (size_with(given, symbol, count) for symbol, count in symbols)
        return next((made for made in sizes if made != size_hint(given)), size_hint(given))

    def make(given: Any) -> Any:
        if isinstance(given, torch.SymInt):
            return size(given)
        if not isinstance(given, Tensor):
            return given
        order = sorted(range(given.dim()), key=lambda dim: -size_hint(given.stride(dim)))
        return torch.empty_permuted([size(n) for n in given.shape], order, dtype=given.dtype, device=given.device)

    return [make(value(node)) for node in gm.graph.find_nodes(op="placeholder")]


class _Reader(Interpreter):
    """Runs a graph; attention under a document mask is taken for what it is."""

    def __init__(self, gm: GraphModule, mode: _LeavesTokensApart, unread: bool, collected: int):
        super().__init__(gm, garbage_collect_values=False)  # what attention reads may be last read in the midst of it
        self.mode, self.attention, self.of_images = mode, attention_calls(gm.graph, unread), is_told_of_images(gm)
        self.collected = collected
        self.skipped = {node for call in self.attention.values() for node in call.inside}

    def run_node(self, n: Node) -> Any:
        self.mode.node = n
        if n in self.skipped or (mask := document_mask_of(n)) is not None:
            if self.of_images and n not in self.skipped and not _is_given(mask.args[0], IMAGE_OFFSETS):
                _end("own-mask")  # of other bounds, which end before what fills up the row
            return None  # read by attention alone, see below
        if n.op == "output":
            self._look_at_outputs(n)
        elif _is_number_of_size(n) and not _is_routing(n):
            _end("mixes-tokens", f"the length is a number in it{where_from(n)}")
        if n in self.attention:
            return self._attention(n)
        if n.target in _BY_DOCUMENTS and not _has_offsets(n, ROW_OFFSETS if self.mode.is_tree else OFFSETS):
            _end("states-of-branches" if self.mode.is_tree else "mixes-tokens", f"{name_of(n.target)}{where_from(n)}")
        if n.target in _OF_ROWS and (n.kwargs or not all(map(_is_given, n.args[1:], ROWS))):
            _end("mixes-tokens", f"{name_of(n.target)}{where_from(n)}")
        if any(document_mask_of(each) is not None for each in n.all_input_nodes):
            _end("mixes-tokens", f"{name_of(n.target)}, which reads the mask{where_from(n)}")
        return super().run_node(n)

    def _attention(self, node: Node) -> Tensor:
        arguments = self.attention[node].arguments
        call = arguments.map(lambda given: self.env[given] if isinstance(given, Node) else given)
        if (reason := not_by_documents(call, self.mode.is_tree)) is not None:
            raise _MayMix(reason)
        if any(tokens_of(x) != [2] for x in (call.query, call.key, call.value)):
            _end("own-mask")
        kind = call.query.device.type
        casts = torch.is_autocast_enabled(kind) and call.query.dtype != torch.float64
        like = call.query[..., :1].expand(*call.query.shape[:-1], call.value.shape[-1])
        return torch.empty_like(like, dtype=torch.get_autocast_dtype(kind) if casts else None)

    def _look_at_outputs(self, node: Node) -> None:
        """One row of tokens is the layer's result. Another one may be kept in an attribute, say, and its mean over a
        batch counts padding. Beside it are values of modules inside that the caller takes.
        """
        rows = 0
        for made in (self.env[each] for each in node.all_input_nodes):
            tokens = tokens_of(made) if isinstance(made, Tensor) else []
            heads = tokens == [2] and _has_heads(made) and not has_rows_behind(made)
            rows += bool(tokens) and not heads
            is_row = (tokens == [1] and made.shape[0] == 1) or (tokens == [0] and (self.of_images or self.collected))
            whole = self.mode.is_tree and 2 * TOKENS in made.shape  # rows with copies of what they share
            if rows > 1 + self.collected or whole or (tokens and not heads and not is_row):
                _end("output-holds-more")


def hands_on(gm: GraphModule) -> int:
    """How many tensors [1, H, N, D] a graph for a row of documents returns: keys that other layers read, perhaps."""
    made = [value(each) for node in gm.graph.find_nodes(op="output") for each in node.all_input_nodes]
    shapes = [each.shape for each in made if _has_heads(each)]  # attention weights have tokens twice, and are not read
    return sum(isinstance(shape[2], torch.SymInt) and isinstance(shape[3], int) for shape in shapes)


def _has_heads(given: Any) -> bool:
    """Whether it may be keys or values: [1, H, N, D]."""
    return isinstance(given, Tensor) and given.dim() == 4 and isinstance(given.shape[0], int) and given.shape[0] == 1


#: ops that keep documents apart, where they are told of them -> the place of that argument
_BY_DOCUMENTS: dict[Any, int] = {
    op.overload: op.parameters.index("offsets")
    for op in (channel_delta_rule, gated_delta_rule, selective_scan, short_convolution, ssd_scan)
}
OFFSETS = "document_offsets"  #: what a layer's argument is called that has them, as an input of its graph
ROW_OFFSETS = "row_offsets"  #: in their place where documents go on from others: int32 [rows + 2]
ROWS = ("row_tokens", "first_places", "further_places")  #: and what `branch_rows` is given
_OF_ROWS = (branch_rows.overload, first_copies.overload)
#: the same of a tower, int32 [images + 2]: the last image is empty, or what fills up the row
IMAGE_OFFSETS = "image_offsets"


def is_recurrence(target: Any) -> bool:
    """Whether an op reads tokens before each, and no other document's where it is told of documents."""
    return target in _BY_DOCUMENTS


def recurrences(graph: Graph) -> int:
    """How many ops of a graph are recurrences."""
    return sum(is_recurrence(node.target) for node in graph.nodes)


def _has_offsets(node: Node, name: str) -> bool:
    """Whether an op's documents are those of the row. (Those that a collator gives count padding.)"""
    return _is_given(asked(node, "offsets", _BY_DOCUMENTS[node.target]), name)


def _is_given(offsets: Any, name: str) -> bool:
    return isinstance(offsets, Node) and offsets.op == "placeholder" and name in offsets.name


def is_told_of_images(gm: GraphModule) -> bool:
    """Whether a graph is of a tower's row of patches, [N, ...] or [1, N, ...], that is told where images begin."""
    return any(_is_given(node, IMAGE_OFFSETS) for node in gm.graph.find_nodes(op="placeholder"))


class _LeavesTokensApart(TorchDispatchMode):
    """Ends the reading at the first operation that is not known to leave tokens apart."""

    node: Node  #: that is run; `_Reader` sets it

    def __init__(self, is_tree: bool):
        super().__init__()
        self.is_tree = is_tree  #: whether rows share tokens, each of which would draw for itself

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if self.is_tree and torch.Tag.nondeterministic_seeded in func.tags:
            _end("draws-random", f"{func.__name__.partition('.')[0]}{where_from(self.node)}")
        if _is_routing(self.node):
            return made
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(made) if isinstance(x, Tensor)]
        if func in _BY_DOCUMENTS:  # `_Reader` has looked at its documents, of rows in a tree
            count = TOKENS * (1 + self.is_tree)
            apart = all(not tokens_of(x) or (tokens_of(x), x.shape[1]) == ([1], count) for x in (*given, *outputs))
        elif func in _OF_ROWS:  # and at the places of tokens
            apart = tokens_of(given[0]) == tokens_of(outputs[0]) == [1]
        else:
            apart = not any(map(tokens_of, (*given, *outputs))) or leaves_apart(
                func, args, kwargs or {}, given, outputs
            )
        if not apart:
            _end("mixes-tokens", f"{func.__name__.partition('.')[0]}{where_from(self.node)}")
        mark_rows(func, given, outputs)
        return made


def _is_routing(node: Node) -> bool:
    """Whether a node is of code that is known to put tokens back in order."""
    return user_frame(node)[0].endswith(_ROUTING)


def _is_number_of_size(node: Node) -> bool:
    """Whether a tensor is computed from a size, as a number and not as a shape."""
    if bodies := _bodies(node):  # to which Dynamo hands all symbols, for their shapes
        return any(_is_number_of_size(each) for body in bodies for each in body.graph.nodes if each.op != "output")
    sizes = (torch.SymInt, torch.SymFloat, torch.SymBool)
    if not any(isinstance(value(each), sizes) for each in node.all_input_nodes):
        return False
    made = tree_leaves(value(node))
    return any(isinstance(each, Tensor) for each in made) and name_of(node.target) not in SHAPED


def _bodies(node: Node) -> list[GraphModule]:
    """The graphs that a call runs: those of an autograd function, or of a checkpoint."""
    owner = node.graph.owning_module
    names = [each.target for each in node.all_input_nodes if each.op == "get_attr"]
    found = [getattr(owner, name, None) for name in names if isinstance(name, str)]
    return [each for each in found if isinstance(each, GraphModule)]


def _number_of_tokens(gm: GraphModule) -> Any:
    """The symbol N of the row [1, N, ...] that a graph was made for, or of a tower's [N, H].

    Raises:
        _MayMix: there is none.
    """
    values = [v for v in map(value, gm.graph.find_nodes(op="placeholder")) if isinstance(v, Tensor)]
    tokens = next((v.shape[1] for v in values if v.dim() > 2 and v.shape[0] == 1), None)
    if tokens is None and is_told_of_images(gm):
        rows = (v.shape[0] for v in values if v.dim() == 2 and v.is_floating_point() and v.shape[1] != 0)
        tokens = next((size for size in rows if not isinstance(size, int)), None)
    if tokens is None or isinstance(tokens, int):
        _end("graph-not-understood", "the number of tokens is a constant of it")
    return tokens

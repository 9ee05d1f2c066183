"""One batch as a row of documents: a layer's arguments [B, T, ...] as [1, N, ...], and its results back."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tunecompile._torch.cuda import where_set
from tunecompile.compiler.token_wise.graph import IMAGE_OFFSETS, OFFSETS, ROW_OFFSETS, ROWS
from tunecompile.notes import note
from tunecompile.runtime.cuda_graphs.between import Between
from tunecompile.runtime.step.rows_refused import RowsRefused
from tunecompile.runtime.unpad.documents import Documents
from tunecompile.runtime.unpad.masks.given import hidden_in
from tunecompile.runtime.unpad.prefixes.shared import SharedPrefixes
from tunecompile.runtime.unpad.sizes import (
    FINE_PARTS,
    launched_for,
    multiple_on,
    power_of_two,
    rounded_to,
    rounded_up,
)

#: OFFSETS, int32 [S + 2]: where documents begin; the last one is the rounding up of N
LONGEST = "longest_document"  #: a tensor [L, 0], read for its size alone: an int would cause recompilations
#: how many tokens a token sees, as `Documents` has it; as a text, since an int may become a symbol
WINDOW = "document_window"
MASKS = "document_masks"  #: positions and names of the arguments that are the mask
ADDED = "document_mask_added"  #: the dtype in which the mask is added to scores, as a text; empty where it is of bools
#: int [S + 1]: where documents of a packed row begin, as the model was told, whose code keeps it from its layers
BOUNDS_BESIDE = "document_bounds"
IMAGE_BOUNDS = "image_bounds"  #: int [images + 1]; the same tensor that a layer is given under its own name
LONGEST_IMAGE = "longest_image"  #: a tensor [L, 0], read for its size alone: an int would cause recompilations
ROUNDED = 128  #: what the longest image is rounded up to, at least
TREE = "document_tree"  #: int32 [2, S], where documents go on from others: see `ops.branch_attention`
PLACES = "document_places"  #: int32 [N], with a tree: the place of each token in its row
#: ROW_OFFSETS and ROWS, with a tree in layers that have recurrences: see `prefixes.rows.BranchRows`

#: what collators tell other attention of boundaries; ours has them from the mask
BOUNDARIES = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}


@dataclass
class Rows:
    """What layers that are given the same tokens read of each other, as the row that it was."""

    #: tensors that several layers are given, such as rotary tables, and what became of them
    shared: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    #: the last layer's result, padded, its state and flat
    last: tuple[weakref.ref, tuple, Tensor] | None = None
    #: what layers hand on beside their results, by the padded tensor's id: padded, its state, and flat
    handed: dict[int, tuple[Tensor, tuple, Tensor]] = field(default_factory=dict)
    #: by the id of bounds of images: these, and the offsets and the longest that they make
    images: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)
    ones: dict[torch.dtype, Tensor] = field(default_factory=dict)  #: [1, N], which tokens are real: all of them

    def forget(self) -> None:
        """The model's layers are done: let go of what they share."""
        for each in (self.shared, self.handed, self.images, self.ones):
            each.clear()
        self.last = None

    def all_real(self, dtype: torch.dtype, index: Tensor) -> Tensor:
        """Ones [1, N], for an index [N]."""
        if dtype not in self.ones:
            self.ones[dtype] = torch.ones(1, len(index), dtype=dtype, device=index.device)
        return self.ones[dtype]

    def row_of(self, padded: Tensor) -> Tensor | None:
        """What a layer's result was before it was padded, so that what comes next need not gather it again.

        None where it is another tensor, was written to, or where a hook waits for its gradient.
        """
        if isinstance(padded, Between):
            return padded.passed(self, padded.under_way)
        if self.last is None:
            return None
        made, state, flat = self.last
        if made() is not padded or _state(padded) != state or padded._backward_hooks or padded.retains_grad:
            return None
        return flat


@dataclass
class FlatBatch:
    """The real tokens of one batch [B, T]."""

    index: Tensor  #: int64 [N]: the place of each token; beyond the last real token, place 0
    offsets: Tensor
    longest: Tensor
    window: int
    real: int
    shape: tuple[int, int]
    whole: bool = False  #: whether each row is one document without padding
    fills: str | int = ""  #: an argument of layers that is None, and becomes the mask: its name, or its position
    #: such that become ones [1, N] of these dtypes: which tokens are real
    real_rows: tuple[tuple[str, torch.dtype], ...] = ()
    rounds: bool = False  #: whether it is no other batch than its rows, and only its size is another, see `rounding`
    joins: bool = False  #: whether it has no padding, and runs by the graph of batches that have
    lone: bool = False  #: whether its one row has no dimension: the patches [N, H] of a tower
    bounds: Tensor | None = None  #: int [images + 1], where a tower's images begin; layers are given it as it is
    shared: SharedPrefixes | None = None  #: where prefixes that rows share are there once
    rows: Rows = field(default_factory=Rows)

    @staticmethod
    def of(found: Documents, waited: float = 0) -> FlatBatch:
        """From what a mask says. waited: tokens of a row below which launches are waited for, as far as is known."""
        if found.full:
            return FlatBatch.of_whole_rows(*found.real.shape, found.window, found.real.device)
        device, (rows, length), multiple = found.real.device, found.real.shape, multiple_on(found.real.device)
        waits = found.count < waited  # a coarser size then: fewer are recorded, and the device has time
        total = rounded_up(found.count, device, FINE_PARTS) if waits else rounded_to(found.count, multiple)
        order = where_set(found.real.flatten(), found.count)
        begin = where_set(found.starts.flatten()[order], found.documents)
        ends = [torch.full((1,), end, device=device) for end in (found.count, total)]  # a list of numbers would wait
        longest = torch.empty(
            launched_for(max(found.longest, total - found.count, 2), total, multiple, waits), 0, device=device
        )
        return FlatBatch(
            F.pad(order, (0, total - found.count)),
            torch.cat([begin, *ends]).to(torch.int32),
            longest,
            found.window,
            found.count,
            (rows, length),
        )

    @staticmethod
    def of_whole_rows(rows: int, length: int, window: int, device: torch.device, total: int = 0) -> FlatBatch:
        """Where each row is a document, so that nothing has to be known but the shape.

        total: N; 0: the next multiple of what kernels are made for.
        """
        count, multiple = rows * length, multiple_on(device)
        longest = max(length, -(-total // rows), 2)  # as good as the same for all batches of so many rows and tokens
        total = total or rounded_to(count, multiple)
        offsets = torch.arange(rows + 2, device=device, dtype=torch.int32) * length
        offsets[-1:].fill_(total)
        longest = torch.empty(launched_for(max(longest, total - count), total, multiple), 0, device=device)
        index = F.pad(torch.arange(count, device=device), (0, total - count))
        return FlatBatch(index, offsets, longest, window, count, (rows, length), whole=True)

    @staticmethod
    def of_shared(shared: SharedPrefixes, shape: tuple[int, int], window: int) -> FlatBatch:
        """Where rows that begin alike go on from one document."""
        count, total, device = shared.forest.count, len(shared.index), shared.index.device
        longest = launched_for(max(shared.forest.longest, total - count, 2), total, multiple_on(device))
        longest = torch.empty(longest, 0, device=device)
        return FlatBatch(shared.index, shared.offsets, longest, window, count, shape, shared=shared)

    def by_images(self, bounds: Tensor, offsets: Tensor, longest: int) -> FlatBatch:
        """The same row for layers that are given these bounds: what fills it up is an image behind the others.

        Args:
            bounds: int [images + 1].
            offsets: int32 [images + 2], the same with an empty image behind them.
            longest: at least the patches of the longest image.
        """
        if id(bounds) not in self.rows.images:
            total = len(self.index)
            # Powers of two, since each new size may cost a recording: further images are empty. And one more, so that
            # the longest is no other size by chance.
            longest = power_of_two(max(longest, total - self.real, ROUNDED)) + 1
            offsets = F.pad(offsets[:-1], (0, power_of_two(len(offsets)) - len(offsets) + 1), value=total)
            setattr(offsets, FILLS, True)
            self.rows.images[id(bounds)] = bounds, offsets, torch.empty(longest, 0, device=bounds.device)
        bounds, offsets, longest_of = self.rows.images[id(bounds)]
        return replace(self, bounds=bounds, offsets=offsets, longest=longest_of)

    def is_row(self, value: Any) -> bool:
        """Whether it has the row's tokens."""
        size = (len(self.index),) if self.lone else (1, len(self.index))
        return isinstance(value, Tensor) and value.shape[: len(size)] == size

    @property
    def drops(self) -> bool:
        """Whether hidden states at padding are not computed."""
        tokens = self.real if self.shared is None else len(self.shared.forest.tokens)
        return tokens < self.shape[0] * self.shape[1]

    @property
    def packs(self) -> bool:
        """Whether several documents stand in a row, without padding."""
        alone = self.shared is not None and len(self.shared.forest.begins) - 1 == self.shape[0]
        return not (self.whole or self.drops or alone)

    def on_row_of(self, other: FlatBatch) -> FlatBatch | None:
        """Itself on another's row, so that layers read what the other's layers made of it, however far back each sees.

        Returns:
            None where the other has other documents. To find that out it waits for the device.
        """
        if self.shared is not None or other.shared is not None:
            alike = self.shared is other.shared
            return None if not alike else other if self.window == other.window else replace(other, window=self.window)
        alike = self.rows is other.rows or (
            (self.real, self.shape) == (other.real, other.shape)
            and self.offsets.shape == other.offsets.shape
            and self.index.shape == other.index.shape
            and torch.equal(self.offsets, other.offsets)
            and torch.equal(self.index, other.index)
        )
        if not alike:
            return None
        return other if self.window == other.window else replace(other, window=self.window)

    def enter(self, args: tuple, kwargs: dict, mask: Tensor | None, keep: bool) -> tuple[tuple, dict] | None:
        """A layer's arguments for the row; None where one of them has neither a row nor a column for each token.

        Args:
            args, kwargs: for the batch.
            mask: the one among them that was read and is of all pairs of tokens; None where a layer is given none.
            keep: whether the result that this batch's last layer returned may be read as it was before it was padded.
        """
        pairs = mask is not None
        places = [where for where, value in (*enumerate(args), *kwargs.items()) if pairs and value is mask]
        places += [self.fills] * bool(self.fills)
        hidden = hidden_in(args, kwargs)
        try:
            flat = [None if v is mask else self.entered(v, keep and v is hidden) for v in args]
            named = {
                name: None if v is mask else v if name in BOUNDARIES else self.entered(v, keep and v is hidden)
                for name, v in kwargs.items()
            }
        except HasNoTokens:
            return None
        wanted = [each for each in self.real_rows if each[0] in named and named[each[0]] is None]
        named |= {name: self.rows.all_real(dtype, self.index) for name, dtype in wanted}
        ours = {OFFSETS: self.offsets, LONGEST: self.longest, WINDOW: str(self.window), MASKS: tuple(places)}
        if self.shared is not None:
            ours |= {TREE: self.shared.tree, PLACES: self.shared.places}
            ours |= dict(zip((ROW_OFFSETS, *ROWS), self.shared.rows or ()))
        added = str(mask.dtype).removeprefix("torch.") if mask is not None and mask.is_floating_point() else ""
        if self.bounds is not None:  # as a layer is told of images that fill up their row
            ours = {IMAGE_BOUNDS: self.bounds, IMAGE_OFFSETS: self.offsets, LONGEST_IMAGE: self.longest}
            return tuple(flat), {**named, **ours}
        return tuple(flat), {**named, **ours, ADDED: added}

    def leave(self, output: Any, keep: bool) -> Any:
        """A layer's result for the batch: zero at padding.

        Args:
            output: for the row.
            keep: whether the next layer may read it as it is.
        """
        if isinstance(output, Tensor):
            if output.dim() == 4 and not len(output):  # attention weights of no row, see `unread_weights`
                return output.new_empty(0, output.shape[1], self.shape[1], self.shape[1])
            if not self.is_row(output):
                return output
            padded = self.unflatten(output)
            if keep:
                self.rows.last = weakref.ref(padded), _state(padded), output
            return padded
        if isinstance(output, (tuple, list)):
            left = [self.leave(item, keep and not at) for at, item in enumerate(output)]
            return type(output)(*left) if hasattr(output, "_fields") else type(output)(left)
        if isinstance(output, dict):
            return type(output)(**{name: self.leave(item, False) for name, item in output.items()})
        return output

    def leave_inside(self, value: Tensor) -> Tensor:
        """For the batch, what a module inside a layer makes of each token: [1, N, ...], or [N, ...] as [B * T, ...].

        Raises:
            RowsRefused: it has no dimension of tokens.
        """
        if self.is_row(value):
            return self.unflatten(value)
        if value.shape[:1] != self.index.shape:
            raise RowsRefused(note("output-holds-more"))
        return self.unflatten(value.unsqueeze(0)).flatten(0, 1)

    def row_along(self, value: Tensor, dim: int, keep: bool) -> Tensor:
        """[B, ..., T, ...] -> [1, ..., N, ...], where `dim` counts tokens; with `keep` once for all layers."""
        known = self.rows.handed.get(id(value)) if keep else None
        if known is not None and known[1] == _state(value) and not value._backward_hooks and not value.retains_grad:
            return _with_stride(known[2])
        tokens = value.movedim(dim, 1).flatten(0, 1).index_select(0, self.index)
        flat = _with_stride(tokens.unsqueeze(0).movedim(1, dim))
        if keep:
            self.rows.handed[id(value)] = value, _state(value), flat
        return flat

    def batch_along(self, value: Tensor, dim: int, keep: bool) -> Tensor:
        """[1, ..., N, ...] -> [B, ..., T, ...], zero at padding; with `keep` other layers may read it as it is."""
        padded = self.unflatten(value.movedim(dim, 1)).movedim(1, dim)
        if keep:
            self.rows.handed[id(padded)] = padded, _state(padded), value
        return padded

    def unflatten(self, values: Tensor) -> Tensor:
        """[1, N, ...] -> [B, T, ...], zero at padding."""
        rows, length = self.shape
        if self.lone:
            return values[: self.real]
        if self.shared is not None:
            return self.shared.batch_of(values[0]).unflatten(0, (rows, length))
        if self.whole:
            return values[0, : self.real].unflatten(0, (rows, length))
        blank = values.new_zeros(rows * length, *values.shape[2:])
        return blank.index_copy_(0, self.index[: self.real], values[0, : self.real]).unflatten(0, (rows, length))

    def entered(self, value: Any, is_hidden: bool = False) -> Any:
        """A value for the row. Raises `HasNoTokens`."""
        if isinstance(value, (tuple, list)):
            return type(value)(self.entered(item) for item in value)
        if not isinstance(value, Tensor) or not value.dim() or value is self.bounds:
            return value
        if is_hidden and (flat := self.rows.row_of(value)) is not None:
            return flat
        if value.requires_grad:
            return self.at(value, self.index)
        if id(value) not in self.rows.shared:
            self.rows.shared[id(value)] = value, self.at(value, self.index)
        return self.rows.shared[id(value)][1]

    def at(self, value: Tensor, index: Tensor) -> Tensor:
        """The tokens at these places of the batch, of a value that has a row and a column for each token, or a column
        alone. Raises `HasNoTokens`.
        """
        rows, length = self.shape
        for dim in range(value.dim() - 1):  # rotary tables of images' positions are [3, B, T, D]
            if value.shape[dim : dim + 2] == (rows, length):
                # A copy of whole rows, too: of a view, Dynamo guards on strides of what it is a view of.
                return value.flatten(dim, dim + 1).index_select(dim, index).unsqueeze(dim)
        if rows == 1 and value.dim() == 2 and value.shape[0] == length:  # a tower's tables have no row for its one row
            return value.index_select(0, index)
        column = index % length
        if value.dim() > 1 and value.shape[:2] == (1, length):
            return value.index_select(1, column)
        if value.shape == (length,) and not value.is_floating_point():
            return value.index_select(0, column)
        raise HasNoTokens


def _with_stride(row: Tensor) -> Tensor:
    """[1, ...], with one stride of its first dimension: any will do, operations differ in it, and Dynamo guards it."""
    return row if row.stride(0) == row.shape[1] * row.stride(1) else row[0].unsqueeze(0)


FILLS = "_fills_up_a_row"  #: an attribute of a tower's offsets, which its layers' own code knows nothing of


def is_filled_up(kwargs: dict) -> bool:
    """Whether a layer is told of an image that fills up its row, and so cannot run by its own code."""
    return getattr(kwargs.get(IMAGE_OFFSETS), FILLS, False)


def _state(value: Tensor) -> tuple:
    """What changes where a tensor is written to, or becomes the result of another function: of a checkpoint that ran
    the layer without gradients, say."""
    return value._version, value.grad_fn


class HasNoTokens(Exception):
    """An argument has no dimension of tokens."""

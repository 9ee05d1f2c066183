"""Offsets beyond 2^31 elements: the last program of every kernel, in the interpreter, over tensors without memory.

What a launch would pass is recorded with tensors on the meta device, so large that an offset of 32 bits overflows. Then
each kernel's last program runs with addresses behind which there is nothing. The interpreter checks each sum, difference
and product of less than 64 bits; loads and stores check that their addresses lie within a tensor.
"""

import builtins
import itertools

import pytest
import torch
from offline_cases import axes, cases, recorded, templates

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the interpreter's alone", allow_module_level=True)
import numpy as np  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

from tunecompile.templates import experts, nf4  # noqa: E402

MANY = 2**18  #: times the tokens of `cases`
APART = 52  #: bits of address for each tensor


def ends_of(*bounds):
    """The first and the last iteration of a loop, as numbers of the type that they have in compiled code."""
    wide = any(isinstance(b, tl.tensor) and b.dtype.primitive_bitwidth == 64 for b in bounds)
    dtype, of = (tl.int64, np.int64) if wide else (tl.int32, np.int32)
    steps = builtins.range(*(b.handle.data.item() if isinstance(b, tl.tensor) else b for b in bounds))
    for step in dict.fromkeys((*steps[:1], *steps[-1:])):
        yield tl.tensor(interpreter.TensorHandle(np.array([step], of), dtype), dtype)


class Memory:
    """Addresses of a launch's tensors. Integers are read from `values`, functions of the element; all else is 0."""

    def __init__(self, values):
        self.tensors, self.values, self.furthest = [], values, {}

    def pointer(self, name, t):
        """A kernel's argument for a tensor."""
        extent = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride()))
        self.tensors.append((name, extent, t.element_size()))
        dtype = tl.str_to_ty(triton.runtime.jit.mangle_type(t), None)
        return tl.tensor(interpreter.TensorHandle(np.array([len(self.tensors) << APART], np.uint64), dtype), dtype)

    def access(self, pointers, mask):
        """(name of the tensor, elements, its number of elements): all that are not masked are checked."""
        addresses = pointers.data.astype(np.int64)
        used = addresses[np.broadcast_to(mask.data, addresses.shape)]
        if not used.size:
            return None, None, None
        number = int(used[0]) >> APART
        assert 0 < number <= len(self.tensors), "an address of no tensor"
        name, extent, size = self.tensors[number - 1]
        low, high = ((int(a) - (number << APART)) // size for a in (used.min(), used.max()))
        assert low >= 0 and high < extent, f"elements {low} to {high} of {name}, which has {extent}"
        self.furthest[name] = max(high, self.furthest.get(name, 0))
        return name, (addresses - (number << APART)) // size, extent

    def load(self, pointers, mask, other, *_):
        dtype = pointers.get_element_ty()
        result = np.zeros(pointers.data.shape, interpreter._get_np_dtype(dtype))
        name, elements, extent = self.access(pointers, mask)
        if name in self.values:
            read = self.values[name](elements, extent).astype(result.dtype)
            result = np.where(mask.data, read, 0 if other is None else other.data).astype(result.dtype)
        return interpreter.TensorHandle(result, dtype)

    def store(self, pointers, value, mask, *_):
        self.access(pointers, mask)


def run_corners(monkeypatch, memory, kernel, grid, args, options):
    """A kernel's first and last program of each axis, over `memory`."""
    named = {
        name: memory.pointer(name, value) if isinstance(value, torch.Tensor) else value
        for name, value in zip(kernel.arg_names, args)
    }
    programs = (*grid, 1, 1)[:3]

    def number(values):
        return lambda axis: interpreter.TensorHandle(np.array([values[axis]], np.int32), tl.int32)

    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", interpreter.InterpreterOptions(debug=True))
    monkeypatch.setattr(builder, "create_get_num_programs", number(programs))
    monkeypatch.setattr(builder, "create_masked_load", memory.load)
    monkeypatch.setattr(builder, "create_masked_store", memory.store)
    for module in templates():
        monkeypatch.setattr(module, "range", ends_of, raising=False)
    for corner in itertools.product(*({0, n - 1} for n in programs)):
        monkeypatch.setattr(builder, "create_get_program_id", number(corner))
        with np.errstate(all="ignore"):
            kernel[(1, 1, 1)](**named, **options)


def integers(name, many):
    """What a case's tensors of integers hold: the last rows, of the last expert or document."""
    rows = 32 * many if name.startswith("attention") else 256 * many  # half of all
    values = {
        "mask": lambda place, size: np.ones_like(place),
        "sinks": lambda place, size: np.full(place.shape, 0xFF80),  # -inf: a query that sees nothing reads values
        "labels": lambda place, size: np.full_like(place, 49151),
        "order": lambda place, size: np.full_like(place, size - 1),
        "places": lambda place, size: np.full_like(place, size - 1),
        "table": lambda place, size: np.array([many // 2 - 1, 2 * rows - 128, 2 * rows, 0])[place % 4],
    }
    if name.startswith(("attention", "experts")) and "zero" not in name:
        values["offsets"] = lambda place, size: rows * (np.minimum(place, 1) + (place == size - 1))
    if name.startswith("few_rows"):  # a row more than whole tiles for each expert: as many tiles as there may be
        values["offsets"] = lambda place, size: np.where(place == size - 1, 2 * rows, (15 * 64 + 1) * (place + 1))
    if "branches" in name:  # the last document goes on from the first
        values["places"] = lambda place, size: place
        values["tree"] = lambda place, size: np.where(
            place < size // 2, (place == size // 2 - 1) - 1, rows * (1 + (place % (size // 2) % (size // 2 - 1) == 0))
        )
    return values


def heads_first(t, dim):
    return t.transpose(dim - 1, dim).contiguous().transpose(dim - 1, dim)


def variants():
    """(name, tokens' multiple, case) where offsets are computed otherwise than in `cases`."""
    some = axes(many=MANY // 8, device="meta")  # strides of heads are below 2^31 themselves
    for name, (function, args) in some.items():
        if name.startswith(("attention", "delta")):
            dims = 3 if name.startswith("attention") else 4
            turned = [heads_first(t, dims - 2) if t.dim() == dims and t.shape[-1] != 64 else t for t in args]
            yield f"{name}_heads_first", MANY // 8, (function, turned)
    for name, (function, args) in axes(batch=MANY, device="meta").items():
        if name == "scan_starts":  # the last of its arguments is there backward alone
            yield "scan_starts_forward", 1, (function, [*args[:-1], None])
        if name.startswith(("delta", "channel", "scan")):  # documents are of one row
            yield f"{name}_of_rows", 1, (function, [None if t.dtype == torch.int32 else t for t in args])
    packed, weight = torch.empty(2**31, 1, dtype=torch.uint8, device="meta"), 2**20
    absmax = torch.empty(2**26, device="meta")
    yield "nf4_odd", MANY, (lambda p, a: nf4.dequantize(p, a, (weight, 4092), torch.bfloat16), [packed, absmax])
    xa, offsets = (
        torch.empty(size, dtype=dtype, device="meta")
        for size, dtype in [((512 * MANY, 16), torch.bfloat16), ((64,), torch.int32)]
    )
    yield "experts_outer_in_order", MANY, (experts.outer, [xa, xa.new_empty(512 * MANY, 2048), offsets])


CASES = {name: (MANY, case) for name, case in cases(many=MANY, device="meta").items()}
CASES |= {name: (many, case) for name, many, case in variants()}


@pytest.mark.parametrize("name", CASES)
def test_no_offset_overflows(name, monkeypatch):
    many, case = CASES[name]
    ((kernel, grid, args, options),) = recorded(*case)
    memory = Memory(integers(name, many))
    run_corners(monkeypatch, memory, kernel, grid, args, options)
    for argument, extent, _ in memory.tensors:
        reached = memory.furthest.get(argument, 0)
        assert extent <= 2**31 or reached >= 2**31, f"{argument} is read or written to element {reached} of {extent}"


def test_every_kernel_has_a_case():
    kernels = {
        f"{module.__name__}.{name}"
        for module in templates()
        for name, member in vars(module).items()
        if isinstance(member, interpreter.InterpretedFunction) and member.fn.__module__ == module.__name__
        if name.endswith("_kernel")
    }
    launched = {recorded(*case)[0][0].fn for _, case in CASES.values()}
    missing = kernels - {f"{fn.__module__}.{fn.__name__}" for fn in launched}
    # its strides and sizes are read from memory, as int64
    assert missing == {"tunecompile.templates.lora.write_pieces_kernel"}


@triton.jit
def narrow_kernel(out, stride):
    tl.store(out + tl.program_id(0) * stride, 0.0)


@triton.jit
def far_kernel(out, stride):
    tl.store(out + (tl.program_id(0) + 1).to(tl.int64) * stride, 0.0)


@pytest.mark.parametrize(("kernel", "message"), [(narrow_kernel, "int32 overflow"), (far_kernel, "elements")])
def test_a_wrong_offset_is_seen(kernel, message, monkeypatch):
    out = torch.empty(2**20, 4096, device="meta")
    with pytest.raises(Exception, match=message):
        run_corners(monkeypatch, Memory({}), kernel, (2**20,), (out, 4096), {})

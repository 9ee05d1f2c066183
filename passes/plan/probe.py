"""Try templates on a few rows: values and gradients against the op's reference, in fp64.

Kernels are tested on a few cards, with a few versions of Triton. Elsewhere the first layer that would run a template
tries it, once per GPU, version and source; `tunecompile doctor` tries all of them on any card. What was found lies
beside the measured choices on disk. A template that is wrong, raises or does not compile hands its op to the next
provider, in the end to torch, and the report names it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tunecompile._torch.autograd import outside_compilation
from tunecompile._torch.card import RUN, has_bfloat16, shown_on
from tunecompile.compiler import tuning_cache
from tunecompile.compiler.partitioner import source_hash
from tunecompile.compiler.pass_manager import Context
from tunecompile.ir.eager_call import outputs, run_provider
from tunecompile.ir.example import Draw, arguments_of
from tunecompile.ir.op import OPS, Op, Provider
from tunecompile.ir.pretend_gpu import pretending
from tunecompile.notes import Note, note
from tunecompile.passes.plan.rivals import prefer

__all__ = ["BY_TEMPLATE", "choose", "choose_beside", "compare", "examine", "fault_of", "is_tested", "wide"]

KIND = "probe"  #: of files beside the measured choices

#: names of providers that launch a template
BY_TEMPLATE = ("triton", "joined", "k_extension", "grouped")
BESIDE = ("row_losses",)  #: ops that run beside graphs
FACTOR = 4  #: how much further than the reference from fp64 a template may be, which sums in another order
LEAST = 2.0**-11  #: relative error of TF32's products, in which fp32 may be multiplied
log = logging.getLogger("tunecompile")
_wrong: dict[tuple[str, str], Note] = {}  #: (op, provider) -> what the report says


def choose(op: Op, values: list, context: Context) -> Provider:
    """Return the provider that runs a call: none with a template that failed its trial.

    Args:
        op: the op.
        values: its arguments: fake tensors and constants.
        context: gets a note of each template that is not used.
    """
    provider = prefer(op, values, _is_right) or op.choose(values, context.precision)
    devices = [leaf.device for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    while devices and _fails(op, provider, devices[0]):
        provider = op.choose(values, context.precision)
    _tell(op, context)
    return provider


def choose_beside(device: torch.device, context: Context) -> None:
    """Choose the providers of ops that no graph shows, on a device where one of the model's is compiled.

    Args:
        device: of the graph.
        context: gets a note of each template that is not used.
    """
    for op in (op for op in OPS.values() if op.name in BESIDE):
        for provider in op.providers:
            if (op.name, provider.name) not in _wrong:
                _fails(op, provider, device)
        _tell(op, context)


def _fails(op: Op, provider: Provider, device: torch.device) -> bool:
    """Whether a template fails its trial, after which its provider refuses all calls."""
    if provider.name not in BY_TEMPLATE or pretending():
        return False
    fault = (known_fault if is_tested(device) else fault_of)(op, provider, device)
    if fault:
        _distrust(op, provider, fault)
    return bool(fault)


def _tell(op: Op, context: Context) -> None:
    context.notes += [said for (name, _), said in _wrong.items() if name == op.name and said not in context.notes]


def is_tested(device: torch.device) -> bool:
    """Return whether templates need no trial on a device: tests ran on such a GPU, or it is none.

    A trial takes 0.3 to 2.5 s, most of it Triton's compiler, and would only repeat the tests.
    """
    return device.type != "cuda" or not torch.cuda.is_available() or shown_on(device) == RUN


def _is_right(op: Op, provider: Provider, device: torch.device) -> bool:
    """Whether a provider passes a trial, which is not stored: packages are updated."""
    return _try(op, provider, device, precision_on(device)) == ""


def examine(device: torch.device) -> Iterator[tuple[Op, str]]:
    """Yield the op of each template that can be tried, and the template's fault: empty where it is right."""
    for op in OPS.values():
        for provider in op.providers:
            if provider.name in BY_TEMPLATE and (op.owner or op).example is not None:
                yield op, fault_of(op, provider, device)


def _distrust(op: Op, provider: Provider, fault: str) -> None:
    """Have a provider refuse all calls of this process."""
    said = _wrong[op.name, provider.name] = note("template-wrong", op.name, fault, provider=provider.name)
    log.warning("tunecompile: %s", said)
    op.providers[:] = [p.distrusted(said) if p is provider else p for p in op.providers]


_known: dict[tuple[str, str, torch.device], str] = {}


def known_fault(op: Op, provider: Provider, device: torch.device) -> str | None:
    """Return what a trial on this kind of GPU found wrong with a provider; None where it was not tried yet."""
    key = op.name, provider.name, device
    if key not in _known and device.type == "cuda":
        found = tuning_cache.read(KIND, _on_disk(op, provider, device), _is_text)
        if found is not None:
            _known[key] = found
    return _known.get(key)


def fault_of(op: Op, provider: Provider, device: torch.device) -> str:
    """Return what is wrong with a provider on a device; empty where nothing is, or it cannot be tried."""
    found = known_fault(op, provider, device)
    if found is not None:
        return found
    found = _try(op, provider, device, precision_on(device))
    if found is not None and device.type == "cuda":
        found = tuning_cache.keep(KIND, _on_disk(op, provider, device), found, _is_text)
    _known[op.name, provider.name, device] = found or ""
    return found or ""


def precision_on(device: torch.device) -> torch.dtype:
    """Return the dtype in which models are trained on a device."""
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if has_bfloat16(device) else torch.float16


def _on_disk(op: Op, provider: Provider, device: torch.device) -> dict[str, Any]:
    about = {"op": op.name, "provider": provider.name, "source": source_hash()}
    return tuning_cache.machine(device) | about


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _try(op: Op, provider: Provider, device: torch.device, dtype: torch.dtype) -> str | None:
    """The fault of a provider, empty for none; None where it cannot be tried."""
    with torch.no_grad(), outside_compilation():
        try:
            arguments = arguments_of(op, Draw(device, dtype))
            if arguments is None or provider.refuses(*arguments) is not None:
                return None
            reference, exact = outputs(op.reference(*arguments)), outputs(op.reference(*wide(arguments)))
        except Exception as error:  # no fault of the template
            log.debug("tunecompile: %s cannot be tried: %r", op.name, error)
            return None
        try:
            return compare(provider, arguments, reference, exact, torch.finfo(dtype).eps)
        except torch.cuda.OutOfMemoryError:
            return None
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:200]}"


def compare(provider: Provider, arguments: list, reference: list, exact: list, eps: float) -> str:
    """Run a provider and return what is wrong with its outputs; empty where nothing is.

    Args:
        provider: the provider.
        arguments: its arguments.
        reference: the outputs of the op's reference.
        exact: the same in fp64.
        eps: of the model's precision.
    """
    made = run_provider(provider.run, arguments, (True,) * len(reference))
    for number, triple in enumerate(zip(outputs(made), reference, exact)):
        mine, theirs, best = triple
        if mine is None or not theirs.numel():
            continue
        if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
            return f"output {number} is {mine.dtype} {tuple(mine.shape)}, not {theirs.dtype} {tuple(theirs.shape)}"
        error, limit = _error(mine, best), FACTOR * max(_error(theirs, best), eps, LEAST)
        if not error <= limit:
            return f"output {number} is {error:.1e} from fp64, where at most {limit:.1e} is rounding"
    return ""


def _error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative, in the norm."""
    wide = exact.double()
    return ((got.double() - wide).norm() / wide.norm().clamp_min(1e-30)).item()


def wide(arguments: list) -> list:
    """Return the same arguments in fp64."""

    def widen(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.double()
        return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value

    return pytree.tree_map(widen, arguments)

"""Bytes of the code that Inductor generates for a GPU, on a machine without one: who allocates and frees what, and when.

    python -m tests.support.memory.generated MODEL ROWS TOKENS PLAN...    # a line of JSON for each graph of each plan

torch is told of a GPU that is not there, which its caches remember: a process of its own.
"""

import contextlib
import json
import re
import sys
from unittest import mock

import torch

import tunecompile
from tests.support.stand_in_gpu import code_of
from tunecompile.errors import CannotEstimate
from tunecompile.estimate.dry_run_planner import DryRunPlanner
from tunecompile.estimate.known_shapes import lora_targets, shape_config
from tunecompile.estimate.meta_model import _adapted, _quantised, empty_model
from tunecompile.planner.candidates import expensive_nodes
from tunecompile.planner.liveness import extent
from tunecompile.planner.solver import KEEP, RECOMPUTE, Plan

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1, "int8": 1, "bool": 1}
#: plans between the extremes, for a joint graph
PLANS = {
    "keep": lambda graph: KEEP,
    "named": lambda graph: Plan(frozenset(range(len(expensive_nodes(graph))))),  # small results stay
    "all": lambda graph: RECOMPUTE,
    "tiles": lambda graph: Plan(None, 4),
    "attention": lambda graph: Plan(None, attention=True),
}
MADE = re.compile(r"(\w+) = empty_strided_cuda\((\(.*?\)), (\(.*?\)), torch\.(\w+)\)")
MEMBER = re.compile(r"(\w+) = \w+\[\d+\]$")  # of what a call of ATen returns
CHECKED = re.compile(r"assert_size_stride\((\w+), (\(.*?\)), (\(.*?\))")
ALIAS = re.compile(r"(\w+) = (?:reinterpret_tensor\((\w+),.*\)|(\w+))(?:;|$|  #)")
FREED = re.compile(r"\bdel (\w+(?:, \w+)*)")


def most_bytes(code):
    """The most bytes that generated code holds at once, beside its inputs."""
    owner, readers, sizes, most = {}, {}, {}, 0
    lines = [line.strip() for line in code[code.index("def call(") :].splitlines()]

    def make(name, shape, stride, itemsize):
        owner[name], readers[name], sizes[name] = name, 1, itemsize * _extent(shape, stride)

    for line, following in zip(lines, lines[1:]):
        if found := MADE.match(line):
            make(found[1], found[2], found[3], SIZES[found[4]])
        elif (found := MEMBER.match(line)) and (told := CHECKED.match(following)) and told[1] == found[1]:
            make(found[1], told[2], told[3], 2 if len(_numbers(told[2])) == 4 else 4)  # rows of heads, or their sums
        elif (found := ALIAS.match(line)) and (source := found[2] or found[3]) in owner:
            owner[found[1]] = owner[source]
            readers[owner[source]] += 1
        most = max(most, sum(sizes.values()))
        for freed in FREED.finditer(line):
            for name in freed[1].split(", "):
                if (kept := owner.pop(name, None)) is not None:
                    readers[kept] -= 1
                    if not readers[kept]:
                        del sizes[kept]
        if line.startswith("return ("):
            return most
    raise ValueError("the code does not end")


def _numbers(text):
    return [int(number) for number in re.findall(r"\d+", text)]


def _extent(shape, stride):
    shape, stride = _numbers(shape), _numbers(stride)
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride))


def graphs_of(name, rows, tokens, keys):
    """(Plan, forward, backward) of the first kind of layer of a shape under plans. keys: of `PLANS`."""
    model = empty_model(shape_config(name, 4)).to(torch.bfloat16)
    model.config.use_cache = False
    adapted = _adapted(model, 16, lora_targets(model), "CAUSAL_LM")
    model, found = _quantised(adapted, model.get_output_embeddings()).train(), []

    def see(planner, slot, joint):
        if not found:
            found.extend((key, *joint.cut(PLANS[key](joint.graph))) for key in keys)

    with (
        mock.patch.object(DryRunPlanner, "see", see),
        torch.autocast("cpu", dtype=torch.bfloat16),
        contextlib.suppress(CannotEstimate),
    ):
        tunecompile.estimate(model, (rows, tokens), memory="80GiB", gpu="h100")
    return found


def main(name, rows, tokens, *keys):
    for key, *graphs in graphs_of(name, int(rows), int(tokens), keys):
        for graph, backward in zip(graphs, (False, True)):
            line = {"plan": key, "backward": backward, "planned": extent(graph.graph).peak}
            print(json.dumps(line | {"generated": most_bytes(code_of(graph, backward))}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

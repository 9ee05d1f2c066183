"""The mutants themselves: each is another program, and what is imported in place of its module."""

import ast
import gc
import importlib.util
import json
import sys
import threading

from torch.fx import Graph

import tunecompile.ir.nodes
from tests.support.mutants.__main__ import Coverage
from tests.support.mutants.lines import TOOL, Lines
from tests.support.mutants.mutate import ROOT, Imported, Mutant, Planter, body_of, mutants_of, mutated

FILE = "tunecompile/ir/nodes.py"


def test_each_mutant_is_another_program():
    source = ast.unparse(ast.parse((ROOT / FILE).read_text(encoding="utf-8")))
    made = [ast.unparse(mutated(mutant)) for mutant in mutants_of(FILE)]
    assert len(made) > 20 and source not in made
    assert len(set(made)) == len(made)
    for text in made:
        compile(text, FILE, "exec")


def test_a_module_is_imported_with_its_mutant():
    mutant = next(mutant for mutant in mutants_of(FILE) if mutant.before.startswith("return "))
    spec = Planter(mutant).find_spec(mutant.module, tunecompile.ir.__path__)
    planted = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(planted)

    def codes(module):
        return {name: f.__code__.co_code for name, f in vars(module).items() if hasattr(f, "__code__")}

    plain, changed = codes(tunecompile.ir.nodes), codes(planted)
    assert sum(plain[name] != changed[name] for name in plain) == 1


def test_a_function_is_changed_where_it_is_imported():
    mutant = next(mutant for mutant in mutants_of(FILE) if mutant.before.startswith("return "))
    outside = next(mutant for mutant in mutants_of(FILE) if body_of(FILE, mutant.line) is None)
    functions = [each for each in vars(tunecompile.ir.nodes).values() if hasattr(each, "__code__")]
    codes, imported = [each.__code__ for each in functions], Imported()
    try:
        assert not imported.plant(outside) and [each.__code__ for each in functions] == codes
        assert not imported.has_run(mutant) and imported.plant(mutant)
        (changed,) = [each for each, code in zip(functions, codes) if each.__code__ is not code]
        assert body_of(FILE, mutant.line) > changed.__code__.co_firstlineno
    finally:
        gc.freeze()
        for each, code in zip(functions, codes):
            each.__code__ = code
    with imported:
        changed(Graph().placeholder("x"), 0)
    assert (changed.__code__.co_filename, changed.__code__.co_firstlineno) in imported.ran
    assert imported.has_run(mutant) and not imported.has_run(outside)
    assert not imported.plant(mutant), "it ran while modules were imported: what it made is there"


def test_lines_that_other_threads_run_are_those_of_the_test():
    """Files are written and memory is pinned there: without, no test was shown a mutant of that."""
    lines = Lines()
    try:
        lines.begin()
        thread = threading.Thread(target=tunecompile.ir.nodes.node_arg, args=(Graph().placeholder("x"), 0))
        thread.start()
        thread.join()
        found = lines.end()
    finally:
        if lines.monitoring is not None:
            sys.monitoring.free_tool_id(TOOL)
    begin = body_of(FILE, tunecompile.ir.nodes.node_arg.__code__.co_firstlineno + 2)
    assert begin is not None and begin + 1 in found[FILE] and threading.gettrace() is None


def test_tests_that_run_the_fewest_other_lines_come_first(tmp_path):
    """And not more of them than there is time for."""
    line = body_of(FILE, next(mutant.line for mutant in mutants_of(FILE) if body_of(FILE, mutant.line)))
    entries = {"wide": (1.0, 9), "near": (3.0, 2), "long": (30.0, 3), "far": (1.0, 5)}
    file = tmp_path / "map.json"
    told = {
        name: {"seconds": seconds, "lines": {FILE: [line, *range(1000, 1000 + others)]}}
        for name, (seconds, others) in entries.items()
    }
    file.write_text(json.dumps(told))
    assert Coverage(file).of(Mutant(FILE, line, 0, "", ""), 5.0) == (["near", "far"], 4)


def test_tests_of_a_file_s_own_name_come_before_others(tmp_path):
    """Of a pattern, which runs at import, all tests of its pass are asked: most of them have others to match."""
    names = ["tests/passes/test_lora.py::a", "tests/ir/test_nodes.py::b", "tests/ir/test_nodes.py::c"]
    told = {name: {"seconds": 1.0, "lines": {FILE: [1, *range(2, 4 + at)]}} for at, name in enumerate(names)}
    file = tmp_path / "map.json"
    file.write_text(json.dumps(told))
    assert Coverage(file).of(Mutant(FILE, 1, 0, "", "")) == ([names[1], names[2], names[0]], 3)


def test_a_line_of_a_function_is_shown_to_tests_that_run_it(tmp_path):
    lines = (ROOT / FILE).read_text(encoding="utf-8").splitlines()
    inside = next(at for at, line in enumerate(lines, 1) if line.startswith("    return "))
    outside = next(at for at, line in enumerate(lines, 1) if line.startswith("def "))
    begin = body_of(FILE, inside)
    assert begin is not None and outside < begin <= inside and body_of(FILE, outside) is None
    file = tmp_path / "map.json"
    file.write_text(
        json.dumps({"a": {"seconds": 1.0, "lines": {FILE: [begin]}}, "b": {"seconds": 1.0, "lines": {FILE: [1]}}})
    )
    tests = Coverage(file)
    assert tests.of(Mutant(FILE, inside, 0, "", "")) == (["a"], 1)
    assert tests.of(Mutant(FILE, outside, 0, "", "")) == (["a", "b"], 2)
    other = max(line for line in range(begin, len(lines)) if (body_of(FILE, line) or begin) > begin)
    assert tests.of(Mutant(FILE, other, 0, "", "")) == ([], 0)
    assert tests.of(Mutant(FILE, other, 0, "", ""), at_import=True) == (["a", "b"], 2), "a pattern, maybe"

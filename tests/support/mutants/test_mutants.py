"""The mutants themselves: each is another program, and what is imported in place of its module."""

import ast
import importlib.util

import tunecompile.ir.nodes
from tests.support.mutants.mutate import ROOT, Planter, mutants_of, mutated

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

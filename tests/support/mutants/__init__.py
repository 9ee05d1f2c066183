"""Mutants: one small fault at a time is planted into the source, and the tests that run its line have to fail.

    python -m tests.support.mutants map MAP.json [TESTS ...]            which tests run which lines; takes as long as they do
    python -m tests.support.mutants run MAP.json --sample 500 --processes 16 --seconds 300

`run` prints the mutants that survive. Both leave the working tree as it is: mutants are made while modules are imported.
"""

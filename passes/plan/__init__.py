"""Passes on the joint graph: casts, tiles, recomputation, a report on providers. No file names a model or op family."""

from tunecompile.passes.plan.providers import PASS as providers
from tunecompile.passes.plan.remat import PASS as remat
from tunecompile.passes.plan.tile import PASS as tile
from tunecompile.passes.plan.tile_rows import PASS as tile_rows
from tunecompile.passes.plan.widened import PASS as widened

"""The wheel holds everything, and needs nothing but torch."""

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import tunecompile

ROOT = Path(__file__).parent.parent

#: what `pip install torch` brings, by import name
TORCH = (
    "torch",
    "torchgen",
    "functorch",
    "sympy",
    "mpmath",
    "networkx",
    "jinja2",
    "markupsafe",
    "filelock",
    "fsspec",
    "typing_extensions",
    "setuptools",
    "_distutils_hack",
    "numpy",
    "numpy.libs",
)

SCRIPT = """
import sys
sys.path[:0] = sys.argv[1:]
import torch, torch.nn as nn, torch.nn.functional as F
import tunecompile
assert tunecompile.__file__.startswith(sys.argv[1]), tunecompile.__file__

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.gate, self.up, self.down = nn.RMSNorm(16, eps=1e-6), nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

model = nn.Sequential(nn.Linear(16, 16), nn.Sequential(*(Block() for _ in range(3))))
x = torch.randn(2, 5, 16)
model(x).square().mean().backward()
expected = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
assert tunecompile.optimize(model, executor="eager") is model
model(x).square().mean().backward()
for p, g in zip(model.parameters(), expected):
    torch.testing.assert_close(p.grad, g)
found = {m.family: m.rewritten for m in tunecompile.report(model).matches}
assert found["rms_norm"] == 1 and found["swiglu"] == 1, found
assert "triton" not in sys.modules
print("fine")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, ROOT],
        check=True,
    )
    (file,) = folder.glob("*.whl")
    return file


def test_version(wheel):
    assert wheel.name.startswith(f"tunecompile-{tunecompile.__version__}-")


def test_contents(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for needed in (
        "tunecompile/__init__.py",
        "tunecompile/passes/__init__.py",
        "tunecompile/passes/recognize/lora.py",
        "tunecompile/templates/nf4.py",
        "tunecompile/ops/lora.py",
        "tunecompile/cli/compare/report.html.jinja",
        "tunecompile/report/memory_timeline.html.jinja",
        "tunecompile/report/explain.html.jinja",
        "tunecompile/runtime/telemetry.py",
    ):
        assert needed in names
    tops = {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert tops == {"tunecompile"}


def test_runs_with_torch_alone(wheel, tmp_path):
    """An isolated interpreter that sees the unpacked wheel, torch and what torch needs, and no other package."""
    ours, packages = tmp_path / "wheel", tmp_path / "packages"
    zipfile.ZipFile(wheel).extractall(ours)
    packages.mkdir()
    for name in TORCH:
        spec = importlib.util.find_spec(name.partition(".")[0])
        source = (
            None if spec is None else Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)
        )
        source = source.with_name(name) if source is not None and "." in name else source
        if source is not None and source.exists():
            (packages / source.name).symlink_to(source)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", SCRIPT, str(ours), str(packages)], capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.strip().endswith("fine"), done.stdout + done.stderr

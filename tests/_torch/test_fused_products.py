"""Every launch of a template says whether products may be fused into sums, whatever Triton's default is."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.runtime import triton_heuristics

from tunecompile._torch.generation.fused_products import META, templates_fuse_products
from tunecompile.templates import _launch

BODY = "@triton_heuristics.user_autotune(configs=[], triton_meta={'signature': {}}, custom_kernel=True)"


class Kernel:
    def __getitem__(self, grid):
        return lambda *args, **options: setattr(self, "options", options)


@pytest.mark.parametrize("fuses", [True, False])
def test_eager_launches_say_it(fuses):
    kernel = Kernel()
    _launch.launch(kernel, (1,), torch.zeros(1), BLOCK=4, **({} if fuses else {"fuse_products": False}))
    assert kernel.options == {"BLOCK": 4, "enable_fp_fusion": fuses}


def test_generated_code_says_it_of_templates_alone(monkeypatch):
    """Kernels of users, and all of them outside, are as torch writes them."""
    written = []

    def define(code, kernel):
        code.define_kernel("name", BODY)

    monkeypatch.setattr(PythonWrapperCodegen, "define_user_defined_triton_kernel", define)

    def record(code, name, body):
        written.append("'enable_fp_fusion': True" in body)

    code = type("Code", (), {"define_kernel": record})()
    ours, users = (SimpleNamespace(fn=SimpleNamespace(__module__=m)) for m in ("tunecompile.templates.lora", "user.tl"))
    with templates_fuse_products():
        for kernel in (ours, users, ours):
            PythonWrapperCodegen.define_user_defined_triton_kernel(code, kernel)
            PythonWrapperCodegen.define_user_defined_triton_kernel(code, kernel=kernel)
    PythonWrapperCodegen.define_user_defined_triton_kernel(code, ours)
    assert written == [True, True, False, False, True, True, False]


def test_torch_reads_it_where_it_is_written():
    assert f"{META[:-1]}{{triton_meta!r}}" in inspect.getsource(PythonWrapperCodegen.define_user_defined_triton_kernel)
    assert 'compile_meta["enable_fp_fusion"]' in inspect.getsource(triton_heuristics)

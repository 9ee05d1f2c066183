"""Products in templates are fused into sums, as Inductor's own kernels have it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tunecompile._torch.lookup import exist, lookup, replaced

_WRAPPER_CODE = "torch._inductor.codegen.wrapper.PythonWrapperCodegen"
META = "triton_meta={"  #: how the options of a kernel begin in generated code


@contextlib.contextmanager
def templates_fuse_products() -> Iterator[None]:
    """Inside, code that is generated for templates says that products may be fused into sums, as Inductor's own does.

    torch says nothing for launches of other kernels, and Triton changes its default (triton#11270). The method is
    replaced for the process (see `replaced`).
    """
    code_of: Any = lookup(_WRAPPER_CODE)
    if not exist("define_user_defined_triton_kernel", "define_kernel", under=_WRAPPER_CODE):
        yield
        return
    define = code_of.define_user_defined_triton_kernel

    def define_with_fusion(code: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if not str(getattr(getattr(kernel, "fn", None), "__module__", "")).startswith("tunecompile."):
            return define(code, kernel, *args, **kwargs)
        plain = code.define_kernel

        def define_kernel(name: str, body: str, *rest: Any, **more: Any) -> Any:
            return plain(name, body.replace(META, f"{META}'enable_fp_fusion': True, ", 1), *rest, **more)

        code.define_kernel = define_kernel
        try:
            return define(code, kernel, *args, **kwargs)
        finally:
            del code.define_kernel

    with replaced(code_of, define_user_defined_triton_kernel=define_with_fusion):
        yield

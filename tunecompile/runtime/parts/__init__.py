"""The features of an optimized model, one file each. A feature is a file here and a line of `PARTS`."""

from tunecompile.runtime.parts.checkpointing import Checkpointing
from tunecompile.runtime.parts.first_step import FirstStepCheck
from tunecompile.runtime.parts.fused_head import FusedHead
from tunecompile.runtime.parts.host_embedding import HostEmbedding
from tunecompile.runtime.parts.kernel_functions import KernelFunctions, PeftFunctions
from tunecompile.runtime.parts.layers import Layers
from tunecompile.runtime.parts.loss_head import LossHead
from tunecompile.runtime.parts.memory import GrowingSegments, MemoryBudget, OomRecovery
from tunecompile.runtime.parts.parametrized import ParametrizedModules
from tunecompile.runtime.parts.quantized import QuantizedLinears
from tunecompile.runtime.parts.replicas import Replicas
from tunecompile.runtime.parts.rollouts import Rollouts
from tunecompile.runtime.parts.telemetry import StepTelemetry
from tunecompile.runtime.parts.unpadding import PaddingRemoval

PARTS = (
    OomRecovery,  # before heads, which run under it
    HostEmbedding,
    QuantizedLinears,
    Layers,  # before all that looks at their slots
    ParametrizedModules,
    PaddingRemoval,
    FirstStepCheck,
    Replicas,
    PeftFunctions,
    KernelFunctions,
    Checkpointing,
    LossHead,  # its module may have changed: before a budget counts it
    FusedHead,
    MemoryBudget,
    GrowingSegments,  # where no budget is
    Rollouts,
    StepTelemetry,
)

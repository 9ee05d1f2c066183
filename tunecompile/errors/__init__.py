"""Every error a user can meet: one class each, with a message template that names the cause and the remedy.

Grouped by who raises them: `training` (`optimize` and training steps), `tools` (`estimate`, `verify`, saving and other
functions), `authors` (ops, rewrites and passes), `commands` (input of the command line).
"""

from tunecompile.errors.authors import InvalidOp, InvalidPipeline, InvalidRewrite, LeftoverOp, NoSuchPass
from tunecompile.errors.base import MissingExtra, MissingHost, TunecompileError, need, summary
from tunecompile.errors.commands import (
    BadJson,
    BadMessages,
    BadOption,
    BadShape,
    CacheDiffers,
    DataMissing,
    DataNotFound,
    EmptyData,
    ModelNotFound,
    NoChatTemplate,
    NotACache,
    NotAGguf,
    NotAResult,
    NotComparable,
    NotFetched,
    NothingToSave,
    RowsTooLong,
    ShapeWithData,
    TooFewRows,
    UnknownSchema,
    UnknownSystem,
    UsageError,
    WrongCache,
    WrongChecksum,
    WrongColumns,
    WrongPair,
)
from tunecompile.errors.tools import (
    BadBatchShape,
    BadSharedPrefix,
    CannotEstimate,
    CannotMerge,
    CannotQuantize,
    CannotVerify,
    CannotWriteGguf,
    NoAdapter,
    NoConfig,
    NoPlan,
    UnknownGpu,
    UnsafeFolder,
)
from tunecompile.errors.training import (
    HostOptions,
    HostTooOld,
    InvalidPackage,
    LayerChanged,
    ModifiedInPlace,
    NoGradient,
    NoSecondDerivative,
    NotAModule,
    NothingFits,
    NotOptimized,
    RankLost,
    StepLost,
    UnknownAttention,
    UnknownBudget,
    UnknownEntryPoint,
    UnknownPrecision,
)

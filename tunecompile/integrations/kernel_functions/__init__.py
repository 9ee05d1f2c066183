"""transformers' functions with kernels of other packages behind them: ops stand in their place while Dynamo traces.

transformers writes such functions in plain PyTorch, in each model's file, and calls a kernel of fla, causal_conv1d or
its hub where one is installed. Neither can be compiled: the kernels break the graph, and the loop over chunks is
unrolled, once for every length. So is the loop over images of a tower's attention.
"""

from tunecompile.integrations.kernel_functions.bounds import BOUNDS, Fork, forks_in, takes_bounds, trace_by_bounds
from tunecompile.integrations.kernel_functions.meanings import BOUNDARIES, DOCUMENTS
from tunecompile.integrations.kernel_functions.substitute import Substitution, knows_documents, substitute
from tunecompile.integrations.kernel_functions.token_loops import TokenLoops

"""Stacks of experts' matrices in 4 bits, as bitsandbytes keeps them: packed codes behind a parametrisation of torch's.

transformers holds the experts of a layer in parameters of three dims, and quantises linears alone.
"""

"""Mixtures of experts: products grouped by expert, adapters over stacks of weights, rows on their way to experts.

An expert is one matrix of a stack [E, ...]. A row is a token for one of its experts. Rows are sorted by expert, and
`offsets` holds the end of each expert's rows. Rows behind the last offset belong to no expert."""

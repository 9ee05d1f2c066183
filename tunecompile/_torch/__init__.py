"""The only place that touches private names of torch, one file a topic. Knows nothing of the rest of the project.

`private_names` is the table of these names; `lookup` finds them.
"""

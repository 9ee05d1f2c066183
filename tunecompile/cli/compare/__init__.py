"""The same fine-tuning steps under several systems, each in its own process, and a report of what differs.

Reads from the outside in: `request` is what to compare, `run` orchestrates, `worker` is one process and `tasks` what it
does; `data`, `models` and `loops` are what it trains, `meters` and `gradients` what it measures. `curves` makes one run
of several seeds, `judge` gives verdicts, and `assemble` makes one result. `result` is its schema, `against` compares it
with an older one, and `render` writes the report.
"""

"""The same fine-tuning steps under several systems, each in its own process, and a report of what differs.

Reads from the outside in: `run` orchestrates, `worker` is one process, `data`, `models` and `loops` are what it trains,
`meters` and `gradients` are what it measures, `result` is what is saved, `against` holds it beside
an older one, `render` draws the report.
"""

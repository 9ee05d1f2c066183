"""Graphs that run op by op while another process generates their code."""

"""Low-rank adapters beside the weights that they adapt: their layouts, and products in their dtype."""

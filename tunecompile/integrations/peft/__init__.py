"""PEFT's adapters: what of them is traced in another way than it is written, and how a reference goes without them."""

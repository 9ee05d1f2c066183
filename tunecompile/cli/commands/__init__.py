"""The commands, one file a group. `tunecompile.cli.main` registers them."""

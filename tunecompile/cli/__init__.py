"""The command line, and everything that exists only as one of its commands."""

from tunecompile.cli.main import app

"""`python -m tunecompile.cli`."""

from tunecompile.cli.main import app

if __name__ == "__main__":
    app()

"""`python -m tunecompile`: the command `tunecompile`, with the Python that is named."""

from tunecompile.cli.main import app

if __name__ == "__main__":
    app(prog_name="tunecompile")

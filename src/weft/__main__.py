"""`python -m weft`: the command line where the script is not installed."""

from weft.cli.main import run

if __name__ == "__main__":
    run()

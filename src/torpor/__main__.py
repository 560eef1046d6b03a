"""`python -m torpor`, which is also what `torchrun -m torpor` starts on every rank."""

from torpor.cli import app

if __name__ == "__main__":
    app()

"""The command: `python -m wholebatch.integrations.grad_cache`, also under torchrun, with a program."""

from .._command import run_command

if __name__ == "__main__":
    run_command("grad_cache")

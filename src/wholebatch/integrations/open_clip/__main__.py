"""The command: `python -m wholebatch.integrations.open_clip`, also under torchrun, with open_clip's options."""

from .._command import run_command

if __name__ == "__main__":
    run_command("open_clip")

"""The file for ms-swift's `--external_plugins`: its import replaces the loss `infonce`."""

from wholebatch.integrations.ms_swift import enable

enable()

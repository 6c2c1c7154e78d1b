"""The folder of the plugin for ms-swift, which puts it on sys.path: so it holds no module with a common name."""

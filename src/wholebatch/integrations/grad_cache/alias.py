"""Import this module, before the first import of grad_cache, to install the alias: see `install`."""

from . import install

install()

"""HTTPS: the certificate as its files have it now.

Owns: the effect of a reload.
Never: HTTP (connections.py), or the checks of the files (engine/options/edge_config.py).
"""

from engine.options.edge_config import TlsFiles


class LiveTls:
    """The TLS context of all connections; each new one uses the certificate that was loaded last."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises OptionError."""
        self.files = files
        self.context = files.load()

    def reload(self) -> None:
        """Take over certificate and key. The authorities stay: a context cannot forget any.

        Raises OptionError, and keeps the present ones then.
        """
        self.files.load()  # elsewhere first: a context that gets a certificate without its key has neither
        self.files.show_by(self.context)

"""HTTPS: the certificate as its files have it now, and a server whose connections begin with a handshake.

Owns: the time limits of the handshake and of its counterpart at the end, and the effect of a reload.
Never: HTTP (connections.py), or the checks of the files (engine/options/edge_config.py).
"""

import asyncio
import socket

import uvicorn

from engine.options.edge_config import TlsFiles

HANDSHAKE_TIMEOUT_S = 10.0
_GOODBYE_S = 5.0
"""Seconds in which a client may confirm the end of an encrypted connection."""


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


class TlsServer(uvicorn.Server):
    """A server with its own limit for the handshake: uvicorn waits a minute, and has no option for it."""

    def __init__(self, config: uvicorn.Config, tls: LiveTls) -> None:
        super().__init__(config)
        self._tls = tls
        self.handshake_timeout_s = HANDSHAKE_TIMEOUT_S

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start serving the given sockets, as the base class does without TLS."""
        await self.lifespan.startup()
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(
                self._new_connection,
                sock=listener,
                ssl=self._tls.context,
                ssl_handshake_timeout=self.handshake_timeout_s,
                ssl_shutdown_timeout=_GOODBYE_S,
                backlog=self.config.backlog,
            )
            for listener in sockets or ()
        ]
        self.started = True

    def _new_connection(self) -> asyncio.Protocol:
        # uvicorn declares the type of protocols in general.
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

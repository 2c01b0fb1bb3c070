"""The options for addresses, keys, TLS and the limits of one machine, and the configuration they resolve to.

Never: opens a port, or keeps keys or certificates, which are read again where they are used.
"""

import ipaddress
import re
import socket
import ssl
import stat
from dataclasses import dataclass
from enum import Enum
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import urlsplit

from engine.options.declaration import Arity, Group, OptionError, declared, refuse_given
from engine.options.values import Bytes, Choice, Count, Fraction, Pattern, Switch, Text

_MAX_SOCKET_PATH_BYTES = 107  # the kernel's sun_path
_TRACES_FLAG = "--otlp-traces-endpoint"
_OF_TRACES = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")
_ANY = "*"
ADMIN_HOST = "127.0.0.1"
"""Address of the port of the admin routes."""
_ORIGIN = re.compile(r"\*|https?://[A-Za-z0-9.-]+(:\d{1,5})?|https?://\[[0-9a-f:]+\](:\d{1,5})?")

_keys = partial(declared, Group.KEYS)
_address = partial(declared, Group.ADDRESS)
_replies = partial(declared, Group.REPLIES)
_requests = partial(declared, Group.REQUESTS)


@dataclass(frozen=True, kw_only=True)
class EdgeOptions:
    """The options for addresses, keys, TLS and the limits of one machine: a part of Options."""

    api_keys_file: str | None = _keys(
        Text(metavar="FILE"),
        "YAML list of keys by their SHA-256, each with its limits; read again when it changes. `tokenyard "
        "keys new` makes an entry.",
        open_default="no file",
    )
    metrics_auth: bool = _keys(
        Switch(),
        "Ask for a key at /metrics too. Probes never need one.",
        default=False,
    )
    admin_port: int | None = _address(
        Count(low=0, high=65535, metavar="PORT"),
        "Serve the admin routes on this port of 127.0.0.1 instead of --port, also without --enable-admin; 0 "
        "takes any free one.",
        open_default="no port of their own",
    )
    tls_cert: str | None = _keys(
        Text(metavar="FILE"),
        "Certificate chain in PEM, for HTTPS. Read again when it changes; open connections stay.",
        open_default="no TLS",
    )
    tls_key: str | None = _keys(
        Text(metavar="FILE"),
        "Private key of --tls-cert, in PEM, not encrypted.",
        open_default="in the certificate's file",
    )
    tls_client_ca: str | None = _keys(
        Text(metavar="FILE"),
        "Certificate authorities in PEM. Every client, probes included, must show a certificate signed by "
        "one of them (mTLS). Read at the start only.",
        open_default="clients need no certificate",
    )
    cors_origin: tuple[str, ...] = _address(
        Text(metavar="ORIGIN"),
        "Origin whose web pages may call this server, such as https://app.example; * allows all. Repeat it "
        "for several. Cookies are never allowed.",
        arity=Arity.MANY,
        open_default="none",
    )
    allowed_host: tuple[str, ...] = _address(
        Pattern(
            pattern=r"\*|[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?",
            form="llm.example.com, or *",
            metavar="NAME",
        ),
        "Name under which clients may reach a server without keys, besides localhost, addresses and names "
        "of --cors-origin; elsewhere than on a loopback address it answers to names that no stranger can own "
        "too: the machine's, those without a dot, those under local, internal, svc, lan and the like. So a "
        "page of a foreign name that points to this machine cannot read what the server shows. Repeat it for "
        "several; * allows all. The server's own page may be opened by all these names but those that only "
        "* allows.",
        arity=Arity.MANY,
        open_default="none",
    )
    state_folder: str | None = _replies(
        Text(metavar="FOLDER"),
        "Keep files, batches (/v1/files, /v1/batches) and responses in the background in a SQLite database "
        "in this folder, through a restart; one server to a folder. Each answer is on disk before it counts.",
        open_default="no files and batches",
    )
    state_max_size: int = _replies(
        Bytes(low=2**20, high=2**44),
        "Uploads and new batches are refused while all that is kept in the state folder is larger. A batch "
        "under way goes on until the files of its key alone are as large.",
        default=4 * 2**30,
    )
    page: str | None = _address(
        Choice(words=("on", "off")),
        "Serve a web page at / with a chat and a live view of the scheduler. The live view needs a key that "
        "may administer; without keys it is shown on a loopback address only, or with --enable-admin.",
        open_default="on at a loopback address or with API keys, else off",
    )
    root_path: str | None = _address(
        Pattern(pattern=r"(/[A-Za-z0-9._~-]+){1,8}/?", form="a path such as /llm", metavar="PATH"),
        "Prefix under which a proxy shows this server. Paths are served with it and without it, and the API "
        "description names it.",
        open_default="no prefix",
    )
    uds: str | None = _address(
        Text(metavar="PATH"),
        "Unix socket to listen on instead of --host and --port, for a proxy on this machine. Its owner and "
        "group may connect; without keys they may do what any client may.",
        open_default="none",
    )
    max_memory_use: float = _requests(
        Fraction(low=0.1, high=1.0),
        "Refuse new requests with 503 from this share of memory in use: of the machine, its control group, "
        "or what a process may map (ulimit), whichever is fuller; and a large body where too little is left "
        "for it. File caches do not count. 1 never refuses.",
        default=0.95,
    )
    host: str = _address(
        Text(metavar="HOST"),
        "Address to listen on; 0.0.0.0 is every IPv4 address of this machine.",
        default="127.0.0.1",
    )
    port: int = _address(
        Count(low=0, high=65535, metavar="PORT"),
        "Port to listen on; 0 takes any free one.",
        default=8000,
    )
    api_key: tuple[str, ...] = _keys(
        Text(metavar="KEY"),
        "Key that clients must send as a bearer token. Repeat it for several. A flag can be seen by other "
        "users of this machine: prefer TOKENYARD_API_KEY (separated by commas).",
        arity=Arity.MANY,
        is_secret=True,
        open_default="no key needed",
    )
    allow_unauthenticated: bool = _keys(
        Switch(),
        "Listen on addresses that other machines can reach although there is no API key.",
        default=False,
    )
    enable_admin: bool = _address(
        Switch(),
        "Answer /admin/: what every live request does or waits for, with the names of tenants, a reset of "
        "the prefix cache, and the page's live view. With keys it needs one that may administer.",
        default=False,
    )
    health_port: int | None = _address(
        Count(low=0, high=65535, metavar="PORT"),
        "One more port for /health, /health/ready and /health/live, answered by a thread of its own however "
        "busy the API is, without TLS; 0 takes any free one.",
        open_default="probes ask --port",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """The files of the certificate, its key and the client authorities, all in PEM."""

    cert: str
    key: str | None
    """The key's file; None: the key is in the certificate's file."""
    client_ca: str | None
    """The client authorities; None: clients need no certificate."""

    def load(self) -> ssl.SSLContext:
        """Make a context for servers. Raises OptionError, which names the file."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        self.show_by(context)
        if self.client_ca is not None:
            try:
                context.load_verify_locations(self.client_ca)
            except (OSError, ValueError) as error:
                what, why = f"--tls-client-ca {self.client_ca}", _reason(error, "no certificates in PEM")
                raise OptionError(what, why, "correct the file, or name another") from error
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def show_by(self, context: ssl.SSLContext) -> None:
        """Load this certificate into `context`. Raises OptionError; the context may have none then."""
        try:
            # An encrypted key would make the library ask for its password on the terminal.
            context.load_cert_chain(self.cert, self.key, password=lambda: "")
        except (OSError, ValueError) as error:
            files = f"--tls-cert {self.cert}" + (f" --tls-key {self.key}" if self.key else "")
            why = _reason(error, "no certificate and key that belong together, in PEM and not encrypted")
            raise OptionError(files, why, "correct the files, or name others") from error

    def key_can_be_read_by_others(self) -> bool:
        """Whether other users of this machine can read the key, and so pose as this server."""
        return bool(Path(self.key or self.cert).stat().st_mode & stat.S_IROTH)

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(path for path in (self.cert, self.key, self.client_ca) if path is not None)


class PageParts(Enum):
    """Parts of the web page that the main port serves."""

    OFF = "off"
    CHAT = "chat"
    """All but the live view, which names the requests and tenants of all clients."""
    YARD = "yard"
    """The live view too."""


class OtherHosts(Enum):
    """Further names in `Host` that a server without keys answers to."""

    LOCAL = "local"
    """Addresses and localhost: others on the link can claim a name without a dot, or under .local."""
    PRIVATE = "private"
    """Names that cannot be registered too: machines on the link reach the server anyway."""
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRule:
    """Names in `Host` that a port without keys answers to."""

    names: frozenset[str]
    """Names of the server, in lower case."""
    others: OtherHosts


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeConfig:
    """The resolved EdgeOptions: access, ports, TLS and limits."""

    api_keys_file: str | None
    metrics_auth: bool
    admin_port: int | None
    """Port of the admin routes, on ADMIN_HOST; None: no port of their own."""
    tls: TlsFiles | None
    cors_origins: tuple[str, ...]
    """Origins whose pages may call; empty: none."""
    hosts: HostRule
    admin_hosts: HostRule
    """The rule of the admin routes' own port."""
    state_folder: str | None
    """Folder of files and batches; None: there are none."""
    state_max_bytes: int
    page: PageParts
    root_path: str
    """Prefix that a proxy puts before paths, without a slash at its end; empty: none."""
    uds: str | None
    """Path of the Unix socket that is listened on in the place of host and port."""
    max_memory_use: float
    """Share of memory in use above which requests are refused; 1: no limit."""


def edge_config(options: EdgeOptions, *, node: int) -> EdgeConfig:
    """Check and resolve the options of a node. Raises OptionError."""
    if node == 0:  # the others listen nowhere for clients, and need no API key
        _check_access(options)
    _check_health_port(options)
    tls = _tls(options)
    if options.api_keys_file is not None:
        # Not at the top: most starts have no file, and --help must not wait for its reader.
        from engine.options.api_keys import KeysFile

        KeysFile(options.api_keys_file).read()
    for origin in options.cors_origin:
        if not _ORIGIN.fullmatch(origin):
            raise OptionError(f"--cors-origin {origin}", "it is no origin", "write https://app.example, or *")
    return EdgeConfig(
        api_keys_file=options.api_keys_file,
        metrics_auth=options.metrics_auth,
        admin_port=options.admin_port,
        tls=tls,
        cors_origins=options.cors_origin,
        hosts=_host_rule(options, None if options.uds is not None else options.host),
        admin_hosts=_host_rule(options, ADMIN_HOST),
        state_folder=options.state_folder,
        state_max_bytes=options.state_max_size,
        page=_page(options),
        root_path=(options.root_path or "").rstrip("/"),
        uds=None if options.uds is None else _socket_path(options),
        max_memory_use=options.max_memory_use,
    )


def _check_access(options: EdgeOptions) -> None:
    has_key = bool(options.api_key) or options.api_keys_file is not None
    if options.metrics_auth and not has_key:
        raise OptionError("--metrics-auth", "there is no API key to ask for", "set TOKENYARD_API_KEY")
    if options.admin_port and options.admin_port == options.port:
        raise OptionError(
            f"--admin-port {options.admin_port}", "it is --port too", "choose another, or --enable-admin"
        )
    if has_key or options.allow_unauthenticated or options.uds is not None or _is_loopback(options.host):
        return
    raise OptionError(
        f"--host {options.host} without an API key",
        "everybody who can reach this machine could use the model",
        "set TOKENYARD_API_KEY, or give --allow-unauthenticated if that is what you want",
    )


def _check_health_port(options: EdgeOptions) -> None:
    for flag, port in (("--port", options.port), ("--admin-port", options.admin_port)):
        if options.health_port and options.health_port == port:
            raise OptionError(
                f"--health-port {port}", f"it is {flag} too", "choose another, or 0 for any that is free"
            )


def _page(options: EdgeOptions) -> PageParts:
    # A Unix socket is for a proxy, whose clients only the operator knows.
    is_local = options.uds is None and _is_loopback(options.host)
    is_private = bool(options.api_key) or options.api_keys_file is not None or is_local
    if options.page == "off" or (options.page is None and not is_private):
        return PageParts.OFF
    # With a port for administration, the live view is served there.
    return PageParts.YARD if is_private and options.admin_port is None else PageParts.CHAT


def _host_rule(options: EdgeOptions, address: str | None) -> HostRule:
    """Make the rule of a port on `address`, or of a Unix socket if it is None."""
    names = set(options.allowed_host)
    others = OtherHosts.LOCAL if address is not None and _is_loopback(address) else OtherHosts.PRIVATE
    if _ANY in names:
        others = OtherHosts.ALL
    if others is not OtherHosts.LOCAL:
        names |= {address or "", socket.gethostname()}
    return HostRule(
        names=frozenset(name.lower().rstrip(".") for name in names) - {_ANY, ""},
        others=others,
    )


def _socket_path(options: EdgeOptions) -> str:
    if options.tls_cert is not None:
        raise OptionError("--uds with --tls-cert", "a Unix socket needs no encryption", "give one of them")
    path = Path(str(options.uds)).expanduser().absolute()
    if len(str(path).encode()) > _MAX_SOCKET_PATH_BYTES:
        raise OptionError(
            f"--uds {path}",
            f"it is longer than {_MAX_SOCKET_PATH_BYTES} bytes",
            "use a shorter path",
        )
    if not path.parent.is_dir():
        raise OptionError(f"--uds {path}", "there is no such folder", "make it first")
    return str(path)


def _tls(options: EdgeOptions) -> TlsFiles | None:
    if options.tls_cert is None:
        others = {"--tls-key": options.tls_key, "--tls-client-ca": options.tls_client_ca}
        refuse_given(others, "without --tls-cert nothing is encrypted", "give the certificate too")
        return None
    files = TlsFiles(cert=options.tls_cert, key=options.tls_key, client_ca=options.tls_client_ca)
    files.load()
    return files


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _reason(error: Exception, otherwise: str) -> str:
    """Return the operating system's reason, or `otherwise` for an error of the TLS library."""
    is_of_the_file = isinstance(error, OSError) and not isinstance(error, ssl.SSLError) and error.strerror
    return str(error.strerror).lower() if is_of_the_file and isinstance(error, OSError) else otherwise


def check_traces_endpoint(url: str | None) -> None:
    """Check the address; None is no spans. Raises OptionError."""
    if url is None:
        return
    _check_traces_url(url)
    if not all(map(_is_installed, _OF_TRACES)):
        raise OptionError(
            _TRACES_FLAG,
            "OpenTelemetry is not installed",
            "pip install 'tokenyard[otel]', or leave the option out",
        )


def _check_traces_url(url: str) -> None:
    """Check the address without repeating it, since it may hold a password."""
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:
        has_host = False
    if not has_host or parts.scheme not in ("http", "https"):
        raise OptionError(
            _TRACES_FLAG, "it is not an address of HTTP", "write http://localhost:4318/v1/traces, say"
        )
    if parts.username or parts.password:
        raise OptionError(
            _TRACES_FLAG,
            "a password in it would be shown where options are shown",
            "set OTEL_EXPORTER_OTLP_TRACES_HEADERS for the collector's key",
        )
    if parts.path in ("", "/"):
        raise OptionError(
            _TRACES_FLAG,
            "it has no path, and is used as it stands",
            "end it with /v1/traces, where collectors listen",
        )


def _is_installed(distribution: str) -> bool:
    """Look up the distribution's metadata: a search for the module would import its parents."""
    try:
        return bool(version(distribution))
    except PackageNotFoundError:
        return False

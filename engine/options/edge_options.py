"""The options for access, TLS and the limits of one machine.

Owns: names, defaults, bounds and descriptions, like options.py, whose Options has all of these fields.
Never: checks them against each other (edge_config.py).
"""

from dataclasses import dataclass

from engine.options.declaration import Arity, Group, declared
from engine.options.values import Bytes, Choice, Count, Fraction, Pattern, Switch, Text


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeOptions:
    """Part of Options."""

    api_keys_file: str | None = declared(
        Group.KEYS,
        Text(metavar="FILE"),
        "YAML list of keys by their SHA-256, each with its limits; read again when it changes. `tokenyard "
        "keys new` makes an entry.",
        open_default="no file",
        default=None,
    )
    metrics_auth: bool = declared(
        Group.KEYS,
        Switch(),
        "Ask for a key at /metrics too. Probes never need one.",
        default=False,
    )
    admin_port: int | None = declared(
        Group.ADDRESS,
        Count(low=0, high=65535, metavar="PORT"),
        "Serve the admin routes on this port of 127.0.0.1 instead of --port, also without --enable-admin; 0 "
        "takes any free one.",
        open_default="no port of their own",
        default=None,
    )
    tls_cert: str | None = declared(
        Group.KEYS,
        Text(metavar="FILE"),
        "Certificate chain in PEM, for HTTPS. Read again when it changes; open connections stay.",
        open_default="no TLS",
        default=None,
    )
    tls_key: str | None = declared(
        Group.KEYS,
        Text(metavar="FILE"),
        "Private key of --tls-cert, in PEM, not encrypted.",
        open_default="in the certificate's file",
        default=None,
    )
    tls_client_ca: str | None = declared(
        Group.KEYS,
        Text(metavar="FILE"),
        "Certificate authorities in PEM. Every client, probes included, must show a certificate signed by "
        "one of them (mTLS). Read at the start only.",
        open_default="clients need no certificate",
        default=None,
    )
    cors_origin: tuple[str, ...] = declared(
        Group.ADDRESS,
        Text(metavar="ORIGIN"),
        "Origin whose web pages may call this server, such as https://app.example; * allows all. Repeat it "
        "for several. Cookies are never allowed.",
        arity=Arity.MANY,
        open_default="none",
        default=(),
    )
    allowed_host: tuple[str, ...] = declared(
        Group.ADDRESS,
        Pattern(
            pattern=r"\*|[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?",
            form="llm.example.com, or *",
            metavar="NAME",
        ),
        "Name under which clients may reach a server without keys, beside localhost, addresses and the names "
        "of --cors-origin; elsewhere than on a loopback address also beside names that nobody else can own: "
        "the machine's, those without a dot, those under local, internal, svc, lan and the like. A page of a "
        "foreign name that points to this machine would else read what the server shows. Repeat it for "
        "several; * allows all. The server's own page may be opened by all these names but those that only "
        "* allows.",
        arity=Arity.MANY,
        open_default="none",
        default=(),
    )
    state_folder: str | None = declared(
        Group.REPLIES,
        Text(metavar="FOLDER"),
        "Keep files and batches (/v1/files, /v1/batches) in a SQLite database in this folder, so that they "
        "survive a restart; one server to a folder. Each answer is written to disk before it counts.",
        open_default="no files and batches",
        default=None,
    )
    state_max_size: int = declared(
        Group.REPLIES,
        Bytes(low=2**20, high=2**44),
        "Uploads are refused when all files in the state folder would be larger together. Answers of batches "
        "under way are kept all the same.",
        default=4 * 2**30,
    )
    page: str | None = declared(
        Group.ADDRESS,
        Choice(words=("on", "off")),
        "Serve a web page at / with a chat and a live view of the scheduler. The live view needs a key that "
        "may administer; without keys it is shown on a loopback address only, or with --enable-admin.",
        open_default="on at a loopback address or with API keys, else off",
        default=None,
    )
    root_path: str | None = declared(
        Group.ADDRESS,
        Pattern(pattern=r"(/[A-Za-z0-9._~-]+){1,8}/?", form="a path such as /llm", metavar="PATH"),
        "Prefix under which a proxy shows this server. Paths are served with it and without it, and the API "
        "description names it.",
        open_default="no prefix",
        default=None,
    )
    uds: str | None = declared(
        Group.ADDRESS,
        Text(metavar="PATH"),
        "Unix socket to listen on instead of --host and --port, for a proxy on this machine. Its owner and "
        "group may connect; without keys they may do what any client may.",
        open_default="none",
        default=None,
    )
    max_memory_use: float = declared(
        Group.REQUESTS,
        Fraction(low=0.1, high=1.0),
        "Refuse new requests with 503 from this share of memory in use: of the machine, its control group, "
        "or what a process may map (ulimit), whichever is fuller; and a large body where too little is left "
        "for it. File caches do not count. 1 never refuses.",
        default=0.95,
    )

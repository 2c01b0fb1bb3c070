"""The options for pictures, and the configuration that they resolve to."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from engine.options.declaration import Arity, Group, OptionError, declared
from engine.options.values import Count, Text

_requests = partial(declared, Group.REQUESTS)

_MAX_PICTURES = 64
_DOMAIN = re.compile(
    r"(?:(https?)://)?((?:[a-z0-9](?:[a-z0-9-]*[a-z0-9])?\.)*[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)"
)


@dataclass(frozen=True, kw_only=True)
class MediaOptions:
    """The options for pictures: a part of Options."""

    limit_mm_per_prompt: str | None = _requests(
        Text(metavar="JSON"),
        'Pictures of one request at most, as {"image": 8}; 0 takes none. How many are usual depends on the '
        "clients: agents send each screenshot again with every turn.",
        open_default=f"{_MAX_PICTURES}",
    )
    max_image_pixels: int = _requests(
        Count(low=1, high=2**28, metavar="PIXELS"),
        "Pixels of a picture at most, width times height, as its header says; it is judged before it is "
        "decoded. More takes memory and time for decoding; what the model sees is smaller anyway.",
        default=33_177_600,
    )
    allowed_media_domains: tuple[str, ...] = _requests(
        Text(metavar="HOST"),
        "Host that pictures are fetched from for requests, by https; written as http://HOST, also by http. "
        "Repeat it for several. Private addresses and redirects are refused whatever it is. Any default "
        "would let requests read from hosts that this machine reaches.",
        arity=Arity.MANY,
        open_default="none: pictures come within requests",
    )
    mm_processor_kwargs: str | None = _requests(
        Text(metavar="JSON"),
        "Values for the checkpoint's image processor, such as "
        '{"min_pixels": 65536, "max_pixels": 1048576}: fewer pixels, fewer tokens, less detail. Each '
        "processor has its own, so that no default fits.",
        open_default="those of the checkpoint",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaConfig:
    max_pictures: int = _MAX_PICTURES
    """Pictures of one request."""
    max_pixels: int = 33_177_600
    domains: tuple[str, ...] = ()
    """Hosts for https, in small letters."""
    plain_domains: tuple[str, ...] = ()
    """Hosts of these that may be asked by http."""
    processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Values for the image processor."""


def media_config(options: MediaOptions) -> MediaConfig:
    """Check and resolve the options. Raises OptionError."""
    limits = _json_object("--limit-mm-per-prompt", options.limit_mm_per_prompt, '{"image": 8}')
    num = limits.pop("image", _MAX_PICTURES)
    others = [name for name, value in limits.items() if value != 0]
    if others or not isinstance(num, int) or isinstance(num, bool) or not 0 <= num <= _MAX_PICTURES:
        raise OptionError(
            "--limit-mm-per-prompt",
            f"{others[0]!r} is not served" if others else f"image must be from 0 to {_MAX_PICTURES}",
            'write {"image": 8}, say',
        )
    found = [(name, _DOMAIN.fullmatch(name.lower())) for name in options.allowed_media_domains]
    for name, match in found:
        if match is None:
            raise OptionError(
                f"--allowed-media-domains {name}", "is no host", "write pictures.example.com, without a path"
            )
    hosts = [(match[1], match[2]) for _, match in found if match is not None]
    return MediaConfig(
        max_pictures=num,
        max_pixels=options.max_image_pixels,
        domains=tuple(host for _, host in hosts),
        plain_domains=tuple(host for scheme, host in hosts if scheme == "http"),
        processor_kwargs=_json_object(
            "--mm-processor-kwargs", options.mm_processor_kwargs, '{"max_pixels": 1048576}'
        ),
    )


def _json_object(flag: str, text: str | None, example: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise OptionError(flag, f"is no JSON: {error}", f"write {example}, say") from error
    if not isinstance(found, dict):
        raise OptionError(flag, "is no JSON object", f"write {example}, say")
    return found

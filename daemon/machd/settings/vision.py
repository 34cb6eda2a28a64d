"""The section ``vision``: bounds on images and videos, and where they may be fetched from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from machd.settings.section import Mark, SettingsSection
from machd.settings.texts import Text, UrlHost


class VisionSettings(SettingsSection):
    """Images and videos in requests, for models that take them."""

    max_images: int = Field(
        default=8,
        ge=0,
        le=1024,
        description="Images and videos that one request may have together; beyond it 400.",
    )
    in_tool_results: Literal["omit", "refuse"] = Field(
        default="omit",
        description="An image or video in a tool's result, where the model takes text only: omit "
        "puts [image] in its place and counts it in the header X-Omitted-Images; refuse answers 400.",
    )
    max_image_pixels: int = Field(
        default=16_777_216,
        ge=1024,
        le=1_073_741_824,
        description="Pixels of one image, or of one frame of a video, before it is scaled for the "
        "model; beyond it 400.",
    )
    max_image_bytes: int = Field(
        default=20_000_000,
        ge=1024,
        le=1_073_741_824,
        description="Bytes of one encoded image or video; beyond it 400. Base64 in a body does not "
        "count against limits.max_body_bytes; such a body may have 64 MiB.",
    )
    max_frames: int = Field(
        default=64,
        ge=1,
        le=4096,
        description="Frames that are taken of one video; a request that asks for more gets these.",
    )
    max_decode_s: float = Field(
        default=10.0,
        ge=0.1,
        le=3600.0,
        description="Seconds that the decoding of one image or video may take; then 400.",
    )
    allow_urls: bool = Field(
        default=False,
        description="Fetch images and videos that a request names by https: URLs, from the hosts "
        "of vision.url_hosts only. Otherwise such a URL is refused.",
    )
    url_hosts: tuple[UrlHost, ...] = Field(
        default=(),
        examples=[["images.example.org"]],
        description="Hosts that https: URLs of images may name, each written out in full. The "
        "addresses of a host have to be public ones.",
    )
    allow_files: Text | None = Field(
        default=None,
        examples=["/srv/images"],
        description="Directory whose files a request may name by file: URLs; links that lead out "
        "of it are refused. Without it every file: URL is.",
    )
    cache_mb: Annotated[int, Mark.RESTART] = Field(
        default=512,
        ge=0,
        le=1_000_000_000,
        description="Memory for encoded images and videos that may be sent again, in units of "
        "1,000,000 bytes; 0 keeps none.",
    )

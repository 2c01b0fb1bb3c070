"""Memory that a model with eyes holds back for the rows of pictures."""

from types import SimpleNamespace
from typing import Any

from tests.worker.pictures.seeing import FAMILIES
from worker.pictures.eyes import MOST_PLACES, bytes_of_rows


def test_rows_of_pictures_are_counted_with_those_that_are_added_behind_layers() -> None:
    model: Any = SimpleNamespace(
        config=FAMILIES["qwen3_vl"].config(),
        dtype=SimpleNamespace(itemsize=2),
        get_image_features=None,
    )
    assert bytes_of_rows(model) == MOST_PLACES * 64 * (1 + 2) * 2
    model.config = model.config.text_config
    assert bytes_of_rows(model) == 0

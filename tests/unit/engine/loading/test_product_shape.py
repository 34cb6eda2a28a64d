"""The shape that BLAS libraries are compared with is the model's own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.clocks.polling import CEILING_S

from machd.engine.backend.blas_trial import ProductShape
from machd.engine.loading.product_shape import product_shape, shape_of_config


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        ({"hidden_size": 576, "intermediate_size": 1536}, ProductShape(576, 1536)),
        ({"hidden_size": 64, "moe_intermediate_size": 32}, ProductShape(64, 32)),
        ({"d_model": 768}, ProductShape(768, 768)),
        (
            {"text_config": {"hidden_size": 96, "intermediate_size": 128}},
            ProductShape(96, 128),
        ),
        ({"hidden_size": 4096, "intermediate_size": 1 << 40}, ProductShape(4096, 2048)),
        ({"hidden_size": True, "intermediate_size": 8}, ProductShape()),
        ({"hidden_size": "big"}, ProductShape()),
        ({"text_config": []}, ProductShape()),
        ({}, ProductShape()),
    ],
)
def test_a_configuration_says_the_shape(config: dict[str, object], shape: ProductShape) -> None:
    """Hidden size by intermediate size, bounded; a default where the configuration does not say it."""
    assert shape_of_config(config) == shape


def test_a_directory_is_read_and_what_is_missing_is_not_an_error(tmp_path: Path) -> None:
    """A model that is not there, or cannot be read, is refused where it is loaded."""
    assert product_shape(str(tmp_path / "none"), cache_directory=tmp_path) == ProductShape()
    config = tmp_path / "config.json"
    config.write_text("not JSON", "utf-8")
    assert product_shape(str(tmp_path), cache_directory=tmp_path) == ProductShape()
    config.write_text(json.dumps({"hidden_size": 8, "intermediate_size": 16}), "utf-8")
    assert product_shape(str(tmp_path), cache_directory=tmp_path) == ProductShape(8, 16)


def test_the_shape_of_a_gguf_file_is_read_without_mlx(embedded_model_path: Path) -> None:
    """A BLAS can be chosen after it, which mlx's import would prevent."""
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from machd.engine.loading.product_shape import product_shape\n"
        "print(product_shape(sys.argv[1], cache_directory=Path()), 'mlx.core' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(embedded_model_path)],
        capture_output=True, text=True, check=True, timeout=CEILING_S,
    )  # fmt: skip
    assert done.stdout == "576 x 1536 False\n"
